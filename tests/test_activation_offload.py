"""What is saved goes to the host once and comes back with every bit."""

from __future__ import annotations

import gc
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from offloading import ITEM, Chain, reference, same, start, stepped
from simulated_copies import CopyingDevice, PromptCopies
from torchfast.memory import ActivationOffload, activation_offload, host_pool, saved_storage


@pytest.fixture
def device(monkeypatch):
    device = CopyingDevice()
    monkeypatch.setattr(activation_offload, "copy_streams_for", lambda _: device)
    monkeypatch.setattr(host_pool, "SLAB_BYTES", 1 << 14)
    yield device
    device.end()


@pytest.mark.parametrize("window", [0, ITEM, 3 * ITEM, 100 * ITEM])
def test_gradients_are_those_of_the_plain_step(device, window):
    model = Chain()
    offload = ActivationOffload(model, min_bytes=ITEM, window_bytes=window)
    expected = reference(model, start())
    for _ in range(3):
        assert same(device, stepped(device, model, offload), expected)
    sent = offload.counters()["offload_sent_bytes"]
    assert (sent > 0) == (window < 100 * ITEM)
    assert sent % ITEM == 0


def test_memory_is_free_while_it_is_on_the_host(device):
    model = Chain(depth=10)
    counts = []
    for window in (1000 * ITEM, ITEM):
        offload = ActivationOffload(model, min_bytes=ITEM, window_bytes=window)
        with device:
            x = (start() + 0.0).requires_grad_()
            with offload:
                loss = model(x).sum()
            counts.append(device.num_blocks())
        del loss, x
        gc.collect()
    plain, offloaded = counts
    assert plain >= 20
    assert offloaded <= 7


@pytest.mark.parametrize("window", [0, 3])
def test_what_is_needed_next_is_on_its_way_already(device, monkeypatch, window):
    model = Chain()
    offload = ActivationOffload(model, min_bytes=ITEM, window_bytes=window * ITEM)
    stepped(device, model, offload)
    order, fetch, bring = [], saved_storage.Lane.fetch, saved_storage.SavedStorage.bring

    def noted_fetch(lane, saved):
        order.append(("fetch", saved.index))
        fetch(lane, saved)

    def noted_bring(saved, ahead_bytes):
        order.append(("need", saved.index))
        return bring(saved, ahead_bytes)

    monkeypatch.setattr(saved_storage.Lane, "fetch", noted_fetch)
    monkeypatch.setattr(saved_storage.SavedStorage, "bring", noted_bring)
    stepped(device, model, offload)
    fetched = [index for kind, index in order if kind == "fetch"]
    assert sorted(fetched, reverse=True) == fetched == list(dict.fromkeys(fetched))  # each once
    for index in fetched:
        needs = order[: order.index(("fetch", index))].count(("need", index))
        ahead = order[order.index(("fetch", index)) : order.index(("need", index))]
        others = {other for kind, other in ahead if kind == "need"}
        assert needs == 0
        assert len(others) == max(0, window - 1) or index == fetched[0]


def test_a_steady_step_pins_nothing_and_holds_nothing(device):
    model = Chain()
    offload = ActivationOffload(model, min_bytes=ITEM, window_bytes=ITEM)
    stepped(device, model, offload)
    pinned = device.num_pinned
    assert pinned == 1
    for _ in range(5):
        stepped(device, model, offload)
    assert device.num_pinned == pinned
    assert offload._eager.pool.used_bytes == 0
    assert not offload._eager.flights
    assert device.num_blocks() == 0


def test_one_storage_goes_once(device):
    offload = ActivationOffload(Chain(1), min_bytes=ITEM, window_bytes=0)
    found = []
    with device:
        for context in (nullcontext(), offload):
            x = (start() + 0.0).requires_grad_()
            with context:
                y = x * 2.0
                ends = (y[:32].exp() * y[32:].exp()).sum()
                loss = (y.sin() * y.cos() + ends * y.view(8, 8).t().sin().sum()).sum()
            found += torch.autograd.grad(loss, [x])
    assert torch.equal(device.read(found[0]), device.read(found[1]))
    # y, its sine and its cosine, not y six times; what is half as large stays.
    assert offload.counters()["offload_sent_bytes"] <= 3 * ITEM


def test_retained_graphs_can_be_gone_through_again(device):
    model = Chain()
    offload = ActivationOffload(model, min_bytes=ITEM, window_bytes=ITEM)
    expected = reference(model, start())
    with device:
        x = (start() + 0.0).requires_grad_()
        with offload:
            loss = model(x).sum()
        for retain in (True, True, False):
            grads = torch.autograd.grad(loss, list(model.parameters()), retain_graph=retain)
            assert same(device, grads, expected)
    del loss, grads
    assert offload._eager.limbo or not offload._eager.pool.used_bytes
    stepped(device, model, offload)
    assert offload._eager.pool.used_bytes == 0


