"""What a worker does with a batch: collates it into shared memory and sends where it lies.

The batch is pickled as torch would pickle it, so that whatever arrives is built as it would be:
containers of any class, the same tensor twice, strings. Only of ordinary tensors the pickle has the
place, not a file descriptor; the others travel in the same message in torch's way.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, final

import torch
from torch import Tensor
from torch.utils.data import _utils, get_worker_info

from torchfast.data.shared_pool import Pool, UnplaceableError

NO_BLOCK = -1


@final
class Message:
    """A batch on its way to the training process.

    Args:
        worker_id: Who sent it.
        number: Of the worker's block in which the tensors lie, or `NO_BLOCK`.
        storage: The block, if it was not sent before.
        payload: The pickled batch.
        is_pinned: Whether torch's thread was to pin it.
    """

    __slots__ = ("is_pinned", "number", "payload", "storage", "worker_id")

    def __init__(
        self,
        worker_id: int,
        number: int,
        storage: torch.UntypedStorage | None,
        payload: bytes,
        is_pinned: bool = False,
    ) -> None:
        self.worker_id = worker_id
        self.number = number
        self.storage = storage
        self.payload = payload
        self.is_pinned = is_pinned

    def __reduce__(self) -> tuple[Any, ...]:
        return Message, (self.worker_id, self.number, self.storage, self.payload)

    def pin_memory(self, _device: Any = None) -> Message:
        """Note that it is to be pinned: torch's thread cannot open it."""
        self.is_pinned = True
        return self


@final
class PooledCollate:
    """A ``collate_fn`` whose batches lie in a worker's shared memory.

    Args:
        collate_fn: The loader's own.
        most_blocks: How many blocks a worker may have.
    """

    def __init__(self, collate_fn: Callable[[Any], Any], most_blocks: int) -> None:
        self.collate_fn = collate_fn
        self._most_blocks = most_blocks
        self._worker_id = -1
        self._pool: Pool | None = None

    def start(self, worker_id: int) -> None:
        """Let this process, a worker, collate into memory of its own."""
        self._worker_id = worker_id
        self._pool = Pool(self._most_blocks)
        # torch's own registry of how things are collated, so that a collate_fn that calls
        # default_collate uses it too. It is this process's, and nobody's where it was changed.
        known = _utils.collate.default_collate_fn_map
        if known.get(Tensor) is _utils.collate.collate_tensor_fn:
            known[Tensor] = _Stack(self._pool)

    def __call__(self, samples: Any) -> Any:
        """Return the batch of these samples, as a `Message`."""
        pool = self._pool
        if pool is None:  # no worker
            return self.collate_fn(samples)
        try:
            batch = self.collate_fn(samples)
            return self._packed(pool, batch)
        finally:
            pool.end()

    def _packed(self, pool: Pool, batch: Any) -> Any:
        buffer = io.BytesIO()
        packer = _Packer(buffer, pool)
        try:
            packer.dump(batch)
        except UnplaceableError:
            return batch
        if not packer.has_placed:
            return Message(self._worker_id, NO_BLOCK, None, buffer.getvalue())
        sealed = pool.seal()
        return batch if sealed is None else Message(self._worker_id, *sealed, buffer.getvalue())


@final
class PooledStart:
    """A ``worker_init_fn`` that starts a worker's pool behind the loader's own."""

    def __init__(self, collate: PooledCollate, init_fn: Callable[[int], Any] | None) -> None:
        self._collate = collate
        self._init_fn = init_fn

    def __call__(self, worker_id: int) -> None:
        """Initialise the worker."""
        if self._init_fn is not None:
            self._init_fn(worker_id)
        self._collate.start(worker_id)


def empty_batch(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return uninitialised memory for a tensor of the batch that is being made.

    For a data set that makes whole batches (``__getitems__``, or ``batch_size=None``) and for a
    ``collate_fn``: what is written there is not copied again. In a worker of a loader that recycles
    its memory it is a part of that; in any other worker it is shared memory of its own, where
    torch's collating would write too; anywhere else an ordinary tensor.

    Args:
        shape: The sizes.
        dtype: Of the elements.

    Returns:
        A contiguous tensor on the CPU.

    Example:
        >>> images = empty_batch((8, 3, 32, 32), torch.uint8)
        >>> images.shape
        torch.Size([8, 3, 32, 32])
    """
    stack = _utils.collate.default_collate_fn_map.get(Tensor)
    memory = stack.pool.empty(shape, dtype) if isinstance(stack, _Stack) else None
    if memory is not None:
        return memory
    if (isinstance(stack, _Stack) and not stack.pool.is_exhausted) or get_worker_info() is None:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    num_bytes = max(math.prod(shape) * dtype.itemsize, 1)
    shared: torch.UntypedStorage = torch.UntypedStorage._new_shared(num_bytes)
    strides = torch.empty(tuple(shape), device="meta").stride()
    return torch.empty(0, dtype=dtype, device="cpu").set_(shared, 0, tuple(shape), strides)


def place(*_: Any) -> Tensor:
    """Stand in a pickle for a tensor; the receiver has its own in place of this."""
    raise RuntimeError(
        "a batch in recycled memory was opened by something else than the loader that made it; "
        "expected the iterator of torchfast's MonitoredDataLoader; give recycle_memory=False"
    )


@final
class _Stack:
    """The entry in torch's registry."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    def __call__(self, batch: Any, *, collate_fn_map: Any = None) -> Tensor:
        return self.pool.stack(batch, _utils.collate.collate_tensor_fn, collate_fn_map)


class _Packer(ForkingPickler):
    """Pickles a batch but for the elements of its ordinary tensors."""

    def __init__(self, buffer: io.BytesIO, pool: Pool) -> None:
        super().__init__(buffer, pickle.HIGHEST_PROTOCOL)
        self._pool = pool
        self.has_placed = False

    def reducer_override(self, value: Any) -> Any:
        """Return what stands for a value; called for no container nor number."""
        if type(value) is not Tensor:
            return NotImplemented
        offset = self._pool.place(value)
        if offset is None:
            return NotImplemented
        self.has_placed = True
        # The dtype by its name: pickle would write where it is to be found.
        dtype = str(value.dtype).removeprefix("torch.")
        return place, (offset, dtype, tuple(value.shape), value.stride())
