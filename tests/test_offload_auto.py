"""ActivationOffload(auto=True): measured in the first steps, hidden from then on, the same bits."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from offloading import (
    ALL,
    DEPTH,
    ITEM,
    WINDOW,
    Chain,
    auto,
    on,
    plain_s,
    reference,
    same,
    settled,
    start,
    step,
    stepped,
)
from simulated_copies import CopyingDevice, TimedCopies
from torchfast.memory import ActivationOffload, host_pool
from torchfast.memory.offload_timeline import Timeline


@pytest.fixture(autouse=True)
def small_slabs(monkeypatch):
    monkeypatch.setattr(host_pool, "SLAB_BYTES", 1 << 17)


@pytest.mark.parametrize("speed", [20.0, 1.0, 0.5, 0.3])
def test_a_step_takes_no_longer_than_without(monkeypatch, speed):
    """The bus carries so many of what an operation saves while that operation runs."""
    side, model = on(monkeypatch, TimedCopies(speed * ITEM)), Chain(DEPTH)
    offload = auto(model)
    assert settled(side, model, offload) == plain_s()
    choice = offload.choice
    assert choice.is_hidden
    assert choice.waited_ms == 0
    assert choice.compute_ms == plain_s() * 1e3
    assert choice.saved_bytes == ALL
    assert choice.out_bytes_per_s == pytest.approx(speed * ITEM)
    carried = speed * ITEM * 2 * DEPTH
    assert 0.5 * min(ALL, carried) < choice.sent_bytes <= min(ALL - 2 * WINDOW, carried)


@pytest.mark.parametrize("speed", [0.5, 0.3])
def test_without_it_a_slow_bus_is_waited_for(monkeypatch, speed):
    side, model = on(monkeypatch, TimedCopies(speed * ITEM)), Chain(DEPTH)
    offload = auto(model, auto=False)
    for _ in range(3):
        _, took_s = step(side, model, offload)
    assert took_s > 1.2 * plain_s()
    assert offload.choice is None


def test_a_way_back_that_is_slow(monkeypatch):
    side, model = on(monkeypatch, TimedCopies(20.0 * ITEM, back=0.3 * ITEM)), Chain(DEPTH)
    offload = auto(model)
    assert settled(side, model, offload) == plain_s()
    assert 0 < offload.choice.sent_bytes < 0.8 * ALL
    assert offload.choice.back_bytes_per_s == pytest.approx(0.3 * ITEM)


def test_what_was_chosen_is_what_is_sent_and_it_is_off_the_device(monkeypatch):
    side, model = on(monkeypatch, TimedCopies(0.5 * ITEM)), Chain(DEPTH)
    offload = auto(model)
    settled(side, model, offload)
    before = offload.counters()["offload_sent_bytes"]
    with side, offload:
        loss = model(start().requires_grad_()).sum()
        alive = [saved for held in offload._eager.flights if (saved := held.saved())]
    sent = offload.counters()["offload_sent_bytes"] - before
    assert sent == offload.choice.sent_bytes
    assert all(held.copied is None for held in offload._eager.flights)  # all of it has landed
    assert sum(saved.num_bytes for saved in alive) <= WINDOW
    del loss


def test_where_no_copy_hides_nothing_goes_and_that_is_said(monkeypatch):
    side, model = on(monkeypatch, TimedCopies(0.05 * ITEM)), Chain(DEPTH)
    offload = auto(model)
    assert "not measured yet" in offload.decision.detail
    assert settled(side, model, offload) == plain_s()
    before = offload.counters()["offload_sent_bytes"]
    step(side, model, offload)
    assert offload.counters()["offload_sent_bytes"] == before
    assert offload.decision.outcome == "stepped aside"
    assert "no copy would hide" in offload.decision.detail


def test_the_report_says_what_was_found(monkeypatch):
    side, model = on(monkeypatch, TimedCopies(0.5 * ITEM)), Chain(DEPTH)
    offload = auto(model)
    settled(side, model, offload)
    decision = offload.decision
    assert decision.outcome == "applied"
    assert "of 12,288 bytes of a forward" in decision.detail
    assert "(hidden: 0.00 ms of waits)" in decision.detail


def test_a_bus_that_is_slower_than_it_was_gets_less_to_carry(monkeypatch):
    side, model = on(monkeypatch, TimedCopies(1.0 * ITEM)), Chain(DEPTH)
    offload = auto(model)
    for _ in range(2):
        step(side, model, offload)
    first = offload.choice
    assert not first.is_settled
    side.rates = 0.4 * ITEM, 0.4 * ITEM
    assert settled(side, model, offload) == plain_s()
    assert offload.choice.sent_bytes < first.sent_bytes


def test_a_settled_step_notes_nothing_and_waits_for_nothing(monkeypatch):
    side, model = on(monkeypatch, TimedCopies(0.5 * ITEM)), Chain(DEPTH)
    offload = auto(model)
    settled(side, model, offload)
    monkeypatch.setattr(side, "seconds", None)
    for _ in range(20):  # beyond the forwards that are looked at in vain
        step(side, model, offload)
    marks = side.num_marks
    step(side, model, offload)
    assert side.num_marks == marks


def test_every_kind_of_forward_has_its_own_choice(monkeypatch):
    """Batches of two shapes, in turns; a third follows the one before, and is looked at too."""
    side, model = on(monkeypatch, TimedCopies(0.5 * ITEM)), Chain(DEPTH)
    offload = auto(model)
    found = {}
    for number in range(24):
        rows = (1, 3, 2)[number % (2 if number < 16 else 3)]
        x = start().expand(rows, -1)
        expected = reference(model, x)
        grads, _ = step(side, model, offload, x)
        assert all(map(torch.equal, grads, expected))
        found[rows] = offload.choice
    assert [found[rows].saved_bytes for rows in (1, 2, 3)] == [ALL, 2 * ALL, 3 * ALL]
    assert found[1].is_settled
    assert found[3].is_settled
    assert found[1].sent_bytes > 0


def test_of_many_kinds_some_are_looked_at(monkeypatch):
    side, model = on(monkeypatch, TimedCopies(0.5 * ITEM)), Chain(8)
    offload = auto(model)
    for rows in range(1, 30):
        x = start().expand(rows, -1)
        expected = reference(model, x)
        grads, _ = step(side, model, offload, x)
        assert all(map(torch.equal, grads, expected))
    assert len(offload._tuner._kinds) <= 8
    for _ in range(40):
        step(side, model, offload, start().expand(40, -1))
    marks = side.num_marks
    step(side, model, offload, start().expand(40, -1))
    assert side.num_marks == marks


def test_a_capture_holds_what_was_known_and_that_stays(monkeypatch):
    side, model = on(monkeypatch, TimedCopies(0.5 * ITEM)), Chain(DEPTH)
    offload = auto(model)
    expected = reference(model, start())
    for _ in range(2):  # the warm-up
        step(side, model, offload)
    known = offload.choice
    assert not known.is_settled
    side.capturing, marks = True, side.num_marks
    before = offload.counters()["offload_sent_bytes"]
    grads, _ = step(side, model, offload)
    assert all(map(torch.equal, grads, expected))
    assert offload.counters()["offload_sent_bytes"] - before == known.sent_bytes
    assert side.num_marks == marks  # no event of a capture can be asked for its time
    side.capturing = False
    side.rates = 0.1 * ITEM, 0.1 * ITEM
    for _ in range(3):
        before = offload.counters()["offload_sent_bytes"]
        step(side, model, offload)
        assert offload.counters()["offload_sent_bytes"] - before == known.sent_bytes
    assert offload.choice == replace(known, is_settled=True)


def test_a_capture_of_something_new_follows_the_forward_before(monkeypatch):
    side, model = on(monkeypatch, TimedCopies(0.5 * ITEM)), Chain(DEPTH)
    offload = auto(model)
    settled(side, model, offload)
    known = offload.choice
    before = offload.counters()["offload_sent_bytes"]
    side.capturing = True
    x = start()[: len(start()) // 2]
    for scale in model.scales:
        scale.data = scale.data[: len(x)]
    offload._min_bytes //= 2
    grads, _ = step(side, model, offload, x)
    assert all(map(torch.equal, grads, reference(model, x)))
    sent = offload.counters()["offload_sent_bytes"] - before
    assert 0 < sent <= known.sent_bytes // 2  # the same ones, but for those that are in the window
    assert offload.choice == known


def test_a_capture_before_any_choice_sends_all_but_the_newest(monkeypatch):
    side, model = on(monkeypatch, TimedCopies(0.5 * ITEM)), Chain(DEPTH)
    offload = auto(model)
    with side, offload:
        loss = model(start().requires_grad_()).sum()
    del loss
    with side, offload:  # its memory comes back before the capture
        pass
    before = offload.counters()["offload_sent_bytes"]
    side.capturing = True
    grads, _ = step(side, model, offload)
    assert all(map(torch.equal, grads, reference(model, start())))
    assert offload.counters()["offload_sent_bytes"] - before == ALL - WINDOW
    assert offload.choice is None


def test_forwards_before_their_backwards_and_without_one(monkeypatch):
    side, model = on(monkeypatch, TimedCopies(0.5 * ITEM)), Chain(DEPTH)
    offload = auto(model)
    expected = reference(model, start())
    for number in range(8):
        with side:
            losses = []
            for _ in range(2 + number % 2):
                x = start().requires_grad_()
                with offload:
                    losses.append(model(x).sum())
            for loss in losses[:2]:
                grads = torch.autograd.grad(loss, list(model.parameters()))
                assert all(map(torch.equal, grads, expected))
    del losses, loss
    settled(side, model, offload)


def test_a_retained_graph_and_half_a_backward(monkeypatch):
    side, model = on(monkeypatch, TimedCopies(0.5 * ITEM)), Chain(DEPTH)
    offload = auto(model)
    with side:
        for _ in range(4):
            x = start().requires_grad_()
            with offload:
                hidden = model(x)
                loss = model(hidden).sum()
            torch.autograd.grad(loss, [hidden], retain_graph=True)
            (found,) = torch.autograd.grad(loss, [x])
    plain = start().requires_grad_()
    (expected,) = torch.autograd.grad(model(model(plain)).sum(), [plain])
    assert torch.equal(found, expected)


def test_max_bytes_and_no_room_on_the_host(monkeypatch):
    side, model = on(monkeypatch, TimedCopies(20.0 * ITEM)), Chain(DEPTH)
    limited = auto(model, max_bytes=5 * ITEM)
    settled(side, model, limited)
    assert limited.choice.sent_bytes == 5 * ITEM
    nowhere = auto(model, max_host_bytes=0)
    for _ in range(3):
        grads, _ = step(side, model, nowhere)
        assert all(map(torch.equal, grads, reference(model, start())))
    assert nowhere.choice is None


def test_where_there_is_no_room_the_host_soon_waits_for_nothing(monkeypatch):
    side, model = on(monkeypatch, TimedCopies(20.0 * ITEM)), Chain(DEPTH)
    offload = auto(model, max_host_bytes=0)
    for _ in range(20):
        step(side, model, offload)
    monkeypatch.setattr(side, "seconds", None)
    marks = side.num_marks
    for _ in range(20):
        step(side, model, offload)
    assert side.num_marks == marks


def test_with_little_room_what_is_chosen_is_what_finds_some(monkeypatch):
    monkeypatch.setattr(host_pool, "SLAB_BYTES", 1 << 12)
    side, model = on(monkeypatch, TimedCopies(20.0 * ITEM)), Chain(DEPTH)
    offload = auto(model, max_host_bytes=1 << 12)
    settled(side, model, offload)
    before = offload.counters()
    step(side, model, offload)
    after = offload.counters()
    sent = after["offload_sent_bytes"] - before["offload_sent_bytes"]
    assert sent == offload.choice.sent_bytes == (1 << 12) // host_pool.ALIGNMENT * ITEM
    assert after["offload_kept_no_room_bytes"] == before["offload_kept_no_room_bytes"] > 0


def test_the_room_that_another_forward_takes_is_no_limit(monkeypatch):
    monkeypatch.setattr(host_pool, "SLAB_BYTES", 1 << 12)
    side, model = on(monkeypatch, TimedCopies(20.0 * ITEM)), Chain(DEPTH)
    offload = auto(model, max_host_bytes=1 << 12)
    step(side, model, offload)
    for _ in range(7):
        with side:
            losses = []
            for _ in range(2):
                with offload:
                    losses.append(model(start().requires_grad_()).sum())
            for loss in reversed(losses):
                torch.autograd.grad(loss, list(model.parameters()))
        del losses, loss
        assert offload.choice.sent_bytes > 0


def test_closing_lets_go_of_a_forward_that_was_looked_at(monkeypatch):
    """Its backward never came, as when that ran out of memory."""
    side, model = on(monkeypatch, TimedCopies(20.0 * ITEM)), Chain(DEPTH)
    offload = auto(model)
    with side, offload:
        loss = model(start().requires_grad_()).sum()
    pool = weakref.ref(offload._eager.pool)
    del loss
    offload.close()
    gc.collect()
    assert pool() is None


@pytest.mark.parametrize("late", ["out", "back", "main"])
def test_no_stream_may_be_late(monkeypatch, late):
    """On a device whose memory is given out again, with its streams behind."""
    device, model = on(monkeypatch, CopyingDevice()), Chain(12)
    try:
        offload = auto(model)
        expected = reference(model, start())
        stepped(device, model, offload)
        stream = device.main if late == "main" else getattr(offload._eager, late)
        for _ in range(6):
            stream.sleep(0.01)
            assert same(device, stepped(device, model, offload), expected)
        assert offload.choice is not None
        assert not offload._eager.flights
        assert device.num_blocks() == 0
    finally:
        device.end()


def test_arguments():
    with pytest.raises(TypeError, match="auto must be True or False"):
        ActivationOffload(Chain(1), auto="yes")
    offload = ActivationOffload(Chain(1), auto=True)
    assert "auto=True" in repr(offload)
    assert offload.choice is None  # on the CPU there is nothing to choose
    assert offload.decision.outcome == "stepped aside"


def noted(waits_s, copies):
    """Return what a timeline reads of a step of ten seconds, with such waits and copies in it."""
    side = TimedCopies(1.0)
    home, other = side.main, side.new()
    timeline = Timeline(side, home)
    timeline.saved(ITEM)
    for wait_s in waits_s:
        with timeline.waiting(home):
            home.now += wait_s
    with timeline.waiting(other):
        other.now += 5.0  # no wait of the computation
    home.now += 10.0
    for num_bytes, took_s in copies:
        with timeline.copying(other, "out", num_bytes):
            other.now += took_s
    timeline.used(0)
    return timeline.read()


def test_what_the_host_takes_to_enqueue_a_wait_is_none():
    timing = noted([1e-5] * 1000, [])
    assert timing.waited_s == 0.0
    assert timing.compute_s == pytest.approx(10.01)
    timing = noted([1e-5, 2.0, 1.0], [])
    assert timing.waited_s == pytest.approx(3.0)
    assert timing.compute_s == timing.used[0].second == pytest.approx(10.0, abs=1e-4)
    assert timing.out_bytes_per_s is None


def test_the_rate_is_that_of_most_bytes():
    timing = noted([], [(10, 10.0), (1000, 1.0), (10, 10.0), (900, 1.0), (10, 0.0)])
    assert timing.out_bytes_per_s == 1000.0
    assert timing.back_bytes_per_s is None
