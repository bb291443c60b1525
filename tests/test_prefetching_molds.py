"""What a slot keeps from batch to batch: views of its own memory, and nothing of a batch."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from simulated_device import Prompt
from torchfast import PrefetchingLoader
from torchfast.data.cargo import put_back, simple_tensors
from torchfast.data.ring import MOST_MOLDS


def kinds_in_turn():
    """Batches of which each is laid out, or treated, otherwise than the one before."""
    base = torch.arange(24.0).reshape(4, 6)
    return [
        (base, "a"),
        (base.double(), "b"),
        (base.t(), "c"),
        (base[:3], "d"),
        (base.clone().requires_grad_(), "e"),
        (base.to(torch.complex64).conj(), "f"),
        (base.to(torch.complex64).conj().imag, "g"),
        [base, {"x": base.long(), "y": None}],
        {"x": base, "y": (base + 1, ("no", "tensor"))},
        (base, base),
        (base.to_sparse(), 1.5),
        (torch.zeros(0, 3), base),
        (torch.tensor(3.0), 7),
    ]


def like(a, b):
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape, a.layout) == (b.dtype, b.shape, b.layout)
        assert a.requires_grad == b.requires_grad
        if a.layout is torch.strided and not b.is_neg():  # which goes its own way
            assert a.stride() == b.stride()
        assert torch.equal(a.detach().to_dense(), b.detach().to_dense())
        return
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert list(a) == list(b)
        a, b = list(a.values()), list(b.values())
    if isinstance(a, tuple | list):
        for x, y in zip(a, b, strict=True):
            like(x, y)
    else:
        assert a == b


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
def test_batches_built_otherwise_than_the_last_one_arrive_as_they_are(device, depth, reuse):
    device.kind = Prompt
    batches = kinds_in_turn() * 4
    arrived = 0
    for number, batch in enumerate(PrefetchingLoader(batches, "cpu", depth=depth, reuse=reuse)):
        like(batch, batches[number])
        arrived += 1
    assert arrived == len(batches)


def test_more_kinds_than_a_slot_remembers(device):
    device.kind = Prompt
    batches = [(torch.full((1 + i % 20,), float(i)), i) for i in range(100)]
    loader = PrefetchingLoader(batches, "cpu", reuse=True)
    for batch, expected in zip(loader, batches, strict=True):
        like(batch, expected)
        assert all(len(slot.molds) <= MOST_MOLDS for slot in loader._ring.slots)


def test_what_is_done_to_a_batch_is_gone_with_it(device):
    device.kind = Prompt
    batches = [(torch.full((4,), float(i)), torch.full((2**15,), float(i))) for i in range(20)]
    for number, batch in enumerate(PrefetchingLoader(batches, "cpu", reuse=True)):
        for tensor in batch:
            assert tensor.dim() == 1
            assert not tensor.requires_grad
            assert tensor.grad is None
            assert tensor[0] == number
            tensor.requires_grad_()
            (tensor * 2).sum().backward()
            tensor.detach_().unsqueeze_(0)
        small, large = batch
        version = small._version
        large.add_(1)
        assert small._version == version


@pytest.mark.parametrize("reuse", [True, False])
def test_no_batch_is_kept(device, reuse):
    device.kind = Prompt
    alive = []

    def batches():
        for number in range(12):
            batch = torch.full((64,), float(number)), torch.full((2**15,), float(number))
            alive.append([weakref.ref(tensor) for tensor in batch])
            yield batch

    outside = []
    loader = iter(PrefetchingLoader(batches(), "cpu", depth=1, reuse=reuse, background=False))
    for _ in range(8):
        batch = next(loader)
        outside.append([weakref.ref(tensor) for tensor in batch])
    del batch
    gc.collect()
    assert not any(ref() is not None for refs in alive[:7] for ref in refs)
    assert not any(ref() is not None for refs in outside[:7] for ref in refs)


def test_memory_that_grows_is_cut_anew(device):
    device.kind = Prompt
    batches = [(torch.full((2 ** (i % 12),), float(i)), torch.tensor(i)) for i in range(60)]
    for batch, expected in zip(PrefetchingLoader(batches, "cpu", reuse=True), batches, strict=True):
        like(batch, expected)


def test_which_batches_are_simple():
    x, y = torch.zeros(2), torch.ones(2)
    for batch in (x, (x, y), [x, {"a": y, "b": "name"}, 3, None], {"a": (x, [y])}):
        found = simple_tensors(batch)
        assert found is not None
        like(put_back(batch, iter(found)), batch)
    for other in ((x, x), (x, ("a", "b")), (), "a", (x, y.requires_grad_()), (x, object())):
        assert simple_tensors(other) is None
