"""Values that a step reads from around it: globals, classes, what objects and containers hold.

Each loss is run twice, with graphs and without, from the same start: what steers it may change
between two steps, or by the step itself, and both ways must train alike.
"""

from __future__ import annotations

import itertools
import random
import types
from collections import deque
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn, optim

from both_ways import alike, own_step, trained
from models import make_batches, mean_loss
from tape import counts, reasons
from torchfast._core.compare import differences
from torchfast.graphs import CUDAGraphStep
from torchfast.graphs.attributes import Attributes

pytestmark = pytest.mark.usefixtures("tape")

ADAMW = partial(optim.AdamW, lr=0.01, fused=True)
STEPS, CHANGED_AT, TURNS_AT = 16, 8, 12

weight, tensor, table = 1.0, torch.tensor(1.0), {"weight": 1.0}
config = types.SimpleNamespace(train=types.SimpleNamespace(weight=1.0))
count = {"steps": 0}


class Settings:
    weight = 1.0


class Loss:
    """A loss with what a step may read, each in an attribute."""

    factor = 1.0

    def __init__(self):
        self.tensor, self.tensors = torch.tensor(1.0), [torch.tensor(1.0)]
        self.function, self.criterion = torch.relu, nn.MSELoss()
        self.array, self.line = np.ones(2), deque([1.0, 2.0])
        self.steps = 0

    def by_tensor(self, model, batch):
        return mean_loss(model, batch) * self.tensor

    def by_tensors(self, model, batch):
        return mean_loss(model, batch) * self.tensors[0]

    def by_function(self, model, batch):
        return self.function(mean_loss(model, batch))

    def by_module(self, model, batch):
        return self.criterion(model(batch[0]), torch.full((len(batch[0]), 4), 2.0))

    def by_array(self, model, batch):
        return mean_loss(model, batch) * float(self.array[0])

    def by_line(self, model, batch):
        return mean_loss(model, batch) * self.line[0]

    def by_class(self, model, batch):
        return mean_loss(model, batch) * self.factor

    def by_steps(self, model, batch):
        self.steps += 1
        return mean_loss(model, batch) * (1.0 if self.steps <= TURNS_AT else 0.5)


class Sloppy(Loss):
    """With slots, beside a dictionary of attributes."""

    __slots__ = ("slotted",)

    def __init__(self):
        super().__init__()
        self.slotted = 1.0

    def by_slot(self, model, batch):
        return mean_loss(model, batch) * self.slotted


def put(name, value):
    globals()[name] = value


def by_global(model, batch):
    return mean_loss(model, batch) * weight


def by_global_tensor(model, batch):
    return mean_loss(model, batch) * tensor


def by_global_table(model, batch):
    return mean_loss(model, batch) * table["weight"]


def by_global_config(model, batch):
    return mean_loss(model, batch) * config.train.weight


def by_global_class(model, batch):
    return mean_loss(model, batch) * Settings.weight


def by_global_count(model, batch):
    count["steps"] += 1
    return mean_loss(model, batch) * (1.0 if count["steps"] <= TURNS_AT else 0.5)


def of_global(loss_fn, name, value):
    return lambda: (put(name, value), (loss_fn, lambda: put(name, value * 0.5)))[1]


def of_loss(name, attribute, value, kind=Loss):
    def make():
        loss = kind()
        return getattr(loss, name), lambda: setattr(loss, attribute, value)

    return make


def in_place(name, change):
    def make():
        loss = Loss()
        return getattr(loss, name), lambda: change(loss)

    return make


def in_table():
    table["weight"] = 1.0
    return by_global_table, lambda: table.update(weight=0.5)


def in_config():
    config.train.weight = 1.0
    return by_global_config, lambda: setattr(config.train, "weight", 0.5)


def in_settings():
    Settings.weight = 1.0
    return by_global_class, lambda: setattr(Settings, "weight", 0.5)


def in_class():
    Loss.factor = 1.0
    return Loss().by_class, lambda: setattr(Loss, "factor", 0.5)


def in_closure_of_batches():
    held = {"scale": torch.tensor(1.0)}
    return (
        lambda model, batch: mean_loss(model, batch) * held["scale"],
        lambda: held.update(scale=torch.tensor(0.5)),
    )


def deep():
    space = types.SimpleNamespace
    held = space(train=space(loss=space(kl=space(weight=1.0))))
    return (
        lambda model, batch: mean_loss(model, batch) * held.train.loss.kl.weight,
        lambda: setattr(held.train.loss.kl, "weight", 0.5),
    )


def with_scheduler():
    scheduler = optim.lr_scheduler.ConstantLR(optim.SGD([torch.ones(1)], lr=1.0), 1.0)
    return (
        lambda model, batch: mean_loss(model, batch) * (1.0 if scheduler.last_epoch == 0 else 0.5),
        lambda: (scheduler.optimizer.step(), scheduler.step()),
    )


CHANGES = {
    "global number": of_global(by_global, "weight", 1.0),
    "global tensor": of_global(by_global_tensor, "tensor", torch.tensor(1.0)),
    "global dictionary": in_table,
    "global namespace": in_config,
    "global class": in_settings,
    "class of an object": in_class,
    "tensor": of_loss("by_tensor", "tensor", torch.tensor(0.5)),
    "tensor in a list": in_place("by_tensors", lambda o: o.tensors.__setitem__(0, o.tensor / 2)),
    "tensor in a dictionary": in_closure_of_batches,
    "function": of_loss("by_function", "function", torch.tanh),
    "module": of_loss("by_module", "criterion", nn.L1Loss()),
    "array in place": in_place("by_array", lambda o: o.array.__setitem__(0, 0.5)),
    "deque": in_place("by_line", lambda o: o.line.rotate()),
    "slot beside a dictionary": of_loss("by_slot", "slotted", 0.5, Sloppy),
    "deep down": deep,
    "count of a scheduler": with_scheduler,
}


