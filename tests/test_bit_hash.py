"""A hash tells whether any bit of a tensor, or the order of its elements, is another."""

from __future__ import annotations

import gc
import warnings
import weakref

import pytest
import torch

from torchfast.memory import bit_hash
from torchfast.memory.bit_hash import BitHash

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64]
CHANGES = {
    "signs": lambda x: x.neg(),
    "order": lambda x: x.flip(0),
    "two of them": lambda x: x[[1, 0, *range(2, len(x))]],
    "a bit": lambda x: _with_a_bit(x),
    "halves": lambda x: x * 0.5,
    "zero": lambda x: torch.zeros_like(x),
}


def _with_a_bit(x):
    changed = x.clone()
    words = changed.view(torch.uint8)
    words[len(words) // 2] ^= 1
    return changed


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_change_is_noticed(dtype, change):
    hashed, generator = BitHash(), torch.Generator().manual_seed(1)
    for size in (2, 8, 64, 768):
        for _ in range(200):
            x = torch.randn(size, dtype=dtype, generator=generator)
            y = CHANGES[change](x)
            if not torch.equal(x, y):
                assert hashed(x) != hashed(y)
            assert torch.equal(hashed(x), hashed(x.clone()))


def test_a_plain_sum_would_not_notice_signs():
    """The control: of so many elements some have as many that are positive as negative."""
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(8, generator=generator).view(torch.int32).long() for _ in range(200)]
    assert any(x.sum() == (x ^ (1 << 31)).int().long().sum() for x in drawn)


@pytest.mark.parametrize(
    "layout",
    [
        lambda x: x.t(),
        lambda x: x.view(2, 4, 4, 8).to(memory_format=torch.channels_last),
        lambda x: x[:, ::2],
        lambda x: x.double()[:, ::2],
        lambda x: x.double()[:1, :1],
        lambda x: x[0, :1].double().as_strided((1,), (2,)),
        lambda x: torch.view_as_complex(x.view(-1, 2)).conj(),
        lambda x: torch.view_as_complex(x.view(-1, 2)).conj().imag,  # a negative view
    ],
)
def test_of_any_layout(layout):
    x = torch.randn(16, 16)
    hashed, tensor = BitHash(), layout(x)
    before = hashed(tensor)
    assert torch.equal(before, hashed(tensor))
    assert bit_hash._words(tensor).is_contiguous()
    x.neg_()
    if tensor.data_ptr() != x.data_ptr():  # the layout is a copy
        tensor = layout(x)
    assert not torch.equal(before, hashed(tensor))


@pytest.mark.parametrize("part", [16, 48, 1 << 22])
def test_long_tensors_are_hashed_in_rows(part, monkeypatch):
    monkeypatch.setattr(bit_hash, "_ROW", 16)
    monkeypatch.setattr(bit_hash, "_PART", part)
    hashed, x = BitHash(), torch.arange(50.0)
    before = hashed(x)
    swapped = x.clone()
    swapped[[1, 16]] = x[[16, 1]]  # place 1 of row 0, and place 0 of row 1
    assert hashed(swapped) != before
    for changed in (x.roll(16), x.flip(0), torch.cat([x[16:32], x[:16], x[32:]])):
        assert hashed(changed) != before
    places, rows = (factors.first(64, x.device) for factors in (hashed._of_places, hashed._of_rows))
    words = [*map(int, x.view(torch.int32))]
    total = sum(w * int(places[i % 16]) * int(rows[i // 16]) for i, w in enumerate(words))
    assert (int(before) - total) % 2**64 == 0
    x[49] += 1
    assert hashed(x) != before


def test_factors_are_odd():
    """An even one would leave the highest bit out, which is the sign."""
    hashed = BitHash()
    hashed(torch.randn(1000))
    for factors in (hashed._of_places, hashed._of_rows):
        assert (factors._drawn & 1).all()


def test_several_at_a_time():
    hashed, tensors = BitHash(), [torch.randn(n, dtype=d) for n in (3, 99) for d in DTYPES]
    assert torch.equal(hashed(*tensors), torch.cat([hashed(x) for x in tensors]))


def test_a_larger_tensor_leaves_the_hashes_of_smaller_ones(monkeypatch):
    monkeypatch.setattr(bit_hash, "_ROW", 16)
    hashed, small = BitHash(), torch.randn(50)
    before = hashed(small)
    drawn = hashed._of_rows._drawn.numel()
    hashed(torch.randn(1000))
    assert hashed._of_rows._drawn.numel() > drawn
    assert torch.equal(hashed(small), before)
    assert torch.equal(BitHash()(small), before)


class OnDevice(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize(
    ("make_error", "said"),
    [
        (
            lambda: RuntimeError("one\nno C compiler"),
            "since Triton failed: RuntimeError: no C compiler; ",
        ),
        (lambda: ImportError("libcuda.so"), "since Triton failed: ImportError: libcuda.so; "),
        (lambda: ModuleNotFoundError("No module named 'triton'", name="triton"), None),
    ],
)
def test_where_the_kernel_fails_operators_do_it(make_error, said, monkeypatch):
    calls = []

    def failing():
        calls.append(1)
        raise make_error()

    monkeypatch.setattr(bit_hash, "_kernel", failing)
    plain = torch.randn(50)
    x = plain.as_subclass(OnDevice)
    hashed = BitHash()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = hashed(x)
    assert [said in str(each.message) for each in caught] == ([] if said is None else [True])
    assert torch.equal(found.as_subclass(torch.Tensor), BitHash()(plain))
    hashed(x)
    assert len(calls) == 1
    watched = weakref.ref(x)
    del x, found
    gc.collect()
    assert watched() is None


def test_of_one_element_and_of_none():
    hashed = BitHash()
    assert hashed(torch.tensor(0.0)) != hashed(torch.tensor(-0.0))
    assert hashed(torch.empty(0, 3)) == 0
    nan = torch.tensor([float("nan")])
    assert torch.equal(hashed(nan), hashed(nan.clone()))
