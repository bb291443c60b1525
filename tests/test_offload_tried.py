"""More than hides is tried once it is known what hides, and judged by how long a step takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from offloading import timed
from torchfast.memory.offload_choice import KindOfForward


def learned(kind, longer=0.0, *, seen=1.0, followed=True, steady=True):
    """Take in a step that took longer by such a part, so much of it in waits that are seen."""
    compute_s = timed(kind.sizes).compute_s
    waited_s = longer * compute_s * seen
    kind.learn(
        replace(
            timed(kind.sizes, waited_s=waited_s), compute_s=compute_s * (1 + longer) - waited_s
        ),
        (0.6, 0.6),
        window_bytes=2,
        max_bytes=None,
        was_followed=followed,
        is_steady=steady,
    )
    return kind.choice


def trying(max_slowdown=0.05, num=40):
    """Return a kind that sends more than hides, and the choices that hid and that is tried."""
    kind = KindOfForward((1,) * num, max_slowdown)
    learned(kind)
    hides = learned(kind)
    tried = learned(kind)
    assert not tried.is_settled
    assert tried.sent_bytes > hides.sent_bytes
    assert tried.waited_ms is None
    return kind, hides, tried


def sent_by(kind, **how):
    return sum(kind.sends(index, **how) for index in range(len(kind.sizes)))


@pytest.mark.parametrize("seen", [1.0, 0.2, 0.0])
@pytest.mark.parametrize(("longer", "is_allowed"), [(0.02, True), (0.055, True), (0.07, False)])
def test_a_choice_settles_when_a_step_took_no_longer_than_it_may(longer, is_allowed, seen):
    """Whether or not the waits were seen: what counts is how long the step took."""
    kind, hides, tried = trying()
    choice = learned(kind, longer, seen=seen)
    assert choice.is_settled is is_allowed
    assert choice.max_slowdown == 0.05
    assert choice.compute_ms == hides.compute_ms
    if is_allowed:
        assert choice.is_allowed
        assert choice.is_hidden is False
        assert choice.sent_bytes == tried.sent_bytes == sent_by(kind)
        assert choice.waited_ms == pytest.approx(longer * hides.compute_ms)
    else:
        assert choice.is_allowed is None
        assert hides.sent_bytes <= choice.sent_bytes < tried.sent_bytes


@pytest.mark.parametrize(("longer", "share"), [(0.6, 1 / 6), (0.3, 1 / 3), (0.12, 0.75)])
def test_as_much_less_is_tried_next_as_it_took_too_long(longer, share):
    kind, hides, tried = trying(0.1, 1000)
    more = tried.sent_bytes - hides.sent_bytes
    found = learned(kind, longer).sent_bytes - hides.sent_bytes
    assert found == pytest.approx(share * more, abs=1)


def test_what_always_takes_too_long_ends_as_what_hides():
    kind, hides, _ = trying()
    for _ in range(5):
        assert not learned(kind, 0.3).is_settled
    choice = learned(kind, 0.3)
    assert choice.is_settled
    assert choice.is_hidden
    assert choice.sent_bytes == hides.sent_bytes == sent_by(kind)


def test_a_step_that_pins_memory_says_nothing_of_what_is_tried():
    kind, _, tried = trying()
    assert learned(kind, 0.3, steady=False) == tried
    assert learned(kind, 0.3, followed=False) == tried
    assert learned(kind, 0.0).is_settled


def test_what_hides_is_looked_for_first():
    """With waits, nobody knows how long the computation takes without."""
    kind = KindOfForward((1,) * 40, 0.05)
    learned(kind)
    sent = learned(kind).sent_bytes
    assert learned(kind, 0.03).sent_bytes == sent  # is looked at once more
    assert learned(kind, 0.03).sent_bytes < sent


def test_a_graph_holds_what_was_seen():
    kind, hides, tried = trying()
    assert sent_by(kind) == tried.sent_bytes
    assert sent_by(kind, is_capture=True) == hides.sent_bytes
    kind.settle()
    assert kind.choice.is_settled
    assert kind.choice.sent_bytes == hides.sent_bytes == sent_by(kind)
    learned(kind := trying()[0])
    assert sent_by(kind, is_capture=True) == sent_by(kind) == tried.sent_bytes


def test_where_no_more_could_be_waited_for_it_is_settled_at_once():
    kind = KindOfForward((1,) * 40, 1e-6)
    learned(kind)
    learned(kind)
    choice = learned(kind)
    assert choice.is_settled
    assert choice.is_hidden
