"""max_slowdown: more goes than hides, for waits that were allowed; without it nothing is other."""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offloading import (
    ALL,
    DEPTH,
    ITEM,
    WINDOW,
    Chain,
    auto,
    on,
    plain_s,
    settled,
    start,
    step,
    timed,
)
from simulated_copies import TimedCopies
from torchfast.memory import ActivationOffload, OffloadChoice, host_pool
from torchfast.memory.offload_schedule import choose
from torchfast.memory.offload_timeline import At, StepTiming

SEEDS = st.integers(0, 1 << 32)


@pytest.fixture(autouse=True)
def small_slabs(monkeypatch):
    monkeypatch.setattr(host_pool, "SLAB_BYTES", 1 << 17)


def drawn(seed):
    """Return a step of random times and how it is offloaded."""
    draw = random.Random(seed)
    window = draw.choice((0, 2, 4, 8, 16, 24))
    sizes = tuple(draw.choice((1, 1, 2, 3, 5, 8)) for _ in range(draw.randint(1, 60)))
    now, inside, waiting, pushed, used = 0.0, 0, deque(), [], []
    for index, size in enumerate(sizes):
        now += draw.choice((0.0, *[draw.expovariate(1.0)] * 9))
        waiting.append(index)
        inside += size
        while inside > window and waiting[0] != index:
            oldest = waiting.popleft()
            inside -= sizes[oldest]
            pushed.append(At(oldest, now))
    pace = draw.choice((0.3, 1.0, 2.0))
    for index in reversed(range(len(sizes))):
        now += pace * draw.expovariate(1.0)
        if draw.random() < 0.95:
            used.append(At(index, now))
        if draw.random() < 0.2:  # used by several operations
            used.append(At(min(len(sizes) - 1, index + draw.randint(0, 3)), now))
    timing = StepTiming(
        sizes=sizes,
        pushed=tuple(pushed),
        used=tuple(used),
        compute_s=now + 1.0,
        waited_s=0.0,
        out_bytes_per_s=None,
        back_bytes_per_s=None,
    )
    out = draw.uniform(0.2, 6.0)
    return timing, {
        "window_bytes": window,
        "out_bytes_per_s": out,
        "back_bytes_per_s": out * draw.choice((1.0, draw.uniform(0.3, 2.0))),
        "max_bytes": draw.choice((None, None, draw.randint(0, sum(sizes)))),
    }


def hidden(timing, *, window_bytes, out_bytes_per_s, back_bytes_per_s, max_bytes):
    """Return what hides, by the rule that knows of no waits."""
    sizes, first_use, last_use = timing.sizes, {}, {}
    for place, (index, second) in enumerate(timing.used):
        first_use.setdefault(index, second)
        last_use[index] = place
    flights, flying, landings = deque(), 0, {}
    for index, second in timing.pushed:
        flights.append(index)
        flying += sizes[index]
        while flying > window_bytes:
            oldest = flights.popleft()
            flying -= sizes[oldest]
            landings[oldest] = second
    chosen, left, free_s = set(), float("inf") if max_bytes is None else max_bytes, 0.0
    for index, second in timing.pushed:
        done_s = max(free_s, second) + sizes[index] / out_bytes_per_s
        if done_s <= landings.get(index, -1.0) and sizes[index] <= left:
            chosen.add(index)
            free_s, left = done_s, left - sizes[index]
    free_s, fetched = 0.0, set()
    for place, (used, second) in enumerate(timing.used):
        ahead = window_bytes
        for index in range(used, -1, -1):
            if last_use.get(index, place) < place:
                continue
            if index in chosen and index not in fetched:
                fetched.add(index)
                done_s = max(free_s, second) + sizes[index] / back_bytes_per_s
                if done_s <= first_use.get(index, done_s):
                    free_s = done_s
                else:
                    chosen.discard(index)
            if index < used:
                ahead -= sizes[index]
                if ahead <= 0:
                    break
    return frozenset(chosen)


