"""Values outside of modules that a graph freezes: a change between two steps is noticed."""

from __future__ import annotations

import collections
import gc
import types
import weakref
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import pytest
from torch import nn

from host_values import ADAMW, CHANGED_AT, train
from models import DropoutNet, make_batches, mean_loss
from tape import CPU, Twins, reasons
from torchfast.graphs.attributes import Attributes

pytestmark = pytest.mark.usefixtures("tape")

refs = weakref.WeakSet()


class Annealed:
    """A loss whose weight the loop sets, beside what it counts."""

    def __init__(self):
        self.weight, self.num_steps, self.losses = 1.0, 0, []

    def scale(self):
        return self.weight

    def __call__(self, model, batch):
        return mean_loss(model, batch) * self.scale()

    def method(self, model, batch):
        return self(model, batch)

    def count(self, loss):
        self.num_steps += 1
        self.losses.append(loss)


def times(factors, model, batch):
    return mean_loss(model, batch) * factors["weight"]


def in_closure():
    weight = 1.0

    def loss_fn(model, batch):
        return mean_loss(model, batch) * weight

    def put(value):
        nonlocal weight
        weight = value

    return loss_fn, put


def with_default():
    def loss_fn(model, batch, weight=1.0):
        return mean_loss(model, batch) * weight

    return loss_fn, lambda value: setattr(loss_fn, "__defaults__", (value,))


def in_object():
    loss_fn = Annealed()
    return loss_fn, partial(setattr, loss_fn, "weight")


def in_method():
    loss = Annealed()
    return loss.method, partial(setattr, loss, "weight")


def in_namespace():
    config = types.SimpleNamespace(loss=types.SimpleNamespace(weight=1.0))
    return (
        lambda model, batch: mean_loss(model, batch) * config.loss.weight,
        partial(setattr, config.loss, "weight"),
    )


class Config(collections.UserDict):
    """Its data is read by methods of its base, which is a library's."""


def in_user_dict():
    config = Config(weight=1.0)
    return (
        lambda model, batch: mean_loss(model, batch) * config["weight"],
        partial(config.__setitem__, "weight"),
    )


def in_plain_user_list():
    config = collections.UserList([1.0])
    return (
        lambda model, batch: mean_loss(model, batch) * config[0],
        partial(config.__setitem__, 0),
    )


def in_partial():
    factors = {"weight": 1.0}
    return partial(times, factors), partial(factors.__setitem__, "weight")


@dataclass(slots=True)
class Slotted:
    weight: float = 1.0


def in_slots():
    config = Slotted()
    return (
        lambda model, batch: mean_loss(model, batch) * config.weight,
        partial(setattr, config, "weight"),
    )


class Private:
    __slots__ = ("__weight",)

    def __init__(self):
        self.__weight = 1.0

    def weigh(self, loss):
        return loss * self.__weight

    def put(self, value):
        self.__weight = value


def in_private_slot():
    config = Private()
    return lambda model, batch: config.weigh(mean_loss(model, batch)), config.put


def on_function():
    def loss_fn(model, batch):
        return mean_loss(model, batch) * loss_fn.weight

    loss_fn.weight = 1.0
    return loss_fn, partial(setattr, loss_fn, "weight")


class Registry:
    weights: ClassVar[dict[str, float]] = {}

    @classmethod
    def weight(cls, name):
        return cls.weights[name]


def in_registry():
    """Of a class of which there is no object."""
    Registry.weights["mean"] = 1.0
    return (
        lambda model, batch: mean_loss(model, batch) * Registry.weight("mean"),
        partial(Registry.weights.__setitem__, "mean"),
    )


OUTSIDE = [
    *(in_object, in_method, in_partial, in_closure, with_default, in_namespace, in_slots),
    *(in_private_slot, on_function, in_registry),
    *(in_user_dict, in_plain_user_list),
]


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("make", OUTSIDE)
def test_a_change_outside_of_modules_is_noticed(make, bare):
    loss_fn, put = make()
    twins = Twins(DropoutNet, ADAMW, loss_fn, bare=bare)
    assert train(twins, lambda _: put(0.5)) is None
    assert twins.counts == (1, 15, 3, 2), reasons(twins.captured)


@pytest.mark.parametrize("make", OUTSIDE)
def test_without_the_watch_it_would_train_wrong_there_too(make, monkeypatch):
    monkeypatch.setattr(Attributes, "_places", lambda self: iter(()))
    loss_fn, put = make()
    assert train(Twins(DropoutNet, ADAMW, loss_fn), lambda _: put(0.5)) == CHANGED_AT


@pytest.mark.parametrize("make", OUTSIDE)
def test_a_steady_run_looks_no_closer(make, monkeypatch):
    twins = Twins(DropoutNet, ADAMW, make()[0])
    batches = make_batches(12)
    twins.run(batches[:6])
    looks = []
    monkeypatch.setattr(Attributes, "changed", lambda self: looks.append(1))
    twins.run(batches[6:])
    assert not looks


def test_a_weight_that_changes_in_each_step_runs_eagerly_and_right():
    loss_fn, put = in_object()
    twins = Twins(DropoutNet, ADAMW, loss_fn)
    for number, batch in enumerate(make_batches(14)):
        put(1 / (1 + number))
        twins.step(batch)
        assert not twins.differences(gradients=False)
    assert any("'weight' of Annealed changed" in reason for reason in reasons(twins.captured))


@pytest.mark.parametrize("bare", [False, True])
def test_what_the_loop_keeps_beside_is_no_change(bare):
    loss = Annealed()
    twins = Twins(DropoutNet, ADAMW, loss.method, bare=bare)
    for batch in make_batches(18):
        loss.count(twins.step(batch)[1])
        assert not twins.differences(gradients=False)
    assert twins.counts == (1, 15, 3, 1), reasons(twins.captured)


class Output:
    def __init__(self, loss):
        self.loss = loss


class Remembers:
    """A loss that puts what it computes into an object, a new one in each step."""

    def __init__(self):
        self.outputs, self.weight = Output(None), 1.0

    def __call__(self, model, batch):
        self.outputs = Output(mean_loss(model, batch) * self.weight)
        refs.add(self.outputs)
        return self.outputs.loss


def test_objects_that_the_step_makes_are_no_change_and_are_not_kept():
    refs.clear()
    loss_fn = Remembers()
    twins = Twins(DropoutNet, ADAMW, loss_fn)
    batches = [tuple(t[: 3 + n % 4] for t in b) for n, b in enumerate(make_batches(30))]
    for batch in batches:
        loss_fn.weight = float("1.0")  # another object that says the same
        twins.step(batch)
        assert not twins.differences(gradients=False)
    assert twins.counts[0] == twins.counts[3] == 4, reasons(twins.captured)
    gc.collect()
    # The latest, and that of each graph, which is the latest again behind its replays.
    assert len(refs) <= 1 + 4


def test_a_container_in_itself_is_looked_at_once():
    module = nn.Linear(8, 4)
    module.tree = {"scale": 1.0, "parts": []}
    module.tree["parts"].append(module.tree)
    attributes = Attributes(None, CPU)
    attributes.refresh([module])
    assert attributes.changed() is None
    module.tree["scale"] = 2.0
    assert attributes.changed() == "'tree' of Linear"


def test_a_large_container_is_data():
    attributes = Attributes(partial(times, {"weight": 1.0, "data": [1.0] * 1000}), CPU)
    attributes.refresh([])
    assert len(list(attributes.objects())) < 50
    assert attributes.changed() is None
