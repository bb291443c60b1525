"""A loss that reads the learning rate of an optimizer, which a schedule moves on in each step.

Where the update is in the graph, a tensor on the device stands in the groups. Where it runs behind
the graph, or is another model's, there is a Python number, which a replay would not read again.
"""

from __future__ import annotations

import types
from functools import partial

import pytest
import torch
from torch import optim

from both_ways import alike, own_step, trained
from models import DropoutNet, make_batches, mean_loss
from tape import counts, reasons
from torchfast import CaptureError, CUDAGraphOptions, Plan, TrainStep
from torchfast._core.compare import differences
from torchfast.graphs import CUDAGraphStep, places

pytestmark = pytest.mark.usefixtures("tape")

STEPS = 16
BEHIND = partial(optim.Adam, lr=0.01)  # whose update no graph holds bit for bit
EACH_STEP = partial(optim.lr_scheduler.ExponentialLR, gamma=0.9)
AT_SOME = partial(optim.lr_scheduler.MultiStepLR, milestones=[7], gamma=0.1)


class Loss:
    """A loss whose weight follows the learning rate."""

    def __init__(self):
        self.optimizer = self.scheduler = None

    def by_optimizer(self, model, batch):
        return mean_loss(model, batch) * (1.0 + self.optimizer.param_groups[0]["lr"])

    def by_method(self, model, batch):
        return mean_loss(model, batch) * (1.0 + self.rate())

    def rate(self):
        return next(iter(self.optimizer.param_groups))["lr"]

    def by_scheduler(self, model, batch):
        return mean_loss(model, batch) * (1.0 + self.scheduler.optimizer.param_groups[0]["lr"])

    def by_last(self, model, batch):
        return mean_loss(model, batch) * (1.0 + self.scheduler.get_last_lr()[0])

    def by_none(self, model, batch):
        return mean_loss(model, batch)


def deep(loss):
    """Let the optimizer lie where objects are not looked through for state."""
    held = types.SimpleNamespace(trainer=types.SimpleNamespace(parts=loss))

    def loss_fn(model, batch):
        groups = held.trainer.parts.optimizer.param_groups
        return mean_loss(model, batch) * (1.0 + groups[0]["lr"])

    return loss_fn


def in_closure(loss):
    def loss_fn(model, batch):
        return mean_loss(model, batch) * (1.0 + loss.optimizer.param_groups[0]["lr"])

    return loss_fn


READING = {
    "attribute": lambda loss: loss.by_optimizer,
    "method": lambda loss: loss.by_method,
    "deep down": deep,
    "closure": in_closure,
}


# Of a scheduler the count of its epochs is looked at, which moves whether or not the rate does.
BY_SCHEDULER = {
    "scheduler": lambda loss: loss.by_scheduler,
    "last rate": lambda loss: loss.by_last,
}


def train(make, optimizer, scheduler, *, cuda_graph=True):
    loss = Loss()

    def started(step):
        loss.optimizer, loss.scheduler = step.optimizer, step.lr_scheduler

    options = {"cuda_graph": cuda_graph, "scheduler": scheduler, "started": started}
    return trained(make(loss), STEPS, optimizer, **options)


def trained_alike(make, optimizer=BEHIND, scheduler=EACH_STEP):
    return alike(partial(train, make, optimizer, scheduler))


@pytest.mark.parametrize("make", (READING | BY_SCHEDULER).values(), ids=READING | BY_SCHEDULER)
def test_a_rate_that_moves_in_each_step_is_read_in_each(make):
    step = trained_alike(make)
    assert counts(step)[1] <= 2
    assert "changed" in reasons(step)[-1]


@pytest.mark.parametrize("make", READING.values(), ids=READING)
def test_a_rate_that_seldom_moves_is_captured_anew(make):
    step = trained_alike(make, scheduler=AT_SOME)
    graphs, replays, eager, captures = counts(step)
    assert (graphs, captures) == (1, 2)
    assert replays == STEPS - eager
    assert eager == 3


