"""Inputs that are objects of no known container: a graph reads the very tensors in them."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn, optim

from tape import counts, reasons, without_check
from torchfast import CUDAGraphStep, Trainer
from torchfast.graphs import signature
from torchfast.graphs.signature import describe

X = torch.ones(3)


class Graph:
    """A batch as libraries of graphs have it: tensors in a table of its own."""

    def __init__(self, **tensors):
        self.store = {"tensors": tensors}

    @property
    def x(self):
        return self.store["tensors"]["x"]

    @x.setter
    def x(self, value):
        self.store["tensors"]["x"] = value


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x):
        self.x = x


class Last(deque):
    @property
    def x(self):
        return self[-1]

    @x.setter
    def x(self, value):
        self[-1] = value


HOLDERS = {
    "a namespace": lambda x: SimpleNamespace(x=x),
    "slots": Slotted,
    "a table in a table": lambda x: Graph(x=x),
    "a deque": lambda x: Last([x]),
}


def same(a, b):
    return describe(a).key == describe(b).key


@pytest.mark.parametrize("name", HOLDERS)
def test_an_object_counts_by_being_it_with_the_same_in_it(name):
    held, x = HOLDERS[name](X), X + 1
    before = describe(held).key
    assert describe(held).key == before
    assert not same(held, HOLDERS[name](X)) or name == "a deque"
    held.x = x
    after = describe(held).key
    assert after != before
    held.x = X
    assert describe(held).key == before


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (1.0, 2.0),
        (1, True),
        ("a", "b"),
        (None, 0),
        ([1, 2], [1, 3]),
        ({"a": 1}, {"a": 2}),
        ({1, 2}, {1, 3}),
        (np.zeros(2), np.ones(2)),
        (SimpleNamespace(a=[1]), SimpleNamespace(a=[1])),
    ],
)
def test_values_in_an_object_count(old, new):
    held = SimpleNamespace(inner=SimpleNamespace(value=old))
    before = describe(held).key
    assert describe(held).key == before
    held.inner.value = new
    assert describe(held).key != before


def test_what_changes_in_place_in_an_object_counts():
    held = SimpleNamespace(array=np.zeros(3), numbers=[1.0, 2.0])
    keys = [describe(held).key]
    held.array[1] = 5
    keys.append(describe(held).key)
    held.numbers[0] = 7.0
    keys.append(describe(held).key)
    held.more = 1
    keys.append(describe(held).key)
    assert len(set(keys)) == 4


def test_an_object_in_itself_and_one_of_many_are_looked_at_once():
    held = SimpleNamespace(many=[SimpleNamespace(number=n) for n in range(2000)])
    held.own = held
    assert len(describe(held).key) < 20
    held.many = [[SimpleNamespace(number=n) for n in range(100)] for _ in range(100)]
    assert same(held, held)


def test_a_key_keeps_no_batch():
    held = Graph(x=torch.ones(3))
    key, gone = describe(held).key, weakref.ref(held.x)
    del held
    gc.collect()
    assert gone() is None
    assert key != describe(Graph(x=torch.ones(3))).key


def loss_fn(model, batch):
    return model(batch.x).square().mean()


def train(name, *, bare, is_reused=True, count=24):
    """Train with a captured step and a plain loop; return the step, and whether they differ."""
    model = nn.Linear(4, 1)
    plain = copy.deepcopy(model)
    optimizer, other = (optim.SGD(m.parameters(), lr=0.1) for m in (model, plain))

    def whole(batch):
        optimizer.zero_grad()
        loss = loss_fn(model, batch)
        loss.backward()
        optimizer.step()

    if bare:
        captured = step = CUDAGraphStep(whole, state=[model, optimizer])
    else:
        captured = Trainer(model, optimizer, loss_fn)
        step = captured.step
    batch = HOLDERS[name](torch.randn(6, 4))
    for _ in range(count):
        if is_reused:
            batch.x = torch.randn(6, 4)
        step(batch)
        other.zero_grad()
        loss_fn(plain, batch).backward()
        other.step()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return captured, not all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.usefixtures("tape")
@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("name", HOLDERS)
def test_an_object_that_is_used_again_for_each_batch_is_never_stale(name, bare):
    captured, differs = train(name, bare=bare)
    assert not differs
    assert counts(captured) == (0, 0, 24, 0)


@pytest.mark.usefixtures("tape")
@pytest.mark.parametrize("name", HOLDERS)
def test_an_object_whose_tensors_stay_is_captured(name):
    captured, differs = train(name, bare=False, is_reused=False)
    assert not differs
    assert counts(captured) == (1, 21, 3, 1)


@pytest.mark.usefixtures("tape")
def test_without_the_look_into_it_the_first_batch_is_trained_on_for_ever(monkeypatch):
    monkeypatch.setattr(signature, "_within", lambda value: ())
    without_check(monkeypatch)
    _, differs = train("slots", bare=False)
    assert differs


@pytest.mark.usefixtures("tape")
def test_objects_that_are_new_each_time_are_told_of(caplog):
    model = nn.Linear(4, 1)
    step = CUDAGraphStep(lambda batch: loss_fn(model, batch), state=[model], max_graphs=2)
    for _ in range(20):
        step(SimpleNamespace(x=torch.randn(2, 4)))
    told = "as a dictionary, a tuple or a dataclass of them"
    assert [told in record.getMessage() for record in caplog.records] == [True]
    assert told in reasons(step)[0]


@pytest.mark.usefixtures("tape")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_train_and_are_told_of_once(layout):
    model = nn.Linear(4, 1)
    plain = copy.deepcopy(model)
    optimizer, other = (optim.SGD(m.parameters(), lr=0.1) for m in (model, plain))

    def loss_of(model, batch):
        return torch.cat([model(part) for part in batch.unbind()]).square().mean()

    trainer = Trainer(model, optimizer, loss_of)

    def batches():
        torch.manual_seed(0)
        for number in range(12):
            sizes = 1 + number % 3, 2
            parts = [torch.randn(size, 4) for size in sizes]
            yield torch.nested.nested_tensor(parts, layout=layout)

    trainer.fit(batches(), steps=12, progress="off")
    for batch in batches():
        other.zero_grad()
        loss_of(plain, batch).backward()
        other.step()
    assert torch.equal(model.weight, plain.weight)
    assert counts(trainer) == (0, 0, 12, 0)
    (reason,) = [r for r in reasons(trainer) if "nested float32" in r]
    assert "an input is a nested tensor" in reason
