"""On streams that are late nobody reads too early, and no memory is given out too early."""

from __future__ import annotations

import threading

import pytest
import torch

from offloading import ITEM, Chain, reference, same, start, stepped
from simulated_copies import CopyingDevice
from torchfast.memory import ActivationOffload, activation_offload, host_pool


@pytest.fixture
def device(monkeypatch):
    device = CopyingDevice()
    monkeypatch.setattr(activation_offload, "copy_streams_for", lambda _: device)
    monkeypatch.setattr(host_pool, "SLAB_BYTES", 1 << 14)
    yield device
    device.end()


@pytest.mark.parametrize("late", ["out", "back", "main"])
def test_no_stream_may_be_late(device, late):
    model = Chain()
    offload = ActivationOffload(model, min_bytes=ITEM, window_bytes=ITEM)
    expected = reference(model, start())
    stepped(device, model, offload)
    stream = device.main if late == "main" else getattr(offload._eager, late)
    for _ in range(2):
        stream.sleep(0.03)
        assert same(device, stepped(device, model, offload), expected)


def without(device, offload, name, monkeypatch):
    """Take away one of the waits that keep the order."""
    lane = offload._lane()
    if name == "out":
        lane.out.wait_event = lambda event: None
    elif name == "back":
        lane.back.wait_event = lambda event: None
    else:
        monkeypatch.setattr(device.main, "wait_event", lambda event: None)
    return lane


@pytest.mark.parametrize("name", ["out", "back", "main"])
def test_without_a_wait_it_is_wrong(device, name, monkeypatch):
    model = Chain()
    offload = ActivationOffload(model, min_bytes=ITEM, window_bytes=0)
    expected = reference(model, start())
    lane = without(device, offload, name, monkeypatch)
    # What the stream that does not wait would have to wait for.
    held = threading.Event()
    {"out": device.main, "back": lane.out, "main": lane.back}[name].enqueue(held.wait)
    found = stepped(device, model, offload)
    if name != "main":
        held.set()
    wrong = not same(device, found, expected)
    held.set()
    assert wrong


def test_two_forwards_before_their_backwards(device):
    model = Chain()
    offload = ActivationOffload(model, min_bytes=ITEM, window_bytes=ITEM)
    expected = reference(model, start())
    with device:
        losses = []
        for _ in range(2):
            x = (start() + 0.0).requires_grad_()
            with offload:
                losses.append(model(x).sum())
        for loss in losses:  # not the way back
            offload._eager.out.sleep(0.01)
            assert same(device, torch.autograd.grad(loss, list(model.parameters())), expected)


def test_a_graph_that_is_dropped_gives_its_memory_back_late(device):
    model = Chain()
    offload = ActivationOffload(model, min_bytes=ITEM, window_bytes=0)
    with device:
        x = (start() + 0.0).requires_grad_()
        with offload:
            lane = offload._eager
            lane.out.sleep(0.05)
            loss = model(x).sum()
        used = lane.pool.used_bytes
        del loss
        assert lane.pool.used_bytes == used  # copies into it are under way
    expected = reference(model, start())
    assert same(device, stepped(device, model, offload), expected)
    assert lane.pool.used_bytes == 0


def test_an_error_in_the_backward_leaves_the_next_step_right(device):
    model = Chain()
    offload = ActivationOffload(model, min_bytes=ITEM, window_bytes=ITEM)

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x + 0.0

        @staticmethod
        def backward(ctx, gradient):
            raise ZeroDivisionError

    with device:
        x = (start() + 0.0).requires_grad_()
        with offload:
            loss = model(Broken.apply(model(x))).sum()
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        del loss
    model.zero_grad()
    for _ in range(2):
        assert same(device, stepped(device, model, offload), reference(model, start()))
    assert offload._eager.pool.used_bytes == 0


def test_memory_that_was_fetched_and_not_read_is_given_out_behind_its_copy(device, monkeypatch):
    model = Chain()
    offload = ActivationOffload(model, min_bytes=ITEM, window_bytes=4 * ITEM)
    expected = reference(model, start())
    with device:
        x = (start() + 0.0).requires_grad_()
        with offload:
            hidden = model(x)
            loss = model(hidden).sum()
        lane = offload._eager
        fetch = lane.fetch

        def late(saved):
            lane.back.sleep(0.03)
            fetch(saved)

        monkeypatch.setattr(lane, "fetch", late)
        torch.autograd.grad(loss, [hidden])  # half of the way
        monkeypatch.undo()
        del loss, hidden, x
    assert same(device, stepped(device, model, offload), expected)


def test_a_forward_on_another_stream_leaves_the_order_of_the_first(device, monkeypatch):
    """Memory goes back to the stream that it came from, behind the copies out of it."""
    model = Chain()
    offload = ActivationOffload(model, min_bytes=ITEM, window_bytes=3 * ITEM)
    expected = reference(model, start())
    other = device.new()
    with device:
        x = (start() + 0.0).requires_grad_()
        with offload:
            lane = offload._eager
            send = lane.send

            def late(saved, **options):
                lane.out.sleep(0.05)
                return send(saved, **options)

            monkeypatch.setattr(lane, "send", late)
            loss = model(x).sum()
        assert lane.flights
        with device.on(other):
            lane.join(other)
        taken = [start() * k for k in range(1, 20)]  # the freed memory, if it was
        found = torch.autograd.grad(loss, list(model.parameters()))
    assert same(device, found, expected)
    del taken


def test_a_capture_takes_the_memory_of_the_warm_up_with_it(device):
    model = Chain()
    offload = ActivationOffload(model, min_bytes=ITEM, window_bytes=0)
    expected = reference(model, start())
    stepped(device, model, offload)
    pinned, pool = device.num_pinned, offload._eager.pool
    device.capturing = True
    for _ in range(2):  # micro-batches
        assert same(device, stepped(device, model, offload), expected)
    assert device.num_pinned == pinned
    (lane,) = offload._captured
    assert lane.pool is pool
    assert not lane.flights
    assert not lane.limbo
    device.capturing = False
    assert same(device, stepped(device, model, offload), expected)
    assert offload._eager.pool is not pool
    assert device.num_pinned == pinned + 1


def test_captures_share_the_limit_of_pinned_memory(device, monkeypatch):
    monkeypatch.setattr(host_pool, "SLAB_BYTES", 1 << 12)
    model, limit = Chain(), 1 << 13
    offload = ActivationOffload(model, min_bytes=ITEM, window_bytes=0, max_host_bytes=limit)
    expected = reference(model, start())
    for _ in range(4):
        for device.capturing in (False, True):
            assert same(device, stepped(device, model, offload), expected)
    assert 0 < offload.counters()["offload_host_bytes"] <= limit
    assert offload.counters()["offload_kept_no_room_bytes"] > 0
    device.capturing = False


def test_a_capture_without_a_warm_up_sends_nothing(device):
    model = Chain()
    offload = ActivationOffload(model, min_bytes=ITEM, window_bytes=0)
    device.capturing = True
    assert same(device, stepped(device, model, offload), reference(model, start()))
    assert device.num_pinned == 0
    assert offload.counters()["offload_kept_no_room_bytes"] > 0
