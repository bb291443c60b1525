"""What a value is, told by its type, is what it says when it is asked itself."""

from __future__ import annotations

import collections
import enum
import functools
import gc
import itertools
import math
import operator
import types
import weakref
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn, optim

from models import DropoutNet, mean_loss
from torchfast.graphs import holders, places
from torchfast.graphs.attributes import Attributes
from torchfast.graphs.holders import HOLDER, PLAIN, TENSOR, UNSURE, WATCHED, Kinds, is_holder
from torchfast.graphs.host_facts import HostFacts
from torchfast.graphs.named_state import NamedState
from torchfast.graphs.places import what_is_read

CPU = torch.device("cpu")


class Color(enum.Enum):
    RED = 1


class Point(tuple, enum.Enum):
    ORIGIN = (0, 0)


class Own:
    """An object of the user's."""

    def __init__(self, held=1.0):
        self.held = held

    def method(self):
        return self.held


class Named(dict):
    """A container of the user's."""


class SaysTensor(list):
    __class__ = torch.Tensor


class AsksFirst(nn.Linear):
    def __getattribute__(self, name):
        return Own if name == "__class__" else super().__getattribute__(name)


class ListOfParts(nn.Module, list):
    __hash__ = nn.Module.__hash__


OWNERS = [Own(), Own()]
PROXIES = [weakref.proxy(OWNERS[0]), weakref.proxy(OWNERS.pop())]  # the second one is dead
VALUES = [
    *(None, True, 1, 2.0, 3j, "name", b"bytes", range(3), slice(3), Color.RED, np.float32(1.0)),
    *(torch.zeros(2), nn.Parameter(torch.zeros(2)), torch.zeros(2).to_sparse()),
    *(nn.Linear(2, 2), torch.Generator(), torch.amp.GradScaler("cpu"), math, np.zeros(2)),
    *([], {}, (), set(), frozenset(), collections.deque(), collections.OrderedDict(), Named()),
    *(
        [1.0, "a"],
        {"weight": nn.Parameter(torch.zeros(2))},
        [Own()],
        [Color.RED],
        [[]],
        [1.0] * 999,
    ),
    *(
        [Point.ORIGIN],
        Point.ORIGIN,
        PROXIES[:1],
        PROXIES[1:],
        {"module": nn.Linear(1, 1), "none": None},
    ),
    *(mean_loss, functools.partial(mean_loss, 1), Own().method, [].append, len, Own, nn.Linear),
    *(optim.SGD(nn.Linear(2, 2).parameters()), Own(), types.SimpleNamespace(), object()),
    *(collections.UserDict(), collections.ChainMap(), itertools.count(), iter([1])),
    *(weakref.ref(OWNERS[0]), operator.attrgetter("a"), *PROXIES, types.MappingProxyType({})),
    *(mock.Mock(spec=torch.Tensor), SaysTensor([Own()]), AsksFirst(1, 1)),
    ListOfParts(),
]


def asked(value):
    """Return whether it is a holder, found out from the value alone."""

    class Never(dict):
        def __missing__(self, kind):
            return UNSURE

    return is_holder(value, Never())


@pytest.mark.parametrize("number", range(len(VALUES)))
def test_the_type_says_of_a_value_what_it_says_itself(number):
    value, kinds = VALUES[number], Kinds()
    kind = kinds[type(value)]
    assert is_holder(value, kinds) == asked(value)
    if kind != UNSURE:
        assert (kind == PLAIN) == holders.is_plain(value)
        assert (kind == TENSOR) == holders.is_tensor(value)
    if kind <= WATCHED:
        assert not asked(value)
    if kind == HOLDER:
        assert asked(value)


def test_what_is_most_often_there_need_not_be_asked():
    kinds = Kinds()
    common = [None, True, 1, 1.0, "a", torch.zeros(1), nn.Parameter(torch.zeros(1)), nn.ReLU()]
    common += [{}, collections.OrderedDict(), [], (), set(), mean_loss]
    assert UNSURE not in [kinds[type(value)] for value in common]


@pytest.mark.parametrize("kind", [SaysTensor, AsksFirst, ListOfParts, Point, weakref.ProxyType])
def test_what_may_lie_or_is_two_things_is_asked(kind):
    assert Kinds()[kind] == UNSURE


def test_without_asking_those_that_speak_for_themselves_the_type_would_be_believed(monkeypatch):
    monkeypatch.setattr(holders, "_speaks_for_itself", lambda kind: False)
    value = AsksFirst(1, 1)
    assert Kinds()[type(value)] == WATCHED


def test_a_class_that_was_looked_at_is_let_go():
    def look():
        class Local:
            pass

        held = Local()
        what_is_read([lambda: held], [DropoutNet()])
        return weakref.ref(Local)

    reference = look()
    gc.collect()
    assert reference() is None


class DrawingSGD(optim.SGD):
    """Takes its steps from one of its groups."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] = next(group["rates"])
        return super().step(closure)


@pytest.mark.parametrize("found", [iter([0.1] * 100), [iter([0.1] * 100)], (0.1, 0.2), 0.1])
def test_an_iterator_in_a_group_is_looked_for(found):
    """Groups of what updates are watched elsewhere, so only a walk for the step alone sees them."""
    optimizer = DrawingSGD([{"params": [torch.zeros(1)], "rates": found}], lr=0.1)
    attributes = Attributes(lambda: optimizer.step(), CPU)
    attributes.refresh([], of_updates=[optimizer])
    assert (attributes.iterator() is not None) == (not isinstance(found, (tuple, float)))


@pytest.mark.parametrize("most", [10, 11])
def test_tables_of_modules_count_though_nothing_is_looked_for_in_them(monkeypatch, most):
    """One for each layer and one for the net, beside the function and what it names."""
    monkeypatch.setattr(places, "_MOST_OBJECTS", most)
    modules = [*nn.Sequential(*(nn.Linear(1, 1) for _ in range(8))).modules()]
    assert what_is_read([mean_loss], modules)[1] == (most == 11)


class FilledWhenAsked(dict):
    """Has a name, and no value yet."""

    def values(self):
        return iter(())


def test_a_table_that_gives_fewer_values_than_it_has_is_looked_at():
    module = nn.Linear(1, 1)
    module.table = FilledWhenAsked(later=None)
    assert what_is_read([mean_loss], [module])[1]


class WithHistory(nn.Linear):
    """Keeps tensors without calling them buffers, and what is none beside."""

    def __init__(self):
        super().__init__(2, 2)
        self.last, self.mean = torch.ones(2), torch.zeros(2).as_subclass(OwnTensor)
        self.behind = weakref.proxy(OWN_TENSOR)
        self.count, self.name = 1, "history"
        vars(self)["gone"] = PROXIES[1]  # which torch would ask what it is


class OwnTensor(torch.Tensor):
    pass


OWN_TENSOR = torch.full((2,), 3.0)


def test_tensors_that_modules_keep_in_attributes_are_state():
    module = WithHistory()
    found = {id(t) for t in NamedState([module]).everything()}
    kept = [module.last, module.mean, module.behind, module.weight, module.bias]
    assert found == {*map(id, kept)}


def test_tensors_that_a_step_replaces_in_attributes_are_kept():
    module = WithHistory()
    facts = HostFacts(NamedState([module]), CPU)
    last, mean = module.last, module.mean
    assert facts.left() == ([], None)
    vars(module).update(last=torch.zeros(2), mean=None, gone=None, count=2)
    kept, _ = facts.left()
    assert [t.data_ptr() for t in kept] == [last.data_ptr(), mean.data_ptr()]
