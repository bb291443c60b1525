"""What a loop keeps in objects of its own beside a step, by names that the step reads elsewhere."""

from __future__ import annotations

import types
from functools import partial

import pytest
import torch
from torch import nn, optim

from models import make_batches, mean_loss
from tape import CPU, counts, reasons
from torchfast import Plan, TrainStep
from torchfast._core.compare import differences
from torchfast.graphs.attributes import Attributes

pytestmark = pytest.mark.usefixtures("tape")

STEPS = 16


class Net(nn.Module):
    """Returns an object with its loss, as models of a library do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, batch):
        return types.SimpleNamespace(loss=mean_loss(self.layer, batch))


class Run:
    def __init__(self):
        self.factor, self.loss = 1.0, None


class Slotted:
    __slots__ = ("factor", "loss")

    def __init__(self):
        self.factor, self.loss = 1.0, None


class Shared:
    factor, loss = 1.0, None


class Job:
    """A loop in an object whose method is the loss function."""

    def __init__(self):
        self.factor, self.loss, self.batch, self.num_steps = 1.0, None, None, 0

    def loss_fn(self, model, batch):
        outputs = model(batch)
        return outputs.loss * self.factor


def beside(run):
    return run, lambda model, batch: model(batch).loss * run.factor


def job():
    run = Job()
    return run, run.loss_fn


@pytest.mark.parametrize(
    "make",
    [
        lambda: beside(Run()),
        lambda: beside(Slotted()),
        lambda: beside(type("Own", (Shared,), dict(vars(Shared)))),
        job,
    ],
    ids=["object", "slots", "class", "method"],
)
def test_a_loss_that_the_loop_keeps_is_not_the_one_that_a_model_returns(make, monkeypatch):
    looks = []
    changed = Attributes.changed
    monkeypatch.setattr(Attributes, "changed", lambda self: looks.append(1) or changed(self))
    results = []
    for cuda_graph in (False, True):
        run, loss_fn = make()
        torch.manual_seed(0)
        step = TrainStep(
            Net(), partial(optim.AdamW, lr=0.01, fused=True), loss_fn, Plan(cuda_graph=cuda_graph)
        )
        losses = []
        for number, batch in enumerate(make_batches(STEPS)):
            if number == STEPS // 2:
                assert len(looks) <= 1  # before the glance is taken, and not in each step
                run.factor = 0.5  # which is read, and noticed
            run.loss = step(batch)
            losses.append(run.loss)
            if isinstance(run, Job):
                run.batch, run.num_steps = batch, number
        results.append([losses, step.model.state_dict()])
    assert not differences(*results)
    assert counts(step)[::3] == (1, 2), reasons(step)


@pytest.mark.parametrize(
    "read",
    [lambda held: held().loss, lambda held: sum(vars(held()).values())],
    ids=["of a result", "by no name"],
)
def test_a_tensor_that_a_number_takes_the_place_of_is_noticed(read):
    held = Run()
    held.loss = torch.ones(())
    attributes = Attributes(lambda held=held: read(lambda: held), CPU)
    attributes.refresh([])
    held.loss = torch.zeros(())
    assert attributes.changed() is None
    held.loss = 0.5
    assert attributes.changed() == "'loss' of Run"
    attributes.refresh([])
    held.loss = 1.0
    assert attributes.changed() == "'loss' of Run"