def train(make, *, cuda_graph=True):
    """Train; return the step, and all that it has left."""
    loss_fn, change = make()

    def in_time(number):
        if number == CHANGED_AT and change is not None:
            change()

    return trained(loss_fn, STEPS, ADAMW, cuda_graph=cuda_graph, before=in_time)


def trained_alike(make):
    return alike(partial(train, make))


@pytest.mark.parametrize("make", CHANGES.values(), ids=CHANGES)
def test_a_change_is_noticed_once(make):
    step = trained_alike(make)
    graphs, replays, eager, captures = counts(step)
    assert (graphs, captures) == (1, 2), reasons(step)
    # Another module is one more whose mode counts, so that kind of call is warmed up first.
    assert eager == STEPS - replays == (4 if make is CHANGES["module"] else 3)


@pytest.mark.parametrize("make", CHANGES.values(), ids=CHANGES)
def test_a_steady_run_looks_no_closer(make, monkeypatch):
    looks = []
    changed = Attributes.changed
    monkeypatch.setattr(Attributes, "changed", lambda self: looks.append(1) or changed(self))
    step, _ = train(lambda: (make()[0], None))
    assert counts(step) == (1, STEPS - 3, 3, 1), reasons(step)
    assert len(looks) <= 1  # before the glance is taken


# --- What the step itself counts or draws ---------------------------------------------------------


def in_object():
    return Loss().by_steps, None


def in_globals():
    count["steps"] = 0
    return by_global_count, None


def in_closure():
    steps = 0

    def loss_fn(model, batch):
        nonlocal steps
        steps += 1
        return mean_loss(model, batch) * (1.0 if steps <= TURNS_AT else 0.5)

    return loss_fn, None


def in_list():
    steps = [0, "steps"]

    def loss_fn(model, batch):
        steps[0] += 1
        return mean_loss(model, batch) * (1.0 if steps[0] <= TURNS_AT else 0.5)

    return loss_fn, None


@pytest.mark.parametrize("make", [in_object, in_globals, in_closure, in_list])
def test_a_step_that_counts_runs_eagerly_and_counts_right(make):
    """It turns long after the check, so nothing else would find it; and not a step too early."""
    step = trained_alike(make)
    assert counts(step) == (0, 0, STEPS, 0)
    (reason,) = reasons(step)
    assert "the step changes what no replay changes" in reason
    assert "a number on the host" in reason


@pytest.mark.parametrize("make", [in_object, in_globals, in_closure, in_list])
def test_without_the_guard_a_step_that_counts_trains_wrong(make, monkeypatch):
    monkeypatch.setattr(Attributes, "counted", lambda self, kind: None)
    # Each change of the count would be noticed too, and the step run eagerly after a few.
    monkeypatch.setattr(Attributes, "changed", lambda self: None)
    _, expected = train(make, cuda_graph=False)
    step, found = train(make)
    assert counts(step)[1] > 0
    assert differences(expected, found)


class Drawing:
    def __init__(self, generator):
        self.generator = generator

    def __call__(self, model, batch):
        return mean_loss(model, batch) * (2.0 if self.generator.random() < 0.1 else 1.0)


OWN = {
    "random.Random": lambda: random.Random(3),
    "numpy's Generator": lambda: np.random.default_rng(5),
    "numpy's RandomState": lambda: np.random.RandomState(3),
}


@pytest.mark.parametrize("generator", OWN.values(), ids=OWN)
def test_a_generator_of_ones_own_on_the_host_is_noticed(generator):
    """What it decides is rare, so that the check would mostly find nothing."""
    step = trained_alike(lambda: (Drawing(generator()), None))
    assert counts(step) == (0, 0, STEPS, 0)
    assert "of its own on the host" in reasons(step)[0]


class Every(optim.SGD):
    """Halves what it trains at some steps, by a count in an attribute."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        self.num_steps += 1
        if self.num_steps == TURNS_AT:
            for parameter in self.param_groups[0]["params"]:
                parameter.mul_(0.5)


def hooked(params):
    """An optimizer that a hook makes halve what it trains at some step."""
    optimizer = optim.SGD(params, lr=0.1)
    steps = itertools.count(1)
    now = [0]

    def halve(optimizer, *_):
        now[0] = next(steps)
        if now[0] == TURNS_AT:
            with torch.no_grad():
                optimizer.param_groups[0]["params"][0].mul_(0.5)

    optimizer.register_step_post_hook(halve)
    return optimizer


@pytest.mark.parametrize("make", [Every, hooked])
def test_what_counts_in_an_optimizer_or_its_hook_is_noticed(make):
    results = []
    for is_captured in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(8, 4)
        optimizer = make(model.parameters())

        step = own_step(model, optimizer)
        fn = CUDAGraphStep(step, state=[model, optimizer]) if is_captured else step
        losses = [fn(batch) for batch in make_batches(STEPS)]
        results.append([losses, model.state_dict()])
    assert reasons(fn)
    assert not differences(*results)
    assert counts(fn) == (0, 0, STEPS, 0)