@pytest.mark.parametrize("make", READING.values(), ids=READING)
def test_one_that_is_not_looked_at_would_be_trained_wrong(make, monkeypatch):
    monkeypatch.setattr(places, "_groups_of", lambda *_: [])
    _, expected = train(make, BEHIND, EACH_STEP, cuda_graph=False)
    step, found = train(make, BEHIND, EACH_STEP)
    assert counts(step)[1] > 2
    assert differences(expected, found)


def test_a_rate_that_the_loss_does_not_read_is_no_change():
    step = trained_alike(lambda loss: loss.by_none)
    assert counts(step) == (1, STEPS - 3, 3, 1), reasons(step)


def test_a_rate_on_the_device_is_read_at_each_replay():
    """The update is in the graph, and so is the tensor that holds the rate, of another type."""
    fused = partial(optim.AdamW, lr=0.01, fused=True)
    _, (expected, *_) = train(lambda loss: loss.by_optimizer, fused, EACH_STEP, cuda_graph=False)
    step, (found, *_) = train(lambda loss: loss.by_optimizer, fused, EACH_STEP)
    assert counts(step) == (1, STEPS - 3, 3, 1), reasons(step)
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other.float(), rtol=1e-5, atol=1e-5)


class Around(optim.Optimizer):
    """An optimizer around another one, whose groups are its own."""

    def __init__(self, inner):
        self.inner = inner
        super().__init__(inner.param_groups, inner.defaults)
        self.param_groups = inner.param_groups

    def step(self, closure=None):
        assert self.param_groups is self.inner.param_groups
        return self.inner.step(closure)


def test_groups_that_are_the_steps_own_are_watched_as_such():
    """Through whatever object they are reached: their rates are brought up to date."""
    results = []
    for is_captured in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 4)
        inner = optim.SGD(model.parameters(), lr=0.1)
        optimizer = Around(inner)
        scheduler = EACH_STEP(inner)
        step = own_step(model, optimizer)
        fn = CUDAGraphStep(step, state=[model, optimizer, inner]) if is_captured else step
        for batch in make_batches(STEPS):
            fn(batch)
            scheduler.step()
        results.append(model.state_dict())
    assert not differences(*results)
    assert counts(fn) == (1, STEPS - 3, 3, 1), reasons(fn)


FUSED = partial(optim.AdamW, lr=0.01, fused=True)
IN_GRAPH = {"SGD": partial(optim.SGD, lr=0.01), "fused AdamW": FUSED}


def stepped_in_a_hook(step):
    scheduler = EACH_STEP(step.optimizer)
    step.optimizer.register_step_post_hook(lambda *_: scheduler.step())


def halved_in_a_hook(step):
    def halve(optimizer, *_):
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * 0.5

    step.optimizer.register_step_post_hook(halve)


@pytest.mark.parametrize("hook", [stepped_in_a_hook, halved_in_a_hook])
@pytest.mark.parametrize("optimizer", IN_GRAPH.values(), ids=IN_GRAPH)
def test_a_rate_that_the_step_itself_moves_makes_it_run_eagerly(optimizer, hook):
    def train(cuda_graph):
        return trained(mean_loss, STEPS, optimizer, cuda_graph=cuda_graph, started=hook)

    _, expected = train(cuda_graph=False)
    step, found = train(cuda_graph=True)
    assert "the step changes its learning rate" in str(step.report())
    assert counts(step)[1] > 0  # of the rest, behind which the update runs
    rates = [state[-1]["param_groups"][0]["lr"] for state in (expected, found)]
    assert all(isinstance(rate, float) for rate in rates)
    # The first is as float32 has it, which the tensor was.
    assert rates[1] == pytest.approx(rates[0], rel=1e-6)
    for one, other in zip(expected[0], found[0], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_a_rate_that_the_step_itself_moves_raises_where_that_is_asked_for():
    model = DropoutNet()
    step = TrainStep(
        model,
        partial(optim.SGD, lr=0.01),
        mean_loss,
        Plan(cuda_graph=CUDAGraphOptions(on_failure="raise")),
    )
    stepped_in_a_hook(step)
    batches = make_batches(2)
    step(batches[0])
    with pytest.raises(CaptureError, match="the step changes its learning rate"):
        step(batches[1])
    assert step.optimizer.param_groups[0]["lr"] == pytest.approx(0.009)
