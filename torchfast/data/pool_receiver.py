"""The training's side of the workers' shared memory: mapped once, opened batch by batch.

A block is mapped when it comes for the first time, and stays. A batch is a few views of it; when
the last tensor over it is gone, the block is its worker's again. Where a loader of torchfast's
copies the batches to a CUDA device, it also gives the blocks to CUDA to be pinned where they are,
once each: then a batch is read by the device out of the very memory that the worker wrote, and no
processor of the training process touches it. Never for other consumers: an asynchronous copy does
not hold the tensor that it reads, and whoever drops it early would let the worker overwrite it.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch._utils import ExceptionWrapper
from torch.utils.data import _utils
from torch.utils.data._utils.worker import _IterableDatasetStopIteration, _ResumeIteration
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from torchfast.data import pooled_collate
from torchfast.data.pooled_collate import NO_BLOCK, Message
from torchfast.data.shared_memory import Block, Lease, tensor_over

_NO_BATCH = (ExceptionWrapper, _IterableDatasetStopIteration)
# Pins memory where it is: called with address and size, it returns what undoes it, or raises.
Pin = Callable[[int, int], Callable[[], None]]


@final
@dataclass
class PoolStatistics:
    """What became of batches and of the memory in which they came.

    Attributes:
        num_recycled: Batches that came in memory that is used again.
        num_ordinary: Batches that came in torch's way: without tensors, or while all blocks of
            their worker were in use.
        num_blocks: Blocks of shared memory that are mapped now.
        num_bytes: Their size.
        num_pinned: Those of them that CUDA reads where they are.
        not_pinned: Why others are not though they should be; empty if nothing is amiss.
    """

    num_recycled: int = 0
    num_ordinary: int = 0
    num_blocks: int = 0
    num_bytes: int = 0
    num_pinned: int = 0
    not_pinned: str = ""


@final
class _Mapped:
    """A block as the training process has it."""

    def __init__(self, block: Block, statistics: PoolStatistics) -> None:
        self.block = block
        self._statistics = statistics
        self._unpin: Callable[[], None] | None = None
        self._pid = os.getpid()
        statistics.num_blocks += 1
        statistics.num_bytes += block.num_bytes

    @property
    def is_pinned(self) -> bool:
        return self._unpin is not None

    def release(self) -> None:
        """Let the worker write here again; a lease that holds this keeps it pinned until then."""
        self.block.is_in_use = False

    def pin(self, pin: Pin) -> None:
        self._unpin = pin(self.block.start, self.block.num_bytes)
        self._statistics.num_pinned += 1

    def unpin(self, getpid: Callable[[], int] = os.getpid) -> None:
        unpin, self._unpin = self._unpin, None
        if unpin is not None:
            self._statistics.num_pinned -= 1
            if self._pid == getpid():  # CUDA is of no use in a forked process
                with suppress(Exception):  # at the exit of Python, CUDA may be gone before
                    unpin()

    # In front of the memory, which the last batch in it may hold for longer than the receiver does.
    def __del__(self) -> None:
        self.unpin()
        self._statistics.num_blocks -= 1
        self._statistics.num_bytes -= self.block.num_bytes


@final
class Receiver:
    """Opens the messages of a loader's workers.

    Args:
        statistics: Written to.

    Attributes:
        pin: Pins the blocks that come; None for a consumer that must not have them pinned.
    """

    def __init__(self, statistics: PoolStatistics) -> None:
        self.pin: Pin | None = None
        self._statistics = statistics
        self._blocks: dict[tuple[int, int], _Mapped] = {}

    def opened(self, message: Message) -> Any:
        """Return the batch that a message stands for."""
        if message.number == NO_BLOCK:
            self._statistics.num_ordinary += 1
            return _Unpacker(message.payload, None).load()
        mapped = self._mapped(message)
        lease = Lease(mapped.block, mapped.release)
        self._statistics.num_recycled += 1
        return _Unpacker(message.payload, lease.memory()).load()

    def unpin(self) -> None:
        """Unpin all blocks, and pin none until told to; no copy may read them any more."""
        self.pin = None
        for mapped in self._blocks.values():
            mapped.unpin()

    def _mapped(self, message: Message) -> _Mapped:
        key = message.worker_id, message.number
        if message.storage is not None:
            self._blocks[key] = _Mapped(Block(message.storage), self._statistics)
        mapped = self._blocks[key]
        # Nobody has anything of it now: its worker had it until it sent this.
        if self.pin is None:
            mapped.unpin()
        elif not mapped.is_pinned and not self._statistics.not_pinned:
            try:
                mapped.pin(self.pin)
            except Exception as error:  # such as a limit of locked memory: staged as ever
                self._statistics.not_pinned = str(error) or type(error).__name__
        return mapped


class _Unpacker(pickle.Unpickler):
    """Unpickles a batch with its tensors over a lease's memory."""

    def __init__(self, payload: bytes, memory: np.ndarray[Any, np.dtype[np.uint8]] | None) -> None:
        super().__init__(io.BytesIO(payload))
        # No method of this object: its memo would hold it, and it the memo with all tensors, until
        # the garbage collector came by.
        self._place = None if memory is None else partial(_placed, memory)

    def find_class(self, module: str, name: str) -> Any:
        """Return what a name in the pickle means."""
        if name == "place" and module == pooled_collate.__name__:
            return self._place
        return super().find_class(module, name)


def _placed(
    memory: np.ndarray[Any, np.dtype[np.uint8]],
    offset: int,
    dtype: str,
    shape: Sequence[int],
    strides: Sequence[int],
) -> Tensor:
    return tensor_over(memory, offset, getattr(torch, dtype), shape, strides)


class PooledIterator(_MultiProcessingDataLoaderIter):
    """torch's iterator over workers, which opens what they send.

    Args:
        loader: The loader, with the workers' functions in place of its own.
        statistics: Written to.
    """

    def __init__(self, loader: Any, statistics: PoolStatistics) -> None:
        self.receiver = Receiver(statistics)
        self._statistics = statistics
        super().__init__(loader)

    def _get_data(self) -> Any:
        # Also what an epoch that was left has to come is opened, and so gives its memory back.
        index, data = super()._get_data()  # type: ignore[no-untyped-call]
        if isinstance(data, Message):
            batch = self.receiver.opened(data)
            if data.is_pinned:
                batch = _utils.pin_memory.pin_memory(batch, self._pin_memory_device)
            return index, batch
        if not isinstance(index, _ResumeIteration) and not isinstance(data, _NO_BATCH):
            self._statistics.num_ordinary += 1
        return index, data