def waits(timing, chosen, *, window_bytes, out_bytes_per_s, back_bytes_per_s, **_):
    """Return how long forward and backward wait for copies, done as a `Lane` does them."""
    sizes, late_s, free_s, flights = timing.sizes, 0.0, 0.0, deque()
    for index, second in timing.pushed:
        now = second + late_s
        if index in chosen:
            free_s = max(free_s, now) + sizes[index] / out_bytes_per_s
        flights.append((index, free_s if index in chosen else 0.0))
        while sum(sizes[flying] for flying, _ in flights) > window_bytes:
            now = max(now, flights.popleft()[1])
        late_s = now - second
    forward_s, late_s, free_s, back_s = late_s, 0.0, 0.0, {}
    last_use = {index: place for place, (index, _) in enumerate(timing.used)}
    for place, (used, second) in enumerate(timing.used):
        now = second + late_s
        ahead = window_bytes
        for index in range(used, -1, -1):
            if last_use.get(index, place) < place:
                continue
            if index in chosen and index not in back_s:
                back_s[index] = free_s = max(free_s, now) + sizes[index] / back_bytes_per_s
            if index == used:
                now = max(now, back_s.get(used, now))
            else:
                ahead -= sizes[index]
                if ahead <= 0:
                    break
        late_s = now - second
    return forward_s, late_s


def num_bytes(timing, chosen):
    return sum(timing.sizes[index] for index in chosen)


@settings(max_examples=300)
@given(SEEDS)
def test_without_it_the_choice_is_what_it_was(seed):
    timing, how = drawn(seed)
    expected = hidden(timing, **how)
    assert choose(timing, **how) == expected
    assert choose(timing, **how, max_slowdown=0.0) == expected
    assert waits(timing, expected, **how) == (0.0, 0.0)


@settings(max_examples=300)
@given(SEEDS, st.sampled_from([0.01, 0.05, 0.2, 1.0]))
def test_all_waits_together_are_within_what_is_allowed(seed, max_slowdown):
    timing, how = drawn(seed)
    found = choose(timing, **how, max_slowdown=max_slowdown)
    assert sum(waits(timing, found, **how)) <= max_slowdown * timing.compute_s + 1e-9
    assert num_bytes(timing, found) >= num_bytes(timing, hidden(timing, **how))
    assert how["max_bytes"] is None or num_bytes(timing, found) <= how["max_bytes"]


def chosen(timing, max_slowdown, *, out, back=None, window=2, max_bytes=None):
    """Return what goes and the waits for it."""
    how = {"window_bytes": window, "out_bytes_per_s": out, "back_bytes_per_s": back or out}
    found = choose(timing, **how, max_bytes=max_bytes, max_slowdown=max_slowdown)
    return found, *waits(timing, found, **how)


@pytest.mark.parametrize(
    ("step", "rates", "halves"),
    [
        ({}, {"out": 0.5}, (1.0, 0.0)),  # the forward is half as long as the backward
        ({"backward": 0.25}, {"out": 100.0, "back": 0.5}, (0.0, 1.0)),
        ({"backward": 1.0}, {"out": 0.5}, (0.5, 0.5)),
    ],
)
def test_the_narrower_way_has_the_allowance(step, rates, halves):
    """And the bus is busy in it: so many more bytes go as it carries meanwhile."""
    timing = timed([1] * 200, **step)
    allowed_s = 0.1 * timing.compute_s
    (before, *none), (found, *waited_s) = (chosen(timing, s, **rates) for s in (0.0, 0.1))
    assert none == [0.0, 0.0]
    for waited, share in zip(waited_s, halves, strict=True):
        assert waited == pytest.approx(share * allowed_s, abs=0.1 * allowed_s)
    carried = max(halves) * allowed_s * min(rates.values())
    assert len(found) - len(before) == pytest.approx(carried, rel=0.15)


def test_it_sends_all_but_the_last_if_it_may():
    assert chosen(timed([1] * 10), 50.0, out=0.1)[0] == frozenset(range(6))


def test_what_is_back_too_late_is_not_waited_for_on_its_way_out():
    """A bus that carries nothing back leaves nothing to wait for."""
    assert chosen(timed([1] * 40), 0.1, out=0.5, back=1e-4) == (frozenset(), 0.0, 0.0)


@pytest.mark.parametrize(
    ("sizes", "how", "left"),
    [
        ([1] * 100, {"out": 0.5, "max_bytes": 20}, 0),
        ([4, 3] * 40, {"out": 1.5, "window": 10, "max_bytes": 32}, 2),  # others would fill it
    ],
)
def test_a_limit_that_is_reached_without_waits_costs_none(sizes, how, left):
    timing = timed(sizes, how.get("window", 2))
    found, *waited_s = chosen(timing, 0.2, **how)
    assert found == chosen(timing, 0.0, **how)[0]
    assert num_bytes(timing, found) == how["max_bytes"] - left
    assert waited_s == [0.0, 0.0]


