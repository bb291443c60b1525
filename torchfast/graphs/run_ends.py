"""What a run of some steps has left, kept so that it can be held against what another has left.

A state that is small beside the device's memory is copied, once a run. Of a large one that would
take more than there is, or minutes on its way to the host. So of each large tensor two things are
kept: a digest of all its bits, which says whether two runs ended in the same; and, where they did
not, a sample of its elements, which says how far apart they are. What a graph does wrong, such as
an update left out or a stale input, is wrong all over a tensor; and a table's rows have elements in
the sample each, unless they are narrower than the sample is sparse.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from torchfast._core.compare import as_integers, parts, same_bits

# So many elements of a large tensor are kept at most; one of twice as many is not large yet.
SAMPLE = 2**18
# So many elements at a time are digested, in some temporary tensors of eight bytes an element.
_CHUNK = 2**24
# Odd numbers whose products mix bits well, as of splitmix64 (Steele et al., 2014), in two's
# complement.
_PLACE, _FIRST, _SECOND = (
    n - 2**64 for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


@final
class Left:
    """What a run has left of a tensor.

    Args:
        tensor: As it is now.
        whole: Keep all of it, however large.
    """

    def __init__(self, tensor: Tensor, *, whole: bool) -> None:
        tensor = tensor.detach()
        self._kind = (tensor.shape, tensor.dtype)
        self._digest: Tensor | None = None
        if whole or tensor.numel() <= 2 * SAMPLE or type(tensor) is not Tensor:
            self._values = tensor.clone()
        else:
            flat = tensor.reshape(-1)
            self._values = flat[:: _prime_from(-(-tensor.numel() // SAMPLE))].clone()
            self._digest = digest(flat)

    def distance(self, other: Left) -> float:
        """Return the largest difference, relative to the largest value; 0 if all bits agree.

        Two NaNs agree, and so do the two zeros, but for those of a tensor that is not kept whole:
        they are less than any other difference.
        """
        if self._kind != other._kind:
            return math.inf
        if self._digest is None or other._digest is None:
            return distance(self._values, other._values)
        if torch.equal(self._digest, other._digest):
            return 0.0
        least = math.inf if self.is_counted() else torch.finfo(torch.float32).tiny
        return max(distance(self._values, other._values), least)

    def is_counted(self) -> bool:
        """Whether it is exact by nature: integers and truth values."""
        return not (self._values.is_floating_point() or self._values.is_complex())

    def ways(self, other: Left, start: Left | None) -> tuple[float, float, float]:
        """Return how far another run has gone from here, and both of them from the start.

        In the Euclidean norm; of a sample, if the tensor is not kept whole. Without a start, as of
        a gradient, from zero.
        """
        near, far = (kept._values.to(self._values.device).double() for kept in (self, other))
        begun = torch.zeros_like(near)
        if start is not None:
            begun = start._values.to(self._values.device).double()
        return tuple(float(x.norm()) for x in (near - far, near - begun, far - begun))  # type: ignore[return-value]


def left(some: Sequence[Tensor], *, whole: bool = True) -> list[Left]:
    """Return what is left of each tensor."""
    return [Left(tensor, whole=whole) for tensor in some]


def digest(flat: Tensor, chunk_size: int = _CHUNK) -> Tensor:
    """Return 64 bits that depend on every bit of a vector and its place, on its device.

    Elements of two vectors that differ have, but for some chance in 2**64, sums that differ.

    Args:
        flat: The vector.
        chunk_size: Elements at a time; another number makes another digest.
    """
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for number, chunk in enumerate(flat.split(chunk_size)):
        bits = as_integers(chunk).reshape(len(chunk), -1).to(torch.int64)
        place = torch.arange(len(chunk), device=flat.device).add_(number * chunk_size).mul_(_PLACE)
        for column in bits.unbind(1):  # two of a complex number
            mixed = (column + place).mul_(_FIRST)
            mixed.bitwise_xor_(mixed >> 31).mul_(_SECOND)
            total = total * 31 + mixed.bitwise_xor_(mixed >> 29).sum()
    return total


def distance(first: Tensor, second: Tensor) -> float:
    """Return the largest difference of two tensors, as `Left.distance` does."""
    near, far = first.detach(), second.detach().to(first.device)
    if near.shape != far.shape or near.dtype != far.dtype:
        return math.inf
    if same_bits(near, far):
        return 0.0
    if not (near.is_floating_point() or near.is_complex()):
        return math.inf
    near, far = parts(near), parts(far)
    both_nan = near.isnan() & far.isnan()
    gap = torch.where(both_nan | (near == far), 0.0, (near - far).abs()).amax()
    size = near.abs().nan_to_num(0.0, 0.0, 0.0).amax()
    ratio = float(gap / size.clamp_min(torch.finfo(torch.float32).tiny))
    return math.inf if math.isnan(ratio) else ratio


def _prime_from(number: int) -> int:
    """Return the first prime that is no less: a step that shares no factor with a row's width."""
    while any(number % divisor == 0 for divisor in range(2, math.isqrt(number) + 1)):
        number += 1
    return max(number, 2)
