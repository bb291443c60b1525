"""What is chosen hides: sums of what a bus carries, in a step whose times are known."""

from __future__ import annotations

import pytest

from offloading import timed
from torchfast.memory import OffloadChoice
from torchfast.memory.offload_choice import KindOfForward, choose
from torchfast.memory.offload_timeline import StepTiming


def chosen(timing, out, back=None, window=2, **options):
    found = choose(
        timing,
        window_bytes=window,
        out_bytes_per_s=out,
        back_bytes_per_s=back or out,
        **options,
    )
    return sorted(found)


def test_a_fast_bus_takes_all_but_the_last():
    # Two newest stay, and of the next two the copies out would never be waited for.
    assert chosen(timed([1] * 10), out=100.0) == [0, 1, 2, 3, 4, 5]


def test_of_a_slow_bus_every_so_many_th_goes():
    found = chosen(timed([1] * 40), out=0.5)
    assert 15 <= len(found) <= 19  # it carries one in two seconds
    assert found[0] == 0
    assert max(found) >= 30


def test_a_bus_that_is_much_too_slow_takes_nothing():
    assert chosen(timed([1] * 40), out=0.1) == []


def test_what_cannot_be_back_in_time_stays():
    timing = timed([1] * 20, backward=0.25)
    both, found = chosen(timing, out=100.0), chosen(timing, out=100.0, back=2.0)
    assert set(found) < set(both)
    assert 5 <= len(found) <= 12  # half of what the backward uses
    assert chosen(timing, out=100.0, back=0.01) == []


def test_one_that_is_larger_than_the_window_stays():
    assert 3 not in chosen(timed([1, 1, 1, 9, 1, 1, 1, 1, 1, 1]), out=100.0)


def test_a_window_of_nothing_hides_nothing():
    assert chosen(timed([1] * 10, window=0), out=1e9, window=0) == []


def test_a_limit_is_kept():
    assert chosen(timed([1] * 10), out=100.0, max_bytes=3) == [0, 1, 2]


def test_what_the_backward_does_not_use_need_not_come_back():
    timing = timed([1] * 10)
    used = tuple(at for at in timing.used if at.storage != 2)
    rest = StepTiming(**{**vars(timing), "used": used})
    assert 2 in chosen(rest, out=100.0, back=1e-9)


def test_copies_wait_for_one_another():
    """Each alone would be in time."""
    timing = timed([2] * 8, window=4, pace=1.0)
    assert len(chosen(timing, out=1.1, window=4)) < len(chosen(timing, out=10.0, window=4))


def learned(kind, *, waited_s=0.0, rate=100.0, followed=True, steady=True, step=None):
    kind.learn(
        step or timed(kind.sizes, waited_s=waited_s),
        (rate, rate),
        window_bytes=2,
        max_bytes=None,
        was_followed=followed,
        is_steady=steady,
    )
    return kind.choice


def test_a_choice_settles_when_a_step_that_followed_it_did_not_wait():
    kind = KindOfForward((1,) * 10)
    assert all(kind.sends(index) for index in range(10))
    assert not learned(kind, followed=False).is_settled
    assert not learned(kind).is_settled  # chosen by the first step, which warms up
    choice = learned(kind)
    assert choice.is_settled
    assert choice.is_hidden
    assert choice.sent_bytes == 6
    assert choice.share == 0.6
    assert [kind.sends(index) for index in range(12)] == [True] * 6 + [False] * 4 + [True] * 2


def test_a_step_that_pins_memory_settles_nothing():
    kind = KindOfForward((1,) * 10)
    for _ in range(4):
        assert not learned(kind, steady=False).is_settled


def test_a_step_that_waited_is_looked_at_once_more():
    kind = KindOfForward((1,) * 40)
    learned(kind, followed=False)
    first = learned(kind, rate=1.0)
    assert learned(kind, waited_s=5.0, rate=1.0) == first
    second = learned(kind, rate=1.0)
    assert second.is_settled
    assert second.is_hidden
    assert second.sent_bytes == first.sent_bytes


def test_a_step_that_waited_makes_the_bus_slower():
    kind = KindOfForward((1,) * 40)
    learned(kind, followed=False)
    sent = [learned(kind, rate=1.0).sent_bytes]
    for _ in range(3):
        choice = learned(kind, waited_s=5.0, rate=1.0)
        assert choice.is_hidden is None
        sent.append(choice.sent_bytes)
    assert sent[0] == sent[1] > sent[2] > sent[3]
    last = learned(kind, waited_s=5.0, rate=1.0)
    assert last.is_settled
    assert last.is_hidden is False
    assert last.waited_ms == 5000.0


def test_in_words():
    choice = OffloadChoice(
        saved_bytes=4000,
        sent_bytes=3000,
        out_bytes_per_s=5e10,
        back_bytes_per_s=4e10,
        compute_ms=10.0,
        waited_ms=None,
        is_settled=False,
    )
    assert str(choice) == (
        "3,000 of 4,000 bytes of a forward (75%) at 50.0 GB/s to the host and 40.0 GB/s back, "
        "beside 10.00 ms of forward and backward (not seen in a step yet)"
    )
    seen = {**vars(choice), "waited_ms": 0.05}
    assert "(hidden: 0.05 ms of waits)" in str(OffloadChoice(**seen))
    assert "(not all hidden: 5.00 ms" in str(OffloadChoice(**{**seen, "waited_ms": 5.0}))


@pytest.mark.parametrize("saved", [0, 10])
def test_the_share_of_nothing(saved):
    fields = dict.fromkeys(("out_bytes_per_s", "back_bytes_per_s", "compute_ms"), 1.0)
    choice = OffloadChoice(
        saved_bytes=saved, sent_bytes=0, waited_ms=0.0, is_settled=True, **fields
    )
    assert choice.share == 0.0
