"""A worker's blocks of shared memory, in which it makes its batches.

A worker writes a batch straight into a block: torch's own collating is told to stack there, and
what a data set or a ``collate_fn`` made elsewhere is copied there at the end, once. The message to
the training process says only where the tensors lie. Blocks that the training has finished with are
written again; where none is free, another one is made. Whoever keeps many batches would make it
many, so there is a limit, beyond which a batch goes the way that torch sends it.

It helps for batches of some size, and wherever page faults are dear. It does not where samples are
slow to make: then nobody waits for memory. What lies in a block must not be kept by the data set
for later batches without holding the very tensor: a block is left alone as long as any tensor over
it lives, in either process.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from torchfast._core.storages import extent
from torchfast.data.cargo import is_plain
from torchfast.data.shared_memory import HEADER_BYTES, Block, Lease, aligned, tensor_over

# A worker's blocks beyond the batches that it is ahead: one that it writes, and some that the
# training has in use or on their way to the device.
SPARE_BLOCKS = 6
# Room beyond what a batch needed, where batches grow: or each longer one would take a new block.
HEADROOM = 1.25
# How long a worker waits for a block of its own where there is no room for another one.
WAIT_S = 5.0
# A tensor that sees no more than one byte in so many of those that it lies among goes torch's way.
MOST_GAPS = 2


class UnplaceableError(Exception):
    """The tensors of a batch share memory in a way that no copy of them would."""


@final
class _Slot:
    """A block's number, and what this process still has over it."""

    def __init__(self, number: int, block: Block) -> None:
        self.number = number
        self.block = block
        self.is_sent = False  # whether the training process knows the block
        self.lease: weakref.ref[Lease] | None = None

    @property
    def is_free(self) -> bool:
        # The data set may have kept a tensor of a batch for itself.
        kept = self.lease is not None and self.lease() is not None
        return not kept and not self.block.is_in_use


