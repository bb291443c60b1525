"""Tensors that are computed when somebody looks at them, and operations that wait for that."""

from __future__ import annotations

import pytest
import torch

from torchfast.memory.deferred import Deferred, Like, Waiting


def deferred(x):
    return Waiting().deferred(x.clone, [x], Like.of(x), is_grad=True)


def test_what_waits_is_what_it_would_be():
    x = torch.randn(3, 4)
    there, y = deferred(x), x.clone()
    for operation in (
        lambda t: t.view(4, 3).t(),
        lambda t: (t * 2).to(torch.bfloat16) + 1,
        lambda t: torch.stack(t.split(2)[:1]),
        lambda t: torch.cat((t.flip(0), t)).type_as(x),
    ):
        there, y = operation(there), operation(y)
        assert type(there) is Deferred
        assert Like.of(there) == Like.of(y)
        assert there.requires_grad
    assert torch.equal(there.detach().computed(), y)
    assert torch.equal(there.detach() @ torch.ones(y.shape[-1], 1), y @ torch.ones(y.shape[-1], 1))


def test_numbers_of_other_types_are_not_mixed_up():
    x = torch.arange(3)
    for number in (2, 2.0, True):
        there = Waiting().deferred(x.clone, [x], Like.of(x), is_grad=False) * number
        assert there.dtype == (x * number).dtype


def test_who_looks_before_and_after_a_write_sees_what_was_there():
    x = torch.ones(4)
    there = deferred(x).detach()
    double, view = there * 2, there[:2]
    view.add_(1)
    assert (there * 1).computed().tolist() == [2, 2, 1, 1]
    assert double.computed().tolist() == [2, 2, 2, 2]


def test_what_has_been_overwritten_is_not_read():
    x = torch.ones(4)
    there = deferred(x).detach() * 2
    x.mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        there.computed()
