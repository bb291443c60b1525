"""Pinned host memory that is asked for once and dealt out again and again.

Only pinned memory can be copied beside a computation. To pin it takes the driver about as long as
to copy it, and makes the device wait, so a step must not ask for any. Torch's own allocator for it
rounds each block up to a power of two. Here slabs of a power of two are taken, and ranges of them
dealt out: the range that fits best, neighbours joined again once they are free. Steps of one shape
ask for the same sizes in the same order, so after the first of them nothing is taken any more.

Who gives a range back has to see to it that no copy reads or writes it any more.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, final

from torch import Tensor

from torchfast._core.cgroups import usable_memory

ALIGNMENT: Final = 512  # of ranges, in bytes: any dtype, and whole cache lines for the bus
SLAB_BYTES: Final = 1 << 26


@dataclass(frozen=True, eq=False)
class HostRange:
    """A part of a slab.

    Attributes:
        pool: Where it is given back.
        slab: Number of its slab.
        start: Its first byte in the slab.
        memory: Its bytes.
    """

    pool: HostPool
    slab: int
    start: int
    memory: Tensor


@final
class HostPool:
    """Deals out ranges of slabs.

    Args:
        allocate: Returns so many bytes of memory, a uint8 tensor.
        max_bytes: The most that is taken.

    Attributes:
        num_bytes: What was taken.
        used_bytes: What is dealt out now.
        num_slabs: How often memory was asked for.
    """

    def __init__(self, allocate: Callable[[int], Tensor], max_bytes: int) -> None:
        self._allocate = allocate
        self.max_bytes = max_bytes
        self.num_bytes = self.used_bytes = 0
        self._slabs: list[Tensor] = []
        self._free: list[tuple[int, int, int]] = []  # (slab, first byte, byte behind it), sorted

    @property
    def num_slabs(self) -> int:
        """How often memory was asked for."""
        return len(self._slabs)

    def take(self, num_bytes: int, *, may_grow: bool = True) -> HostRange | None:
        """Return a range of at least ``num_bytes``, or None where there is none.

        Args:
            num_bytes: Above 0.
            may_grow: Whether another slab may be pinned.

        Synchronizes: Where a slab is pinned, which the driver may do.
        """
        size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        fitting = [(end - start, at) for at, (_, start, end) in enumerate(self._free)]
        best = min((found for found in fitting if found[0] >= size), default=None)
        if best is None:
            if not may_grow or not self._grow(size):
                return None
            best = (0, len(self._free) - 1)
        slab, start, end = self._free.pop(best[1])
        if start + size < end:
            bisect.insort(self._free, (slab, start + size, end))
        self.used_bytes += size
        return HostRange(self, slab, start, self._slabs[slab][start : start + size])

    def give(self, given: HostRange) -> None:
        """Take a range back, of which no copy is under way."""
        slab, start = given.slab, given.start
        end = start + given.memory.numel()
        self.used_bytes -= end - start
        at = bisect.bisect(self._free, (slab, start, end))
        if at < len(self._free) and self._free[at][:2] == (slab, end):
            end = self._free.pop(at)[2]
        if at and self._free[at - 1][0] == slab and self._free[at - 1][2] == start:
            start = self._free.pop(at - 1)[1]
        bisect.insort(self._free, (slab, start, end))

    def _grow(self, size: int) -> bool:
        # A power of two, to which torch would round it up anyway.
        slab_bytes = max(SLAB_BYTES, 1 << (size - 1).bit_length())
        if self.num_bytes + slab_bytes > self.max_bytes:
            return False
        self._slabs.append(self._allocate(slab_bytes))
        self.num_bytes += slab_bytes
        self._free.append((len(self._slabs) - 1, 0, slab_bytes))
        return True


def default_host_bytes() -> int:
    """Return half of the memory of the machine or the container, divided by the ranks on it."""
    # Beyond that the kernel ends the process.
    total = usable_memory() or 1 << 36
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return total // (2 * max(1, int(ranks) if ranks.isdecimal() else 1))
