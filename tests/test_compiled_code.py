"""What torch.compile returned is told from what answers to any name."""

from __future__ import annotations

from functools import partial
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn

from torchfast._core.compiled_code import is_compiled_by_torch, is_disabled
from torchfast.memory.stretches import leaves_of


class Slotted:
    """Has no attributes of its own, and answers all the same."""

    __slots__ = ()

    def __getattr__(self, name):
        return lambda *args: name


class Compiling:
    @torch.compile(backend="eager")
    def method(self, x):
        return x


@pytest.mark.parametrize(
    "value",
    [
        torch.compile(nn.Linear(2, 2), backend="eager"),
        torch.compile(lambda x: x, backend="eager"),
        Compiling().method,
    ],
    ids=["module", "function", "method"],
)
def test_what_torch_compiled(value):
    assert is_compiled_by_torch(value)


@pytest.mark.parametrize(
    "value",
    [nn.Linear(2, 2), torch.sin, len, Compiling, MagicMock(), Slotted(), 3, None],
    ids=lambda value: type(value).__name__,
)
def test_what_it_did_not(value):
    assert not is_compiled_by_torch(value)
    assert not is_disabled(value)


@pytest.mark.parametrize(
    "value",
    [
        torch.compiler.disable(nn.Linear(2, 2)),
        torch.compiler.disable(lambda x: x),
        torch.compiler.disable(lambda x: x, recursive=False),
    ],
    ids=["module", "function", "not recursive"],
)
def test_what_is_kept_from_compiling_is_not_compiled(value):
    assert is_disabled(value)
    assert not is_compiled_by_torch(value)
    block = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    block.part = value
    assert leaves_of(block) == {}


def test_a_partial_of_what_is_kept_from_compiling_is_too():
    value = partial(torch.compiler.disable(lambda x, y: x), 1)
    assert is_disabled(value)
    value.tag = "with an attribute a partial of it stays one of a partial"
    outer = partial(value, y=2)
    assert outer.func is value
    assert is_disabled(outer)


def test_what_is_compiled_is_not_kept_from_it():
    module = torch.compile(nn.Linear(2, 2), backend="eager")
    assert not is_disabled(module)
    assert not is_disabled(partial(module))
    assert not is_disabled(partial(len))


def test_a_block_that_holds_such_an_object_has_its_leaves():
    block = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    block.notes = MagicMock()
    assert set(leaves_of(block)) == {"0", "1"}