def test_a_limit_that_is_reached_by_a_part_of_the_waits_costs_that_part():
    timing = timed([1] * 100)
    allowed_s = 0.4 * timing.compute_s
    alone = len(chosen(timing, 0.0, out=0.5)[0])
    found, *waited_s = chosen(timing, 0.4, out=0.5, max_bytes=alone + 15)
    assert len(found) == alone + 15
    assert 0.0 < sum(waited_s) <= 0.5 * allowed_s


def test_one_that_is_larger_than_the_window_stays():
    found, *_ = chosen(timed([1, 1, 1, 9, 1, 1, 1, 1, 1, 1]), 50.0, out=1.0)
    assert found == {0, 1, 2, 4, 5}
    assert chosen(timed([1] * 10, window=0), 50.0, out=1.0, window=0)[0] == frozenset()


@pytest.mark.parametrize(
    ("max_slowdown", "waited_ms", "words"),
    [
        (0.05, 0.05, "(hidden: 0.05 ms of waits, 0.50 ms allowed)"),
        (0.05, 0.31, "(0.31 ms of waits, 0.50 ms allowed)"),
        (0.05, 0.55, "(0.55 ms of waits, 0.50 ms allowed)"),
        (0.05, 0.7, "(more than allowed: 0.70 ms of waits, 0.50 ms allowed)"),
        (0.05, None, "(not seen in a step yet)"),
        (0.0, 0.7, "(not all hidden: 0.70 ms of waits)"),
    ],
)
def test_in_words(max_slowdown, waited_ms, words):
    choice = OffloadChoice(
        saved_bytes=4000,
        sent_bytes=3000,
        out_bytes_per_s=5e10,
        back_bytes_per_s=4e10,
        compute_ms=10.0,
        waited_ms=waited_ms,
        is_settled=True,
        max_slowdown=max_slowdown,
    )
    assert words in str(choice)
    known = None if waited_ms is None else waited_ms <= 10 * (max_slowdown + 0.01)
    assert choice.is_allowed is known


def slower(model, max_slowdown=0.1, **options):
    return auto(model, max_slowdown=max_slowdown, **options)


@pytest.mark.parametrize("rates", [(0.5, 0.5), (0.3, 0.3), (20.0, 0.3), (0.3, 20.0)])
@pytest.mark.parametrize("max_slowdown", [0.05, 0.2])
def test_more_goes_for_a_step_that_is_slower_by_no_more(monkeypatch, rates, max_slowdown):
    side = on(monkeypatch, TimedCopies(*(rate * ITEM for rate in rates)))
    hides = auto(model := Chain(DEPTH))
    settled(side, model, hides)
    offload = slower(model := Chain(DEPTH), max_slowdown)
    took_s = settled(side, model, offload)
    choice = offload.choice
    assert choice.sent_bytes > hides.choice.sent_bytes
    assert took_s <= (1.0 + max_slowdown) * plain_s() + 1e-9
    assert took_s == pytest.approx(plain_s() + choice.waited_ms / 1e3)
    assert choice.is_allowed
    assert choice.compute_ms == pytest.approx(plain_s() * 1e3)


def test_the_report_says_how_long_it_waits_of_what_is_allowed(monkeypatch):
    side, model = on(monkeypatch, TimedCopies(0.3 * ITEM)), Chain(DEPTH)
    offload = slower(model, 0.2)
    settled(side, model, offload)
    decision = offload.decision
    assert decision.outcome == "applied"
    assert "hide behind the computation or hold it up by at most 20% of its time" in decision.detail
    allowed_ms = 0.2 * plain_s() * 1e3
    assert f"({offload.choice.waited_ms:.2f} ms of waits, {allowed_ms:.2f} ms allowed)" in str(
        decision.detail
    )
    assert offload.choice.waited_ms > 0.01 * plain_s() * 1e3


def test_where_nothing_can_be_waited_for_nothing_goes_and_that_is_said(monkeypatch):
    side, model = on(monkeypatch, TimedCopies(0.001 * ITEM)), Chain(DEPTH)
    offload = slower(model, 0.05)
    assert settled(side, model, offload) == pytest.approx(plain_s())
    assert offload.decision.outcome == "stepped aside"
    assert "no copy would hide behind the computation or hold it up by at most 5% of its time" in (
        offload.decision.detail
    )