def test_the_backward_can_be_differentiated(device):
    def second(x, context):
        with context:
            y = (x * x).sin().exp().sum()
            (first,) = torch.autograd.grad(y, [x], create_graph=True)
            return torch.autograd.grad((first * first).sum(), [x])[0]

    plain = start().requires_grad_()
    expected = second(plain, torch.enable_grad())
    offload = ActivationOffload(Chain(1), min_bytes=ITEM, window_bytes=0)
    with device:
        x = (start() + 0.0).requires_grad_()
        found = second(x, offload)
    assert torch.allclose(device.read(found), expected)
    assert offload.counters()["offload_sent_bytes"] > 0


@pytest.mark.parametrize("window", [0, 100 * ITEM])
@pytest.mark.parametrize("size", [ITEM, 10 * ITEM])  # sent and too small
def test_a_write_to_what_is_saved_is_an_error_as_without(device, window, size):
    offload = ActivationOffload(Chain(1), min_bytes=size, window_bytes=window)
    with device:
        x = (start() + 0.0).requires_grad_()
        with offload:
            y = x * 2.0
            z = y.sin() + 0.0
            z = z.exp().exp()
        y[3:5].mul_(2.0)
        with pytest.raises(
            RuntimeError, match=r"modified by an inplace operation.*at version 1 now"
        ):
            z.sum().backward()


def test_a_write_before_it_is_saved_again_is_another_content(device):
    offload = ActivationOffload(Chain(1), min_bytes=ITEM, window_bytes=0)
    with device:
        x = (start() + 0.0).requires_grad_()
        with offload:
            buffer = start() + 1.0
            first = (x * buffer).sin().sin()  # which sends the buffer to the host
            buffer.add_(1.0)
            second = (x * buffer).sum() + (x * buffer).sum()
            (grad,) = torch.autograd.grad(second, [x])
    assert torch.equal(device.read(grad), 2 * (start() + 1.0 + 1.0))
    with device, pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.sum().backward()


def test_parts_that_count_their_writes_for_themselves(monkeypatch):
    """The gates of a cell: each is written after those before it were copied, all once."""
    side = PromptCopies()
    monkeypatch.setattr(activation_offload, "copy_streams_for", lambda _: side)
    line = nn.Linear(8, 16)

    def loss():
        first, second, third, last = line(torch.ones(4, 8)).unsafe_chunk(4, 1)
        kept = first.sigmoid_() * line(torch.ones(4, 8)).exp().mean()  # so the gates are sent
        return (kept * second.sigmoid_() * third.tanh_() * last.sigmoid_()).sum()

    expected = torch.autograd.grad(loss(), line.parameters())
    offload = ActivationOffload(line, min_bytes=256, window_bytes=0)
    with offload:
        saved = loss()
    found = torch.autograd.grad(saved, line.parameters())
    assert all(map(torch.equal, found, expected))
    with offload:
        before = offload.counters()["offload_sent_bytes"]
        hidden = line(torch.ones(4, 8)).relu_()  # what counts for both is still sent once
        (hidden * hidden.view(-1, 8).view(4, 16)).exp()
    assert offload.counters()["offload_sent_bytes"] == before + hidden.nbytes


def test_outputs_that_their_own_node_saves_go_away_without_the_collector(device):
    offload = ActivationOffload(Chain(1), min_bytes=ITEM, window_bytes=0)
    small = ActivationOffload(Chain(1), min_bytes=100 * ITEM)
    gc.collect()
    gc.disable()
    try:
        with device:
            for context in (offload, small):
                x = (start() + 0.0).requires_grad_()
                with context:
                    y = x.exp().exp()
                assert device.num_blocks() > 0
                del x, y
                assert device.num_blocks() == len(offload._eager.flights)  # under way to the host
    finally:
        gc.enable()


def test_parameters_and_buffers_stay(device):
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            with device:
                self.weight = nn.Parameter(start().reshape(8, 8) + 0.0)
                self.register_buffer("table", start() + 0.0)

        def forward(self, x):
            return (x * self.table).reshape(8, 8) @ self.weight.t()

    model = Layer()
    offload = ActivationOffload(model, min_bytes=1, window_bytes=0)
    with device:
        x = (start() + 0.0).requires_grad_()
        with offload:
            loss = model(x).sum()
    assert offload.counters()["offload_sent_bytes"] == 0
    loss.backward()


