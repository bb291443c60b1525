"""Blocks of shared memory that are written again and again, and tensors that say when they die.

Memory that two processes share is dear when it is new: the first touch of each page is a fault, in
the process that writes and again in the one that reads, and the block's file descriptor crosses a
socket. A block that stays has none of this but once. What it needs is to know when its reader has
finished. A reader's tensors are made over an object whose end is noticed, a *lease*: each tensor's
storage holds it, so every view, slice and saved activation does, and it dies with the last of them.

The first bytes of a block say whether it is in use. Its writer sets them before it sends a message;
the reader's lease clears them. A lease that was copied into a forked process clears nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from torchfast._core.storages import extent

HEADER_BYTES = 64
ALIGNMENT = 64  # bytes: a cache line, and what vector instructions like
_IN_USE = 0  # the index of the byte that says so


def aligned(offset: int) -> int:
    """Return the next offset at which a tensor may begin."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


@final
class Block:
    """One block, in the process that writes or in the one that reads.

    Args:
        storage: The shared memory.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage
        self.start = storage.data_ptr()
        self.num_bytes = storage.nbytes()
        # It holds the storage, so the memory stays mapped for as long as it is looked at.
        self.bytes: Tensor = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
        self._memory = self.bytes.numpy()

    @classmethod
    def of_size(cls, num_bytes: int) -> Block:
        """Return a new block with room for so many bytes, its header included.

        Raises:
            RuntimeError: There is no such room in shared memory.
        """
        return cls(torch.UntypedStorage._new_shared(num_bytes))

    @property
    def is_in_use(self) -> bool:
        """Whether the reader still has what was sent last."""
        return bool(self._memory[_IN_USE])

    @is_in_use.setter
    def is_in_use(self, value: bool) -> None:
        self._memory[_IN_USE] = value

    def holds(self, address: int) -> bool:
        """Whether an address lies in this block."""
        return self.start <= address < self.start + self.num_bytes


class Lease:
    """What tensors over a block hold, until the last of them is gone.

    Args:
        block: Whose memory they see; it lives as long.
        release: Called in this process, once, when they are gone. In any thread, so it must not
            wait for anything.
    """

    def __init__(self, block: Block, release: Callable[[], None] | None = None) -> None:
        self._block = block  # mapped for as long as this lives
        self._release = release
        self._pid = os.getpid()
        self.__array_interface__ = {
            "shape": (block.num_bytes,),
            "typestr": "|u1",
            "data": (block.start, False),
            "version": 3,
        }

    def memory(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return the block's bytes; whatever is made from them holds this lease."""
        return np.asarray(self)

    # Bound here: at the exit of Python the module's own names may be gone before the last batch.
    def __del__(self, getpid: Callable[[], int] = os.getpid) -> None:
        # A forked process has copies of its parent's batches, which are still in use there.
        if self._release is not None and self._pid == getpid():
            self._release()


def tensor_over(
    memory: np.ndarray[Any, np.dtype[np.uint8]],
    offset: int,
    dtype: torch.dtype,
    shape: Sequence[int],
    strides: Sequence[int] | None,
) -> Tensor:
    """Return a tensor over a lease's memory, with a storage of its own.

    A storage of its own, so that saving the tensor saves no other, and writing in place to one
    tensor of a batch is not taken by autograd for writing to another.

    Args:
        memory: What `Lease.memory` returned.
        offset: Where it begins, in bytes.
        dtype: Of its elements.
        shape: Its sizes.
        strides: In elements; None means contiguous.
    """
    if 0 in shape:
        if strides is None:
            return torch.empty(shape, dtype=dtype, device="cpu")
        return torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
    if strides is None:
        strides = contiguous_strides(shape)
    tensor = torch.frombuffer(memory, dtype=dtype, count=extent(shape, strides), offset=offset)
    if len(shape) == 1 and strides[0] == 1:
        return tensor
    # In place: a view would hold the flat tensor beside it, and be one to whoever asks.
    return tensor.as_strided_(shape, strides)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor without empty dimensions."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