def test_a_bus_that_is_slower_than_it_was_gets_less_to_carry(monkeypatch):
    side, model = on(monkeypatch, TimedCopies(1.0 * ITEM)), Chain(DEPTH)
    offload = slower(model)
    for _ in range(2):
        step(side, model, offload)
    first = offload.choice
    side.rates = 0.4 * ITEM, 0.4 * ITEM
    assert settled(side, model, offload) <= (1.0 + 0.1 + 0.01) * plain_s()
    assert offload.choice.sent_bytes < first.sent_bytes
    assert offload.choice.is_allowed


def test_each_kind_of_forward_may_be_slower(monkeypatch):
    side, model = on(monkeypatch, TimedCopies(1.0 * ITEM)), Chain(DEPTH)
    found = {}
    for max_slowdown in (0.0, 0.1):
        offload = slower(model, max_slowdown)
        for number in range(16):
            rows = (2, 3)[number % 2]
            _, took_s = step(side, model, offload, start().expand(rows, -1))
            found[max_slowdown, rows] = offload.choice
            assert number < 14 or took_s <= (1.0 + max_slowdown) * plain_s() + 1e-9
    for rows in (2, 3):
        assert found[0.1, rows].is_settled
        assert found[0.1, rows].sent_bytes > found[0.0, rows].sent_bytes


@pytest.mark.parametrize(("steps", "waits"), [(2, False), (3, False), (8, True)])
def test_a_capture_holds_the_copies_that_were_seen_to_be_waited_for(monkeypatch, steps, waits):
    side, model = on(monkeypatch, TimedCopies(0.5 * ITEM)), Chain(DEPTH)
    hides = auto(model)
    settled(side, model, hides)
    offload = slower(model)
    for _ in range(steps):
        step(side, model, offload)
    side.capturing = True
    before = offload.counters()["offload_sent_bytes"]
    step(side, model, offload)
    sent = offload.counters()["offload_sent_bytes"] - before
    assert sent == offload.choice.sent_bytes
    assert (sent > hides.choice.sent_bytes) is waits
    side.capturing = False
    known = offload.choice
    assert known.is_settled
    step(side, model, offload)
    assert offload.choice == known


def test_limits_are_kept(monkeypatch):
    monkeypatch.setattr(host_pool, "SLAB_BYTES", 1 << 12)
    side, model = on(monkeypatch, TimedCopies(0.5 * ITEM)), Chain(DEPTH)
    free = slower(model, 10.0)
    settled(side, model, free)
    assert free.choice.sent_bytes == ALL - 2 * WINDOW
    limited = slower(model, 10.0, max_bytes=21 * ITEM)
    settled(side, model, limited)
    assert limited.choice.sent_bytes == 21 * ITEM
    roomy = slower(model, 10.0, max_host_bytes=1 << 12)
    settled(side, model, roomy)
    before = roomy.counters()
    step(side, model, roomy)
    after = roomy.counters()
    sent = after["offload_sent_bytes"] - before["offload_sent_bytes"]
    assert sent == roomy.choice.sent_bytes == (1 << 12) // host_pool.ALIGNMENT * ITEM
    assert after["offload_kept_no_room_bytes"] == before["offload_kept_no_room_bytes"]


def test_arguments():
    with pytest.raises(ValueError, match=r"max_slowdown=0.05 limits .* goes with auto=True only"):
        ActivationOffload(Chain(1), max_slowdown=0.05)
    with pytest.raises(TypeError, match="max_slowdown must be a number >= 0, got '5%'"):
        ActivationOffload(Chain(1), auto=True, max_slowdown="5%")
    with pytest.raises(TypeError, match="max_slowdown must be a number >= 0, got True"):
        ActivationOffload(Chain(1), auto=True, max_slowdown=True)
    for value in (-0.1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="max_slowdown must be a finite number >= 0, got"):
            ActivationOffload(Chain(1), auto=True, max_slowdown=value)
    assert "max_slowdown=0.05" in repr(ActivationOffload(Chain(1), auto=True, max_slowdown=0.05))
    assert ActivationOffload(Chain(1), max_slowdown=0).choice is None