def test_no_room_on_the_host_leaves_it_on_the_device(device, monkeypatch):
    model = Chain()
    offload = ActivationOffload(model, min_bytes=ITEM, window_bytes=0, max_host_bytes=0)
    assert same(device, stepped(device, model, offload), reference(model, start()))
    counters = offload.counters()
    assert counters["offload_sent_bytes"] == 0 == counters["offload_host_bytes"]
    assert counters["offload_kept_no_room_bytes"] > 0


def test_max_bytes_sends_the_earliest(device):
    model = Chain()
    offload = ActivationOffload(model, min_bytes=ITEM, window_bytes=0, max_bytes=3 * ITEM)
    for _ in range(2):
        assert same(device, stepped(device, model, offload), reference(model, start()))
    assert offload.counters()["offload_sent_bytes"] == 2 * 3 * ITEM


def test_what_max_bytes_lets_go_leaves_the_device(device):
    model = Chain()
    offload = ActivationOffload(model, min_bytes=ITEM, window_bytes=2 * ITEM, max_bytes=3 * ITEM)
    with device:
        x = (start() + 0.0).requires_grad_()
        with offload:
            loss = model(x).sum()
            # The two that were there last in place of newer ones stay; all that was sent has gone.
            assert [flight.copied for flight in offload._eager.flights] == [None, None]
        grads = torch.autograd.grad(loss, list(model.parameters()))
    assert same(device, grads, reference(model, start()))


def test_the_window_is_what_one_block_saved_before(device):
    model = nn.Sequential(*(Chain(2) for _ in range(4)))
    offload = ActivationOffload(model, min_bytes=ITEM)
    stepped(device, model, offload)
    assert offload.counters()["offload_sent_bytes"] == 0  # all of it fits into the first window
    saved = offload._saved_bytes
    assert saved == 16 * ITEM
    stepped(device, model, offload)
    assert offload.counters()["offload_sent_bytes"] == 12 * ITEM


def test_what_is_saved_on_another_stream_stays(device):
    model = Chain()
    offload = ActivationOffload(model, min_bytes=ITEM, window_bytes=0)
    other = device.new()
    with device:
        x = (start() + 0.0).requires_grad_()
        with offload:
            other.wait_event(device.main.record_event())
            with device.on(other):
                y = (x * 2.0).sin().sin()
            device.main.wait_event(other.record_event())
            loss = y.sum()
    assert offload.counters()["offload_sent_bytes"] == 0
    loss.backward()


def test_recompute_inside_sends_the_inputs_of_blocks_only(device):
    class Recomputed(Chain):
        def forward(self, x):
            for scale in self.scales:
                step = lambda x, scale=scale: (x * scale).sin().exp().sin()  # noqa: E731
                x = torch.utils.checkpoint.checkpoint(
                    step, x, use_reentrant=False, preserve_rng_state=False
                )
            return x

    model = Recomputed()
    offload = ActivationOffload(model, min_bytes=ITEM, window_bytes=0)
    assert same(device, stepped(device, model, offload), reference(model, start()))
    assert offload.counters()["offload_sent_bytes"] == 5 * ITEM  # of six the newest stays


def test_accumulated_micro_batches(device):
    model = Chain()
    offload = ActivationOffload(model, min_bytes=ITEM, window_bytes=ITEM)
    with device:
        for _ in range(3):
            x = (start() + 0.0).requires_grad_()
            with offload:
                loss = model(x).sum() / 3
            loss.backward()
    found = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    for _ in range(3):
        (model(start().requires_grad_()).sum() / 3).backward()
    assert same(device, found, [p.grad for p in model.parameters()])


def test_on_the_cpu_it_steps_aside():
    model = nn.Linear(4, 4)
    offload = ActivationOffload(model, min_bytes=1)
    with offload:
        loss = model(torch.ones(2, 4)).sum()
    loss.backward()
    assert offload.decision.outcome == "stepped aside"
    assert offload.counters()["offload_forwards"] == 0


def test_arguments():
    model = nn.Linear(1, 1)
    with pytest.raises(TypeError, match="model must be"):
        ActivationOffload(lambda x: x)
    with pytest.raises(TypeError, match="min_bytes must be an int"):
        ActivationOffload(model, min_bytes=1.5)
    with pytest.raises(ValueError, match="window_bytes must be >= 0"):
        ActivationOffload(model, window_bytes=-1)
    with pytest.raises(TypeError, match=r"has no argument 'window'.*'window_bytes'"):
        ActivationOffload(model, window=1)
    assert "min_bytes=5" in repr(ActivationOffload(model, min_bytes=5))
