"""Parameters that are moved by a rounding, and moved back."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from torchfast._core import rounding
from torchfast._core.rounding import SIZE, disturb, take_back

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def moves(value, seed=0):
    """Return how far values are moved, relative to each."""
    parameter = nn.Parameter(value.clone())
    disturb([parameter], seed)
    return (parameter.detach().double() - value.double()) / value.double()


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_format_is_moved_by_as_much_on_the_average(dtype):
    value = torch.rand(4000, 500).to(dtype) + 1
    moved = moves(value)
    # A step of a coarse format is up to twice its epsilon, relative to the value.
    assert 0.9 * SIZE < -moved.mean().item() < 1.7 * SIZE
    assert (moved <= 0).all()
    assert (moves(-value) == moved).all()  # towards zero
    assert 0 < -moved.min().item() <= 2.1 * max(SIZE, torch.finfo(dtype).eps)
    largest = torch.full((4000,), torch.finfo(dtype).max, dtype=dtype)
    assert moves(largest).isfinite().all()


def test_the_seed_says_what_is_drawn_and_nothing_else_is():
    value, before = torch.rand(300) + 1, torch.get_rng_state()
    assert torch.equal(moves(value, 1), moves(value, 1))
    assert not torch.equal(moves(value, 1), moves(value, 2))
    assert torch.equal(torch.get_rng_state(), before)
    two = torch.ones(300), torch.ones(300)
    disturb(two, 1)
    assert not torch.equal(*two)


def test_the_default_dtype_makes_no_difference():
    value = torch.rand(4000) + 1
    expected = moves(value)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(moves(value), expected)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("shape", [(100, 7, 3), (1, 2100), (3, 1, 700), (2100,)])
def test_large_ones_are_moved_part_by_part(shape, monkeypatch):
    monkeypatch.setattr(rounding, "_AT_A_TIME", 50)
    some = [torch.ones(shape)]
    parts = [part.numel() for part, *_ in rounding._moves(some, some, 0)]
    assert sum(parts) == 2100
    assert max(parts) <= 50
    assert 0.4 < (moves(torch.ones(shape)) != 0).double().mean().item() < 0.6


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3, 0), (1,)])
def test_small_ones_are_moved_too(shape):
    is_moved = [(moves(torch.ones(shape), seed) != 0).all() for seed in range(20)]
    assert any(is_moved)


def test_every_layout_is_moved_and_moved_back():
    value = torch.rand(4, 6, 5, 5) + 1
    for laid_out in (value.to(memory_format=torch.channels_last), value.transpose(0, 1)):
        moved = laid_out.clone()
        disturb([moved], 0)
        assert 0.4 < (moved != laid_out).double().mean().item() < 0.6
        take_back([moved], [laid_out.contiguous()], 0)
        assert torch.equal(moved, laid_out)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_a_step_did_meanwhile_stays(dtype, monkeypatch):
    monkeypatch.setattr(rounding, "_AT_A_TIME", 50)
    start = (torch.rand(3, 700) * 0.4 + 1.1).to(dtype)
    parameter = nn.Parameter(start.clone())
    disturb([parameter], 5)
    assert not torch.equal(parameter, start)
    with torch.no_grad():
        parameter.add_(0.25)  # nothing of it is rounded away in any format
    take_back([parameter], [start], 5)
    torch.testing.assert_close(parameter.detach(), start + 0.25, rtol=2.0**-23, atol=0)


def test_tensors_that_consist_of_others_are_moved():
    two = TwoTensor(torch.ones(100), torch.ones(100))
    disturb([two], 0)
    assert (two.a != 1).any()
    assert (two.b != 1).any()
    take_back([two], [TwoTensor(torch.ones(100), torch.ones(100))], 0)
    assert (two.a == 1).all()
    assert (two.b == 1).all()


def test_a_copy_need_not_lie_as_its_tensor_does():
    one = torch.ones(1)
    two = TwoTensor(one.expand(100), one.expand(100)), torch.ones(100)
    copies = TwoTensor(torch.ones(100), torch.ones(100)), torch.ones(100)
    disturb(two, 0)
    assert (two[1] != 1).any()
    take_back(two, copies, 0)
    assert one == 1
    assert (two[1] == 1).all()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_what_cannot_be_moved_is_left_alone():
    pair = [torch.ones(2), torch.ones(3)]
    left_alone = [
        torch.ones(3, dtype=torch.int64),
        torch.ones(3, dtype=torch.bool),
        torch.ones(3, dtype=torch.complex64),
        torch.ones(3).to(torch.float8_e4m3fn),
        torch.ones(1).expand(30),
        torch.nested.as_nested_tensor(pair, layout=torch.strided),
    ]
    versions = [tensor._version for tensor in left_alone]
    disturb(left_alone, 0)
    take_back(left_alone, left_alone, 0)
    assert [tensor._version for tensor in left_alone] == versions
    zeros = torch.zeros(3)
    disturb([zeros], 0)
    assert not zeros.any()
