"""What runs leave, held against each other: by copies, and by digests and samples."""

from __future__ import annotations

import math

import pytest
import torch

from torchfast.graphs import run_ends
from torchfast.graphs.run_ends import SAMPLE, Left, digest

FORMATS = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def values(dtype, count=1000):
    drawn = torch.randn(count, generator=torch.Generator().manual_seed(0)) * 3
    if dtype.is_complex:
        return torch.complex(drawn, drawn.flip(0))
    return drawn.abs().to(dtype) if dtype == torch.uint8 else drawn.to(dtype)


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(run_ends, "_CHUNK", 64)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("dtype", FORMATS)
def test_a_digest_sees_every_element(dtype):
    found = {int(digest(values(dtype)))}
    for place in range(1000):
        changed = values(dtype)
        bits = run_ends.as_integers(changed)  # a view
        bits[place] ^= 1
        found.add(int(digest(changed)))
    assert len(found) == 1001
    assert int(digest(values(dtype))) in found


@pytest.mark.usefixtures("small_pieces")
def test_a_digest_sees_where_elements_lie():
    first = values(torch.float32)
    for one, other in [(0, 1), (0, 64), (3, 999), (128, 192)]:
        swapped = first.clone()
        swapped[[one, other]] = swapped[[other, one]]
        assert not torch.equal(digest(first), digest(swapped))
    pieces = first.view(-1, 8).flip(0).reshape(-1)
    assert not torch.equal(digest(first), digest(pieces))


def test_a_digest_is_of_bits():
    zeros, nans = torch.zeros(100), torch.full((100,), math.nan)
    assert not torch.equal(digest(zeros), digest(-zeros))
    assert torch.equal(digest(nans), digest(nans.clone()))


LARGE = 2 * SAMPLE + 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_a_sample_is_as_far_from_another_as_all_of_it(dtype):
    first = values(dtype, 4 * LARGE)
    second = first * (1 + 0.01)
    exact, sampled = (
        Left(first, whole=whole).distance(Left(second, whole=whole)) for whole in (True, False)
    )
    assert exact == pytest.approx(0.01, rel=0.3)
    assert sampled == pytest.approx(exact, rel=0.3)
    assert Left(first, whole=False).distance(Left(first.clone(), whole=False)) == 0.0


def test_a_large_tensor_takes_little():
    taken = Left(torch.zeros(40 * SAMPLE + 7), whole=False)
    assert taken._values.numel() <= SAMPLE
    assert taken._values.untyped_storage().nbytes() <= 4 * SAMPLE


def test_what_no_sample_has_is_a_difference_still():
    first = torch.ones(LARGE)
    second = first.clone()
    second[1] = 2.0  # between two that are drawn
    assert 0.0 < Left(first, whole=False).distance(Left(second, whole=False)) < 1e-30
    counts = first.long()
    assert Left(counts, whole=False).distance(Left(second.long(), whole=False)) == math.inf


@pytest.mark.parametrize("width", [64, 100, 768, 1000, 1024, 2048, 8192])
def test_every_row_has_an_element_in_the_sample(width):
    rows = 8 * SAMPLE // width
    table = torch.arange(rows).repeat_interleave(width).view(rows, width)
    drawn = Left(table, whole=False)._values
    assert drawn.numel() <= SAMPLE
    assert len(drawn.unique()) == rows


def test_other_shapes_and_formats_are_far_apart():
    one = Left(torch.ones(4), whole=True)
    assert one.distance(Left(torch.ones(2, 2), whole=True)) == math.inf
    assert one.distance(Left(torch.ones(4).double(), whole=True)) == math.inf


def test_memory_that_is_not_in_one_piece():
    pictures = torch.randn(8, 3, 256, 256).to(memory_format=torch.channels_last)
    same = Left(pictures, whole=False).distance(Left(pictures.contiguous(), whole=False))
    assert same == 0.0
