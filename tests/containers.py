"""Batches in containers of every kind, and the two devices that they move between.

The other device is "meta", so tensors really move on a machine that has only a CPU.
"""

from __future__ import annotations

import collections
import types
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch.nn.utils.rnn import pack_sequence

from models import Pair, Sample

CPU = torch.device("cpu")
META = torch.device("meta")

Kept = collections.namedtuple("Kept", ["inputs", "name"])


@dataclass
class Plain:
    inputs: torch.Tensor
    name: str = "a"
    runs: list = field(default_factory=list)

    def __post_init__(self):
        self.runs.append("post_init")


@dataclass(slots=True)
class Slotted:
    inputs: torch.Tensor
    name: str = "a"


@dataclass(frozen=True, slots=True)
class FrozenSlotted:
    inputs: torch.Tensor
    name: str = "a"


class BatchEncoding(collections.UserDict):
    """As transformers has it: a UserDict with attributes, and a .to that works in place."""

    def __init__(self, data=None, encodings=None):
        super().__init__(data)
        self._encodings = encodings

    def __getitem__(self, item):
        if isinstance(item, str):
            return self.data[item]
        raise KeyError("only str")

    def __getattr__(self, item):
        try:
            return self.data[item]
        except KeyError:
            raise AttributeError(item) from None

    def __getstate__(self):
        return {"data": self.data, "encodings": self._encodings}

    def __setstate__(self, state):
        self.data, self._encodings = state["data"], state["encodings"]

    def to(self, device):
        self.data = {key: value.to(device) for key, value in self.data.items()}
        return self


class ListOf(list):
    label = "kept"


class TupleOf(tuple):
    __slots__ = ()


class Movable:
    """An object with a .to that returns a new one."""

    def __init__(self, inputs):
        self.inputs = inputs

    def to(self, device):
        return Movable(self.inputs.to(device))


class MovedInPlace(Movable):
    def to(self, device):
        self.inputs = self.inputs.to(device)


class Rooted(collections.UserDict):
    """As a TensorDict that was given a device: what is put into it goes there."""

    def __init__(self, data, device=None):
        self.device = device or torch.device("cpu")
        super().__init__(data)

    def __setitem__(self, key, item):
        if item.device != self.device:
            item = torch.zeros(item.shape, device=self.device)
        super().__setitem__(key, item)

    def to(self, device):
        if device == self.device:
            return self
        return Rooted({key: item.to(device) for key, item in self.items()}, device)


class _Standing:
    """A field that stands for what another object holds."""

    def __set_name__(self, owner, name):
        self.name = name

    def __get__(self, instance, owner=None):
        if instance is None:
            raise AttributeError(self.name)  # a field without a default
        return instance.held[self.name]


@dataclass(init=False)
class Standing:
    """As a class of tensordict's, whose fields are those of a TensorDict in it."""

    inputs: torch.Tensor = _Standing()
    name: str = _Standing()

    def __init__(self, inputs, name="a"):
        vars(self)["held"] = {"inputs": inputs, "name": name}

    def __setattr__(self, name, value):
        self.held[name] = value

    def __copy__(self):
        return Standing(**self.held)

    def to(self, device):
        is_there = self.inputs.device == device
        return self if is_there else Standing(self.inputs.to(device), self.name)

    def first(self):
        return self.held["inputs"][0]


class Ordinary:
    pass


class Lazy(Mapping):
    """Makes its values when they are asked for, and holds none of them."""

    def __init__(self, held=None):
        self.held = held

    def __getitem__(self, key):
        if self.held is not None:
            return self.held[key]
        return torch.zeros(key + 1) if key % 2 == 0 else "name"

    def __iter__(self):
        return iter(range(9))

    def __len__(self):
        return 9


def ones():
    return torch.ones(3, 2)


def default():
    value = collections.defaultdict(list, {"a": ones()})
    assert value["b"] == []
    return value


CONTAINERS = {
    "tensor": (ones, lambda v: v),
    "tuple": (lambda: (ones(), 1), lambda v: v[0]),
    "list": (lambda: [ones(), None], lambda v: v[0]),
    "list subclass": (lambda: ListOf([ones()]), lambda v: v[0]),
    "tuple subclass": (lambda: TupleOf([ones()]), lambda v: v[0]),
    "dict": (lambda: {"a": ones(), 3: "s"}, lambda v: v["a"]),
    "namedtuple": (lambda: Kept(ones(), "a"), lambda v: v.inputs),
    "return type of torch": (lambda: torch.max(ones(), 0), lambda v: v.values),
    "dataclass": (lambda: Plain(ones()), lambda v: v.inputs),
    "frozen dataclass": (lambda: Sample(ones(), ones()), lambda v: v.inputs),
    "slots": (lambda: Slotted(ones()), lambda v: v.inputs),
    "frozen slots": (lambda: FrozenSlotted(ones()), lambda v: v.inputs),
    "OrderedDict": (lambda: collections.OrderedDict(b=ones(), a=1), lambda v: v["b"]),
    "defaultdict": (default, lambda v: v["a"]),
    "UserDict": (lambda: collections.UserDict(a=ones()), lambda v: v["a"]),
    "BatchEncoding": (lambda: BatchEncoding({"ids": ones()}, "kept"), lambda v: v.ids),
    "mapping with a device": (lambda: Rooted({"a": ones()}), lambda v: v["a"]),
    "fields that stand for others": (lambda: Standing(ones()), lambda v: v.inputs),
    "MappingProxyType": (lambda: types.MappingProxyType({"a": ones()}), lambda v: v["a"]),
    "PackedSequence": (
        lambda: pack_sequence([torch.ones(3), torch.ones(5)], enforce_sorted=False),
        lambda v: v.data,
    ),
    "object with to": (lambda: Movable(ones()), lambda v: v.inputs),
    "object with to in place": (lambda: MovedInPlace(ones()), lambda v: v.inputs),
    "nested": (
        lambda: {"a": [Pair(ones(), (ones(), Movable(ones())))], "b": None},
        lambda v: v["a"][0].targets[1].inputs,
    ),
}
