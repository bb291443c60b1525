"""The look behind a launch: kept where the loop's own time says it pays, and never believed."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest
from torch import nn, optim

from models import DropoutNet, make_batches
from tape import CPU, Twins
from torchfast.graphs import look_ahead, steady
from torchfast.graphs.look_ahead import BLOCK, KEPT, PAIRS, LookAhead
from torchfast.graphs.named_state import NamedState
from torchfast.graphs.watch import Glance, StateWatch

ADAMW = partial(optim.AdamW, lr=0.01, fused=True)
REPLAYED = 6  # steps, until a glance is there
TRIAL = 2 * BLOCK * PAIRS


class Loop:
    """A loop on a made-up clock, in which a step takes what a function of the last look says."""

    def __init__(self, step_ms):
        self.now, self._step_ms, self.looked = 0.0, step_ms, False
        self.ahead = LookAhead(lambda: self.now)

    def run(self, steps):
        """Return behind which launches there was a look."""
        looks = []
        for _ in range(steps):
            self.now += self._step_ms(self.looked)
            self.looked = self.ahead.is_wanted()
            looks.append(self.looked)
        return looks


def test_blocks_take_turns_and_what_pays_is_kept():
    loop = Loop(lambda looked: 15.0 if looked else 16.0)
    assert loop.ahead.pays is None
    looks = loop.run(TRIAL)
    assert looks == ([True] * BLOCK + [False] * BLOCK) * PAIRS
    assert loop.run(KEPT) == [True] * KEPT
    assert loop.ahead.pays is True


@pytest.mark.parametrize("with_it", [16.5, 16.0])
def test_what_does_not_pay_is_left(with_it):
    loop = Loop(lambda looked: with_it if looked else 16.0)
    loop.run(TRIAL)
    assert loop.run(KEPT) == [False] * KEPT
    assert loop.ahead.pays is False


@pytest.mark.parametrize(("won", "pays"), [(3, False), (4, True)])
def test_it_has_to_win_four_pairs_of_five(won, pays):
    slower = iter([False] * (2 * won * BLOCK) + [True] * TRIAL)
    loop = Loop(
        lambda looked: (17.0 if next(slower) else 15.0) if looked else 16.0 + 0 * next(slower)
    )
    loop.run(TRIAL + 1)
    assert loop.ahead.pays is pays


def test_it_is_found_out_anew_twice_as_late_each_time(monkeypatch):
    monkeypatch.setattr(look_ahead, "_MOST_KEPT", 4 * KEPT)
    loop = Loop(lambda looked: 17.0 if looked else 16.0)
    looks = loop.run(5 * TRIAL + 15 * KEPT)
    trials = [
        at for at in range(len(looks)) if looks[at] and not any(looks[max(0, at - TRIAL) : at])
    ]
    gaps = [after - before - TRIAL for before, after in pairwise(trials)]
    assert gaps == [KEPT, 2 * KEPT, 4 * KEPT, 4 * KEPT]


def test_a_loop_that_has_become_another_is_noticed():
    takes = {True: 15.0, False: 16.0}
    loop = Loop(takes.__getitem__)
    loop.run(TRIAL + KEPT - 1)
    takes[True] = 17.0
    loop.run(1 + TRIAL)
    assert loop.run(100) == [False] * 100


def test_one_block_in_which_something_else_went_on_decides_nothing():
    slow = iter([0.0] * 20 + [5000.0] + [0.0] * 10_000)  # an evaluation, in a block with looks
    loop = Loop(lambda looked: (15.0 if looked else 16.0) + next(slow))
    loop.run(TRIAL)
    assert loop.run(10) == [True] * 10


def test_a_block_that_is_interrupted_is_not_counted():
    loop = Loop(lambda looked: 15.0 if looked else 16.0)
    loop.run(BLOCK + 3)
    loop.now += 1e6
    loop.ahead.interrupt()
    loop.run(TRIAL + BLOCK)
    assert loop.ahead.pays is True
    assert max(map(max, loop.ahead._took.values())) < 1e3
    loop.run(5)
    loop.ahead.interrupt()  # and one while it is kept changes nothing
    assert loop.run(10) == [True] * 10


# --- In a step ------------------------------------------------------------------------------------


@pytest.fixture
def looks(tape, monkeypatch):
    """Give how many glances each step took; append zero before one."""
    counted = [0]
    is_as_it_was = Glance.is_as_it_was

    def counting(self):
        counted[-1] += 1
        return is_as_it_was(self)

    monkeypatch.setattr(Glance, "is_as_it_was", counting)
    monkeypatch.setattr(steady, "MANY", 1)
    monkeypatch.setattr(LookAhead, "is_wanted", lambda self: True)
    return counted


def run(twins, number, looks):
    """Run steps, and return how many glances each has taken."""
    del looks[:]
    for batch in make_batches(number):
        looks.append(0)
        twins.step(batch)
    assert not twins.differences()
    return looks


def test_one_more_behind_each_launch_where_it_is_wanted(looks, monkeypatch):
    twins = Twins(DropoutNet, ADAMW)
    run(twins, REPLAYED, looks)
    assert run(twins, 10, looks) == [2] * 10
    monkeypatch.setattr(LookAhead, "is_wanted", lambda self: False)
    assert run(twins, 10, looks) == [1] * 10


def test_none_is_thought_of_for_what_is_read_in_no_time(looks, monkeypatch):
    monkeypatch.setattr(steady, "MANY", 2_000)
    twins = Twins(DropoutNet, ADAMW)
    run(twins, REPLAYED, looks)
    assert run(twins, 10, looks) == [1] * 10


def test_what_it_takes_is_counted_by_all_that_is_read():
    """Three hundred layers are many by their values and their objects together."""
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(300)))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    glance = StateWatch(NamedState([model, optimizer]), CPU).glance()
    assert glance.num_read >= steady.MANY
    assert len(glance._values) < steady.MANY


def test_steps_without_a_glance_interrupt_a_block(looks, monkeypatch):
    interrupted = []
    monkeypatch.setattr(LookAhead, "interrupt", lambda self: interrupted.append(1))
    twins = Twins(DropoutNet, ADAMW)
    run(twins, REPLAYED, looks)
    del interrupted[:]
    run(twins, 10, looks)
    assert not interrupted
    twins.both(lambda _, optimizer: optimizer.param_groups[0].update(weight_decay=0.5))
    run(twins, 10, looks)
    assert interrupted


def halve_weight_decay(_, optimizer):
    for group in optimizer.param_groups:
        group["weight_decay"] *= 0.5


def to_eval(model, _):
    model.eval()


def freeze(model, _):
    next(model.parameters()).requires_grad_(False)


@pytest.mark.parametrize("change", [halve_weight_decay, to_eval, freeze])
def test_what_changes_behind_it_is_seen_by_the_next_step(looks, change):
    twins = Twins(DropoutNet, ADAMW)
    run(twins, REPLAYED, looks)
    assert run(twins, 12, looks) == [2] * 12
    twins.both(change)
    run(twins, 12, looks)


@pytest.mark.parametrize("change", [halve_weight_decay, freeze])
def test_were_it_believed_what_changes_behind_it_would_be_missed(looks, monkeypatch, change):
    """The negative control."""
    twins = Twins(DropoutNet, ADAMW)
    run(twins, REPLAYED, looks)
    monkeypatch.setattr(steady.Steady, "goes_on", lambda self: self._glance is not None)
    twins.both(change)
    with pytest.raises(AssertionError):
        run(twins, 6, looks)
