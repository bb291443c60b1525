"""What a step counts in Python: the count is right, or the report says that it stands still.

A replay runs no Python. Where nothing of the step reads a count, it is in nobody's way as far as
what is trained goes, and yet somebody may look at it.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import optim

from both_ways import trained
from models import DropoutNet, make_batches, mean_loss
from tape import counts, reasons
from torchfast import Plan, TrainStep
from torchfast._core.compare import differences

pytestmark = pytest.mark.usefixtures("tape")

ADAMW = partial(optim.AdamW, lr=0.01, fused=True)
STEPS = 16


class Loss:
    def __init__(self):
        self.calls = self.steps = 0

    def counting(self, model, batch):
        self.calls += 1
        return mean_loss(model, batch)

    def plain(self, model, batch):
        return mean_loss(model, batch)


class Slotted:
    __slots__ = ("calls",)

    def __init__(self):
        self.calls = 0

    def counting(self, model, batch):
        self.calls += 1
        return mean_loss(model, batch)


class OfClass(Loss):
    calls = 0

    def counting(self, model, batch):
        OfClass.calls += 1
        return mean_loss(model, batch)


def train(loss, *, cuda_graph=True):
    return trained(loss.counting, STEPS, ADAMW, cuda_graph=cuda_graph)


def standing_still(step):
    return [d.detail for d in step.report().decisions if "stands still" in d.detail]


@pytest.mark.parametrize("kind", [Loss, Slotted, OfClass])
def test_a_count_that_nothing_reads_is_in_nobodys_way_and_the_report_says_that_it_stops(kind):
    expected, found = train(kind(), cuda_graph=False), train(kind())
    step = found[0]
    assert not differences(expected[1], found[1])
    assert counts(step) == (1, STEPS - 3, 3, 1)
    (note,) = standing_still(step)
    assert note == (
        f"'calls' of {kind.__name__} is counted in Python, which no replay runs: it stands still"
    )


def test_the_report_says_so_of_no_count_of_the_loops_own():
    loss = Loss()

    def counted_by_the_loop():
        loss.steps += 1

    torch.manual_seed(0)
    step = TrainStep(DropoutNet(), ADAMW, loss.plain, Plan(cuda_graph=True))
    for batch in make_batches(STEPS):
        step(batch)
        counted_by_the_loop()
    assert counts(step) == (1, STEPS - 3, 3, 1)
    assert standing_still(step) == []


def in_table_unread():
    seen = {"steps": 0}

    def loss_fn(model, batch):
        seen["steps"] += 1
        return mean_loss(model, batch)

    return loss_fn, lambda: seen["steps"]


def in_closure_unread():
    seen = 0

    def loss_fn(model, batch):
        nonlocal seen
        seen += 1
        return mean_loss(model, batch)

    return loss_fn, lambda: seen


@pytest.mark.parametrize("make", [in_table_unread, in_closure_unread])
def test_a_count_that_others_can_read_goes_on_right(make):
    """Nobody can tell by its name who reads an entry of a dictionary, or a cell."""
    loss_fn, seen = make()
    step = TrainStep(DropoutNet(), ADAMW, loss_fn, Plan(cuda_graph=True))
    for number, batch in enumerate(make_batches(STEPS), 1):
        step(batch)
        assert seen() == number
    assert counts(step) == (0, 0, STEPS, 0)
    assert "a number on the host" in reasons(step)[0]
    assert standing_still(step) == []
