"""The look behind a launch: taken where it hides behind the device's work, and never believed."""

from __future__ import annotations

from functools import partial

import pytest
from torch import optim

from models import DropoutNet, make_batches
from tape import TapeBackend, Twins
from torchfast.graphs import steady
from torchfast.graphs.watch import Glance

ADAMW = partial(optim.AdamW, lr=0.01, fused=True)
REPLAYED = 6  # steps, until a glance is there


@pytest.fixture
def looks(tape, monkeypatch):
    """Give how many glances each step took; append zero before one."""
    counted = [0]
    is_as_it_was = Glance.is_as_it_was

    def counting(self):
        counted[-1] += 1
        return is_as_it_was(self)

    monkeypatch.setattr(Glance, "is_as_it_was", counting)
    monkeypatch.setattr(steady, "_MANY", 1)
    return counted


def device_is_through(monkeypatch, answers):
    """Let the device say so each time that it is asked, or do so forever if it is a bool."""
    asked = []

    def launched(self):
        def is_through():
            asked.append(1)
            return answers if isinstance(answers, bool) else answers.pop(0)

        return is_through

    monkeypatch.setattr(TapeBackend, "launched", launched)
    return asked


def run(twins, number, looks):
    """Run steps, and return how many glances each has taken."""
    del looks[:]
    for batch in make_batches(number):
        looks.append(0)
        twins.step(batch)
    assert not twins.differences()
    return looks


def test_one_more_behind_each_launch_while_the_device_is_at_work(looks, monkeypatch):
    device_is_through(monkeypatch, False)
    twins = Twins(DropoutNet, ADAMW)
    run(twins, REPLAYED, looks)
    assert run(twins, 10, looks) == [2] * 10


def test_none_where_the_device_was_through_before_the_host(looks, monkeypatch):
    """It would have kept the device waiting, so it is tried again only now and then."""
    monkeypatch.setattr(steady, "_NOT_AHEAD", 4)
    asked = device_is_through(monkeypatch, True)
    twins = Twins(DropoutNet, ADAMW)
    run(twins, REPLAYED, looks)
    assert sorted(run(twins, 10, looks)) == [1] * 8 + [2] * 2
    before = len(asked)
    run(twins, 10, looks)
    assert len(asked) == before + 2


def test_one_that_was_in_the_way_once_is_taken_again(looks, monkeypatch):
    monkeypatch.setattr(steady, "_NOT_AHEAD", 3)
    device_is_through(monkeypatch, [False, True] + [False] * 20)
    twins = Twins(DropoutNet, ADAMW)
    run(twins, REPLAYED - 1, looks)
    assert run(twins, 10, looks)[-6:] == [2] * 6
    assert looks.count(1) == 3


def test_none_for_what_is_read_in_no_time(looks, monkeypatch):
    monkeypatch.setattr(steady, "_MANY", 2_000)
    asked = device_is_through(monkeypatch, False)
    twins = Twins(DropoutNet, ADAMW)
    run(twins, REPLAYED, looks)
    assert run(twins, 10, looks) == [1] * 10
    assert not asked


def halve_weight_decay(_, optimizer):
    for group in optimizer.param_groups:
        group["weight_decay"] *= 0.5


def to_eval(model, _):
    model.eval()


def freeze(model, _):
    next(model.parameters()).requires_grad_(False)


@pytest.mark.parametrize("change", [halve_weight_decay, to_eval, freeze])
def test_what_changes_behind_it_is_seen_by_the_next_step(looks, monkeypatch, change):
    device_is_through(monkeypatch, False)
    twins = Twins(DropoutNet, ADAMW)
    run(twins, REPLAYED, looks)
    assert run(twins, 12, looks) == [2] * 12
    twins.both(change)
    run(twins, 12, looks)


@pytest.mark.parametrize("change", [halve_weight_decay, freeze])
def test_were_it_believed_what_changes_behind_it_would_be_missed(looks, monkeypatch, change):
    """The negative control."""
    device_is_through(monkeypatch, False)
    twins = Twins(DropoutNet, ADAMW)
    run(twins, REPLAYED, looks)
    monkeypatch.setattr(steady.Steady, "goes_on", lambda self: self._glance is not None)
    twins.both(change)
    with pytest.raises(AssertionError):
        run(twins, 6, looks)
