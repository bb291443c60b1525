"""Iterators of the loop: what its own methods and functions draw is none of the step's.

An object that the step has something of mostly belongs to the loop, and has that one's functions.
"""

from __future__ import annotations

import collections
import itertools
from functools import partial

import pytest
import torch
from torch import optim

from models import DropoutNet, make_batches, mean_loss
from tape import counts, reasons
from torchfast import Plan, TrainStep
from torchfast._core.compare import differences
from torchfast.graphs import CUDAGraphStep

pytestmark = pytest.mark.usefixtures("tape")

ADAMW = partial(optim.AdamW, lr=0.01, fused=True)
STEPS, TURNS_AT = 16, 12


def values():
    """Yield the weights of a loss."""
    for step in itertools.count():
        yield 1.0 if step < TURNS_AT else 0.5


class Runner:
    """A loop whose methods have the names of those that the step calls of other objects."""

    def __init__(self, *, is_captured):
        torch.manual_seed(0)
        self.model = DropoutNet()
        self.optimizer = ADAMW(self.model.parameters())
        self.batches = iter(make_batches(STEPS))
        self.weights = values()
        self.captured = self.train_step
        if is_captured:
            self.captured = CUDAGraphStep(self.train_step, state=[self.model, self.optimizer])

    def train_step(self, batch):
        self.model.train()
        self.optimizer.zero_grad()
        loss = mean_loss(self.model, batch) * self.weight()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def weight(self):
        return 1.0

    def train(self):
        return [self.step() for _ in range(STEPS)]

    def step(self):
        return self.captured(next(self.batches))


class DrawingRunner(Runner):
    def weight(self):
        if self.captured is None:  # names it, and does not call it
            return 1.0
        return next(self.weights)


class NamedAsMethod(Runner):
    """Calls its captured step as the step calls the optimizer's."""

    def __init__(self, **options):
        super().__init__(**options)
        self.step = self.captured

    def train_step(self, batch):
        self.optimizer.zero_grad()
        loss = mean_loss(self.model, batch) * next(self.weights)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def train(self):
        return [self.step(next(self.batches)) for _ in range(STEPS)]


class Clock:
    """Is called by a loop, which it has, and draws there; its step has only another part of it."""

    def __init__(self, loop):
        self.loop, self.script = loop, values()

    def tick(self):
        next(self.script)


class Job:
    def __init__(self, loop):
        self.tick = Clock(loop).tick

    def factor(self):
        return 2.0

    def loss_fn(self, model, batch):
        return mean_loss(model, batch) * self.factor()


class JobByName(Job):
    """Reads by a name that is written there."""

    def loss_fn(self, model, batch):
        return mean_loss(model, batch) * getattr(self, "factor", None)()


class FactorByTick(Job):
    """Draws in what the loop draws in, by a function that only its attribute has."""

    def __init__(self, loop):
        super().__init__(loop)
        self.factor = self.drawing

    def drawing(self):
        self.tick()
        return 2.0


class FactorByTable(collections.UserDict):
    """Has the function where only its base, which is a library's, reads it."""

    def __init__(self, loop):
        super().__init__(factor=FactorByTick(loop).factor)

    def loss_fn(self, model, batch):
        return mean_loss(model, batch) * self["factor"]()


class FactorByAnyName(FactorByTick):
    """Calls it by a name that only an attribute has."""

    def __init__(self, loop):
        super().__init__(loop)
        self.name = "tick"

    def drawing(self):
        getattr(self, self.name)()
        return 2.0


@pytest.mark.parametrize("kind", [Job, JobByName, FactorByTick, FactorByTable, FactorByAnyName])
def test_a_function_of_the_loops_that_an_object_of_the_steps_has_is_none_of_the_steps(kind):
    def loop(step, job):
        for batch in make_batches(STEPS):
            step(batch)
            job.tick()

    job = kind(loop)
    torch.manual_seed(0)
    step = TrainStep(DropoutNet(), ADAMW, job.loss_fn, Plan(cuda_graph=True))
    loop(step, Job(loop) if kind is FactorByTable else job)
    is_drawing = kind not in (Job, JobByName)
    assert counts(step) == ((0, 0, STEPS, 0) if is_drawing else (1, STEPS - 3, 3, 1)), reasons(step)
    told = ["'script' of Clock" in reason for reason in reasons(step)]
    assert told == [True] * is_drawing


@pytest.mark.parametrize("kind", [Runner, DrawingRunner, NamedAsMethod])
def test_a_method_that_calls_the_captured_step_is_none_of_it(kind):
    plain, captured = kind(is_captured=False), kind(is_captured=True)
    torch.manual_seed(1)
    expected = plain.train()
    torch.manual_seed(1)
    assert not differences(expected, captured.train())
    assert not differences(plain.model.state_dict(), captured.model.state_dict())
    is_drawing = kind is not Runner
    assert counts(captured.captured)[1] == (0 if is_drawing else STEPS - 3)
    told = [f"'weights' of {kind.__name__}" in reason for reason in reasons(captured.captured)]
    assert told == [True] * is_drawing
