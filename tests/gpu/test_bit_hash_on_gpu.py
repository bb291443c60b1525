"""The kernel that hashes a tensor gives the number that torch's operators give."""

from __future__ import annotations

import pytest
import torch

from torchfast.memory import bit_hash
from torchfast.memory.bit_hash import BitHash

ROW = bit_hash._ROW


def by_operators(tensor):
    """Return the hash that is worked out on the host."""
    return BitHash()(tensor.cpu())


@pytest.fixture
def launched(monkeypatch):
    """Count the kernels: without one this would compare operators with operators."""
    launch, found = bit_hash._kernel(), []

    def counted(*args):
        found.append(args)
        launch(*args)

    monkeypatch.setattr(bit_hash, "_kernel", lambda: counted)
    return found


@pytest.mark.parametrize("size", [1, 5, 2048, ROW - 1, ROW, ROW + 1, 3 * ROW + 7, 300 * ROW + 16])
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.int8],
    ids=str,
)
def test_it_is_that_of_the_operators(dtype, size, launched):
    x = torch.randn(size + 3, device="cuda").mul(50).to(dtype)[3:]  # not aligned
    hashed = BitHash()
    assert torch.equal(hashed(x).cpu(), by_operators(x))
    assert torch.equal(hashed(x), hashed(x.clone()))
    assert torch.equal(hashed(x, x), torch.cat([hashed(x), hashed(x)]))
    assert len(launched) == 7
    before = hashed(x)
    if dtype != torch.int8:
        assert hashed(-x) != before
    x[size // 2] += 1
    assert hashed(x) != before


def test_of_more_words_than_an_int_counts(launched):
    x = torch.zeros(2**31 + 5, dtype=torch.bfloat16, device="cuda")
    hashed = BitHash()
    assert hashed(x) == 0
    x[-1] = 1.0
    words = int(x[-1:].view(torch.int16))
    place, row = (x.numel() - 1) % ROW, (x.numel() - 1) // ROW
    expected = words * int(hashed._of_places._drawn[place]) * int(hashed._of_rows._drawn[row])
    assert (int(hashed(x)) - expected) % 2**64 == 0
    assert len(launched) == 2


def test_empty_and_transposed(launched):
    hashed = BitHash()
    assert hashed(torch.empty(0, 3, device="cuda")) == 0
    assert not launched
    x = torch.randn(70, 300, device="cuda")
    assert torch.equal(hashed(x.t()), hashed(x))
    strided = x[:, ::3]
    assert torch.equal(hashed(strided).cpu(), by_operators(strided))


def test_where_triton_fails_operators_do_it(monkeypatch):
    def fail(*_):
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(bit_hash, "_kernel", lambda: fail)
    x = torch.randn(3 * ROW, device="cuda")
    hashed = BitHash()
    with pytest.warns(UserWarning, match="Triton failed: RuntimeError: Failed to find C compiler"):
        found = hashed(x)
    assert torch.equal(found.cpu(), by_operators(x))
    assert torch.equal(hashed(x), found)  # told of once
