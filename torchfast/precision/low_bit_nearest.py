"""The nearest entry of an 8-bit dynamic map, by arithmetic and one look into a table.

A dynamic map (Dettmers, "8-Bit Approximations for Parallelism in Deep Learning") has entries that
stand evenly within each power of ten, twice as many in each as in the one below it. torchao finds
the nearest by a binary search, eight dependent looks into the table of entries and two more to
round. What a GPU can look up is what bounds such an update: the lanes of a warp look at different
lines. Where the entries stand is known, though, so all but the last look can be computed.

The code of a value is the number of thresholds that are not above it. They lie half-way between
neighbours, so within a power of ten ``floor`` of a linear function would tell, but for rounding and
for the one threshold at each border. The function here is half a step lower, far from both, and so
gives the code or the one below it; the threshold above that one, as torchao's own rounding has it
to the last bit, decides.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_LEAST_DECADE = 6  # entries reach down to 1e-7
_LOG_OF_5 = math.log2(5.0)


def thresholds(entries: Tensor) -> Tensor:
    """Return for each entry but the last the least fp32 value that is given the next one's code.

    Args:
        entries: Of a map, ascending, fp32.

    Returns:
        As many as there are entries; the last is infinity.
    """
    below, above = entries[:-1], entries[1:]
    half = (above - below) * 0.5
    # By bisection over the bits of fp32, in which order those of a sign are ordered as integers.
    low, high = _ordered(below), _ordered(above)
    while bool((high - low > 1).any()):
        middle = (low + high) // 2
        is_next = _from_ordered(middle) - below >= half
        low, high = torch.where(is_next, low, middle), torch.where(is_next, middle, high)
    return torch.cat((_from_ordered(high), entries.new_tensor([math.inf])))


def nearest_code(values: Tensor, limits: Tensor, *, signed: bool) -> Tensor:
    """Return the code of the entry of torchao's dynamic map that its rounding takes.

    Args:
        values: fp32 between -1 and 1, or 0 and 1.
        limits: What `thresholds` says of the map, on the same device.
        signed: Whether the map is that of both signs.

    Returns:
        uint8, in the shape of ``values``. Of what is not a number any code.

    Numerics: The code of torchao's ``quantize_8bit_with_qmap``, for each number.
    """
    magnitudes = values.abs() if signed else values.clamp(min=0)
    most = 64.0 if signed else 128.0  # entries between 0.1 and 1
    decade = torch.floor(-torch.log10(magnitudes)).clamp(0, _LEAST_DECADE)
    # Half an entry below where the entries of this power of ten would have it, counted from zero.
    place = magnitudes * (most / 0.9) * torch.exp2(decade * _LOG_OF_5)
    place = place + torch.exp2(-decade) * (most * 8 / 9) - (0.5 if signed else 1.5)
    code = torch.floor(place).to(torch.int32)
    if signed:
        code = torch.where(values < 0, 126 - code, 127 + code)
    code = code.clamp(0, 255)
    return (code + (values >= limits[code])).to(torch.uint8)


def finds_all(entries: Tensor, limits: Tensor, *, signed: bool) -> bool:
    """Whether `nearest_code` gives each code of a map, from its threshold on and not before."""
    codes = torch.arange(256, dtype=torch.uint8)
    if len(entries) != len(codes):
        return False
    first = limits[:-1]
    last = torch.nextafter(first, first.new_tensor(-math.inf))
    cases = (entries, codes), (first, codes[1:]), (last, codes[:-1])
    return all(torch.equal(nearest_code(x, limits, signed=signed), code) for x, code in cases)


def _ordered(values: Tensor) -> Tensor:
    """Return integers in the order of fp32 numbers, one for each."""
    bits = values.view(torch.int32).long()
    return torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def _from_ordered(numbers: Tensor) -> Tensor:
    bits = torch.where(numbers < 0, -numbers - 0x80000000, numbers)
    return bits.to(torch.int32).view(torch.float32)
