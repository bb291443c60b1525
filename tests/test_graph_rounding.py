"""Parameters that are moved by a rounding."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torchfast.graphs import rounding
from torchfast.graphs.rounding import SIZE, disturb


class Other(torch.Tensor):
    pass


def moves(value, seed=0):
    """Return how far values are moved, relative to each."""
    parameter = nn.Parameter(value.clone())
    disturb([parameter], seed)
    return (parameter.detach().double() - value.double()) / value.double()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_each_format_is_moved_by_as_much_on_the_average(dtype):
    moved = moves(torch.rand(4000, 500).to(dtype) + 1)
    # A step of a coarse format is up to twice its epsilon, relative to the value.
    assert 0.9 * SIZE < moved.abs().mean().item() < 1.7 * SIZE
    assert moved.mean().abs().item() < SIZE / 4  # both ways
    assert 0 < moved.abs().max().item() <= 2 * max(SIZE, torch.finfo(dtype).eps)


def test_the_seed_says_what_is_drawn_and_nothing_else_is():
    value, before = torch.rand(300) + 1, torch.get_rng_state()
    assert torch.equal(moves(value, 1), moves(value, 1))
    assert not torch.equal(moves(value, 1), moves(value, 2))
    assert torch.equal(torch.get_rng_state(), before)


def test_large_ones_are_moved_part_by_part(monkeypatch):
    value = torch.rand(100, 7, 3) + 1
    monkeypatch.setattr(rounding, "_AT_A_TIME", 50)
    moved = moves(value).flatten()
    assert (moved != 0).all()
    assert len(set(moved.sign().tolist())) == 2


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3, 0), (1,)])
def test_small_ones_are_moved_too(shape):
    assert (moves(torch.ones(shape)) != 0).all()


def test_every_layout_is_moved():
    value = torch.rand(4, 6, 5, 5) + 1
    for laid_out in (value.to(memory_format=torch.channels_last), value.transpose(0, 1)):
        assert (moves(laid_out) != 0).all()


def test_what_cannot_be_moved_is_left_alone():
    left_alone = [
        torch.ones(3, dtype=torch.int64),
        torch.ones(3, dtype=torch.bool),
        torch.ones(3, dtype=torch.complex64),
        torch.ones(3).to(torch.float8_e4m3fn),
        torch.ones(1).expand(3),
        torch.ones(3).as_subclass(Other),
        torch.ones(3).to_sparse(),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    ]
    versions = [tensor._version for tensor in left_alone]
    disturb([*left_alone, nn.parameter.UninitializedParameter()], 0)
    assert [tensor._version for tensor in left_alone] == versions
    zeros = torch.zeros(3)
    disturb([zeros], 0)
    assert not zeros.any()
