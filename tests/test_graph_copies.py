"""Copies that are made many at a time are what clones would be."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from torchfast._core.compare import same_bits
from torchfast.graphs import copies
from torchfast.graphs.copies import copies_of


class Own(torch.Tensor):
    """A tensor of a class of the user's."""


def some():
    torch.manual_seed(0)
    made = [nn.Parameter(torch.randn(size)) for size in ((3, 5), (1,), (), (7, 1, 2), (17,), (64,))]
    made += [torch.randn(9, dtype=dtype) for dtype in (torch.float64, torch.bfloat16)]
    made += [torch.tensor([-0.0, float("nan"), float("inf")]), torch.arange(5), torch.zeros(0, 3)]
    made += [torch.tensor([True, False]), torch.randn(4, 2, dtype=torch.complex64)]
    made += [torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.randn(6, 4).t()]
    made += [torch.randn(6, 4)[:, 1:3], torch.randn(3, 1).expand(3, 4), torch.randn(8)[::2]]
    made += [torch.randn(3, dtype=torch.complex64).conj(), torch.randn(2).as_subclass(Own)]
    made += [torch.randn(4, 3).requires_grad_() * 2.0, torch.randn(5)[2:], made[0]]
    with torch.inference_mode():
        made.append(torch.randn(3))
    return made


@pytest.mark.parametrize("block_bytes", [copies._BLOCK_BYTES, 1, 128])
def test_copies_are_what_clones_are(monkeypatch, block_bytes):
    monkeypatch.setattr(copies, "_BLOCK_BYTES", block_bytes)
    tensors = some()
    versions = [t._version for t in tensors if not t.is_inference()]
    found = copies_of(tensors)
    assert len(found) == len(tensors)
    for tensor, copy in zip(tensors, found, strict=True):
        clone = tensor.detach().clone()
        assert type(copy) is type(clone)
        assert (copy.dtype, copy.shape, copy.stride()) == (clone.dtype, clone.shape, clone.stride())
        assert same_bits(copy, clone)
        assert not copy.requires_grad
    assert [t._version for t in tensors if not t.is_inference()] == versions


def test_no_copy_shares_memory_with_another_nor_with_what_it_is_of():
    tensors = some()
    expected = [t.detach().clone() for t in tensors]
    found = copies_of(tensors)
    for number, copy in enumerate(found):
        copy.fill_(number % 2)
    for tensor, value in zip(tensors, expected, strict=True):
        assert same_bits(tensor.detach(), value)
    for number, copy in enumerate(found):
        assert bool((copy == number % 2).all())


# Numbers, and what has been packed into tensors of these types: some of it is a NaN.
ANY_BITS = torch.arange(-(2**15), 2**15).to(torch.int16)


def through_float32(to, those, non_blocking=False):
    """Copy as a device does with many in one launch, where types are too short to compute in."""
    for target, tensor in zip(to, those, strict=True):
        is_short = tensor.dtype in (torch.float16, torch.bfloat16)
        target.copy_(tensor.float() if is_short else tensor)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_bit_of_short_numbers_is_copied(monkeypatch, dtype):
    monkeypatch.setattr(torch, "_foreach_copy_", through_float32)
    packed = ANY_BITS.view(dtype)
    with torch.inference_mode():
        other = packed.clone()
    for copy in copies_of([nn.Parameter(packed), other, packed[7]]):
        expected = ANY_BITS if copy.dim() else ANY_BITS[7]
        assert torch.equal(copy.view(torch.int16), expected)


def test_sparse_tensors_are_copied_as_they_are():
    sparse = torch.eye(3).to_sparse()
    (copy,) = copies_of([sparse])
    assert copy.is_sparse
    assert torch.equal(copy.to_dense(), sparse.to_dense())


def test_many_are_copied_in_one_call():
    class Calls(TorchFunctionMode):
        num_clones = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.num_clones += func is torch.Tensor.clone
            return func(*args, **(kwargs or {}))

    tensors = [nn.Parameter(torch.randn(3, 2)) for _ in range(1000)]
    with Calls() as calls:
        found = copies_of(tensors)
    assert calls.num_clones == 0
    assert len({copy.untyped_storage().data_ptr() for copy in found}) == 1