@final
class Pool:
    """The blocks of one worker.

    Args:
        most_blocks: How many at most.

    Attributes:
        is_exhausted: Whether the batch in hand found no block, so that it goes torch's way.
    """

    def __init__(self, most_blocks: int) -> None:
        self._most_blocks = most_blocks
        self._slots: list[_Slot] = []
        self._open: _Slot | None = None
        self._memory: np.ndarray[Any, np.dtype[np.uint8]] | None = None
        self._top = HEADER_BYTES
        self._expected = 0
        self._pending: list[tuple[int, Tensor]] = []
        # Of this batch: which bytes of the process's memory lie where in the block.
        self._placed: list[tuple[int, int, int]] = []
        self._lock = threading.Lock()  # a data set may make samples in threads
        self.is_exhausted = False

    # -- While a batch is made ---------------------------------------------------------------------

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """Return memory of the batch in hand; None where there is no room."""
        num_bytes = math.prod(shape) * dtype.itemsize
        with self._lock:
            if self._open is None and not self.is_exhausted:
                self._begin()
            start, end = self._top, self._top + num_bytes
            if self._open is None or self._memory is None or end > self._open.block.num_bytes:
                return None
            self._top = aligned(end)
            return tensor_over(self._memory, start, dtype, shape, None)

    def stack(self, samples: Sequence[Tensor], collate: Any, collate_fn_map: Any) -> Tensor:
        """Stack ``samples`` in this memory; ``collate`` is torch's way to do it."""
        first = samples[0]
        if not is_plain(first):
            return collate(samples, collate_fn_map=collate_fn_map)  # type: ignore[no-any-return]
        out = self.empty((len(samples), *first.shape), first.dtype)
        if out is None and self.is_exhausted:
            return collate(samples, collate_fn_map=collate_fn_map)  # type: ignore[no-any-return]
        if out is None:  # copied to a block once it is known how large that has to be
            out = torch.empty((len(samples), *first.shape), dtype=first.dtype, device="cpu")
        return torch.stack(samples, 0, out=out)  # type: ignore[arg-type]

    def _begin(self) -> None:
        """Open a free block that holds what is expected, or make one; else there is none."""
        if self._expected == 0:
            return  # nobody knows yet how large a batch is
        try:
            self._open = self._slot(self._expected)
        except RuntimeError:  # shared memory is full
            self._open = None
        self.is_exhausted = self._open is None
        self._look()

    def _look(self) -> None:
        if self._open is None:
            self._memory = None
            return
        lease = Lease(self._open.block)
        self._open.lease = weakref.ref(lease)
        self._memory = lease.memory()

    def _slot(self, num_bytes: int) -> _Slot | None:
        """Return a slot that is free, with a block of at least so many bytes."""
        free = [slot for slot in self._slots if slot.is_free]
        for slot in free:
            if slot.block.num_bytes >= num_bytes:
                return slot
        if free:
            return self._replaced(free[0], num_bytes)
        if len(self._slots) >= self._most_blocks:
            return None
        try:
            block = Block.of_size(num_bytes)
        except RuntimeError:  # shared memory is full; torch's way would need as much of it
            return self._waited(num_bytes)
        slot = _Slot(len(self._slots), block)
        self._slots.append(slot)
        return slot

    def _waited(self, num_bytes: int) -> _Slot | None:
        """Return a slot with enough memory once one is free, for which this waits a while."""
        fit = [slot for slot in self._slots if slot.block.num_bytes >= num_bytes]
        deadline = time.monotonic() + WAIT_S
        while fit and time.monotonic() < deadline:
            for slot in fit:
                if slot.is_free:
                    return slot
            time.sleep(1e-3)
        return None

    @staticmethod
    def _replaced(slot: _Slot, num_bytes: int) -> _Slot:
        """Give a slot a larger block; the old one is let go with what still lies in it."""
        slot.block = Block.of_size(int(num_bytes * HEADROOM))
        slot.is_sent = False
        slot.lease = None
        return slot

    # -- When it is made ---------------------------------------------------------------------------

    def place(self, tensor: Tensor) -> int | None:
        """Return where a tensor of the batch lies in the block, or will; None if it has to travel.

        Raises:
            UnplaceableError: It shares a part of its memory with one that was placed before.
        """
        if not is_plain(tensor):
            return None
        strides = tensor.stride()
        span = extent(tensor.shape, strides) * tensor.element_size()
        if span == 0:
            return HEADER_BYTES
        if span > max(MOST_GAPS * tensor.nbytes, aligned(1)):
            return None
        address = tensor.data_ptr()
        if self._open is not None and self._open.block.holds(address):
            return address - self._open.block.start
        for start, end, offset in self._placed:
            if start <= address and address + span <= end:
                return offset + address - start
            if address < end and start < address + span:
                raise UnplaceableError
        offset = self._top
        self._top = aligned(offset + span)
        self._placed.append((address, address + span, offset))
        self._pending.append((offset, _span_of(tensor, span)))
        return offset

    def seal(self) -> tuple[int, torch.UntypedStorage | None] | None:
        """Copy what is not in the block yet, and mark the block as in use.

        Returns:
            The block's number, and its memory if it is not known to the reader; None where no block
            is to be had.
        """
        needed = self._top
        try:
            slot = self._with_room(needed)
        except (
            RuntimeError
        ):  # shared memory is full: torch says so if it is too full for it as well
            slot = None
        if slot is None:
            return None
        for offset, source in self._pending:
            slot.block.bytes[offset : offset + source.numel()].copy_(source)
        slot.block.is_in_use = True
        self._expected = max(self._expected, needed)  # of lengths that vary, the greatest
        is_new, slot.is_sent = not slot.is_sent, True
        return slot.number, slot.block.storage if is_new else None

    def _with_room(self, needed: int) -> _Slot | None:
        slot = self._open
        if slot is not None and slot.block.num_bytes >= needed:
            return slot
        if slot is None:
            return None if self.is_exhausted else self._slot(needed)
        written = slot.block.bytes
        self._replaced(slot, needed)
        slot.block.bytes[HEADER_BYTES : len(written)].copy_(written[HEADER_BYTES:])
        return slot

    def end(self) -> None:
        """Forget the batch in hand: it was sent, or failed."""
        self._open = self._memory = None
        self._top = HEADER_BYTES
        self._pending, self._placed = [], []
        self.is_exhausted = False


def _span_of(tensor: Tensor, num_bytes: int) -> Tensor:
    """Return the bytes between a tensor's first element and its last."""
    flat = torch.empty(0, dtype=torch.uint8, device="cpu")
    start = tensor.storage_offset() * tensor.element_size()
    return flat.set_(tensor.untyped_storage(), start, (num_bytes,), (1,))
