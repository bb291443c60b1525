"""What the loader's measurements load: batches made by worker processes, unpinned.

A DataLoader's workers put each batch into shared memory, from which the training process reads it.
How much of that a worker does decides how fast batches come: it decodes them, or copies them out of
memory of its own, or hands on shared memory that it had prepared, which is the least that a worker
process can do. None of it is pinned. With ``recycled`` the workers write into memory that is used
again, as torchfast's loader has it, and what lies ready is copied there; then images out of runs of
equal pixels are the least, for which a worker reads next to no memory.
"""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from torchfast import build_dataloader
from torchfast.data.pooled_collate import empty_batch

How = Literal["decode", "copy", "runs", "ready"]
# A worker that decodes supplies least, one that hands on what is there supplies most, unless it is
# to write into memory that is used again.
HOWS: tuple[How, ...] = ("decode", "copy", "runs", "ready")
# Batches that wait in front of the loader for each worker: DataLoader's own default.
PREFETCH = 2
ENDLESS = 2**40


class Batches(Dataset[Any]):
    """A data set of which ``__getitems__`` makes a whole batch, whatever is asked for.

    So the collating of samples in Python, which is nobody's loader's fault, costs nothing.

    Args:
        template: The batch, in nested tuples and dicts.
        how: What a worker does for a batch. Only tensors of uint8 can be decoded, or be made of
            runs; others are copied.
        batches: How many an epoch has.
    """

    def __init__(self, template: Any, how: How = "copy", batches: int = ENDLESS) -> None:
        self.template = template
        self.how = how
        self.batches = batches
        self._packed: dict[int, Tensor] = {}
        self._runs: dict[int, list[int]] = {}
        self._prepared: list[Any] = []

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])

    def __getitems__(self, indices: list[int]) -> Any:
        """Return a batch."""
        if self.how != "ready":
            make = {"decode": self._decoded, "runs": self._of_runs}.get(self.how, copied)
            return mapped(self.template, make)
        if not self._prepared:
            self._prepared = [mapped(self.template, copied) for _ in range(2)]
        return self._prepared[indices[0] % 2]

    def _decoded(self, tensor: Tensor) -> Tensor:
        """Return pixels that are stored as four bits each, those of two halves in one byte."""
        if tensor.dtype is not torch.uint8 or tensor.numel() % 2:
            return copied(tensor)
        half = tensor.numel() // 2
        if id(tensor) not in self._packed:
            flat = tensor.reshape(-1)
            self._packed[id(tensor)] = (flat[:half] & 0xF0) | (flat[half:] >> 4)
        packed = self._packed[id(tensor)]
        pixels = empty(tuple(tensor.shape), torch.uint8)
        flat = pixels.view(-1)
        torch.bitwise_right_shift(packed, 4, out=flat[:half])
        torch.bitwise_and(packed, 15, out=flat[half:])
        flat.mul_(17)
        return pixels

    def _of_runs(self, tensor: Tensor) -> Tensor:
        """Return images that are stored as one run of equal pixels each."""
        if tensor.dtype is not torch.uint8 or not tensor.numel():
            return copied(tensor)
        if id(tensor) not in self._runs:
            self._runs[id(tensor)] = tensor.flatten(1)[:, 0].tolist()
        images = empty(tuple(tensor.shape), torch.uint8)
        size = tensor[0].numel()
        for number, pixel in enumerate(self._runs[id(tensor)]):
            ctypes.memset(images.data_ptr() + number * size, pixel, size)
        return images


def mapped(batch: Any, fn: Callable[[Tensor], Any]) -> Any:
    """Return nested tuples and dicts with ``fn`` over the tensors: what one writes by hand."""
    if isinstance(batch, Tensor):
        return fn(batch)
    if isinstance(batch, tuple | list):
        return type(batch)([mapped(item, fn) for item in batch])
    if isinstance(batch, dict):
        return {key: mapped(item, fn) for key, item in batch.items()}
    return batch


def leaves(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors of a batch."""
    found: list[Tensor] = []
    mapped(batch, found.append)
    return iter(found)


def num_bytes(batch: Any) -> int:
    """Return what crosses the bus for a batch."""
    return sum(tensor.numel() * tensor.element_size() for tensor in leaves(batch))


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return memory for a batch, shared where a worker asks, as torch's own collating does."""
    return empty_batch(shape, dtype)


def copied(tensor: Tensor) -> Tensor:
    """Return a copy in memory for a batch."""
    return empty(tuple(tensor.shape), tensor.dtype).copy_(tensor)


# -- Templates -------------------------------------------------------------------------------------


def images(batch: int, pixels: int = 224) -> tuple[Tensor, Tensor]:
    """Return uint8 images and their labels."""
    draw = torch.Generator().manual_seed(0)
    shape = (batch, 3, pixels, pixels)
    pictures = torch.randint(256, shape, dtype=torch.uint8, generator=draw)
    return pictures, torch.randint(1000, (batch,), generator=draw)


def tokens(batch: int = 32, length: int = 1025) -> tuple[Tensor]:
    """Return the tokens of a language model, one more than it is given."""
    return (torch.randint(50_000, (batch, length), generator=torch.Generator().manual_seed(0)),)


def nested(batch: int = 64) -> dict[str, Any]:
    """Return twelve tensors, large and small, in nested dicts."""
    draw = torch.Generator().manual_seed(0)

    def whole(*shape: int) -> Tensor:
        return torch.randint(1000, (batch, *shape), generator=draw)

    def real(*shape: int) -> Tensor:
        return torch.rand(batch, *shape, generator=draw)

    return {
        "text": {"tokens": whole(256), "types": whole(256), "mask": real(256) > 0.1},
        "image": {
            "pixels": torch.randint(256, (batch, 3, 96, 96), dtype=torch.uint8, generator=draw),
            "boxes": real(16, 4),
            "classes": whole(16),
            "present": real(16) > 0.5,
        },
        "audio": (real(1, 4000), whole()),
        "target": {"answer": whole(), "weight": real(), "group": whole()},
    }


# -- Loaders ---------------------------------------------------------------------------------------


def as_it_is(batch: Any) -> Any:
    """Return what ``__getitems__`` made: it is a batch already."""
    return batch


def data_loader(
    data: Dataset[Any], *, workers: int, pinned: bool = False, recycled: bool = False
) -> DataLoader[Any]:
    """Return torch's loader, with the same settings for every method; or torchfast's, recycled."""
    if recycled and workers:
        return build_dataloader(
            data,
            batch_size=1,
            collate_fn=as_it_is,
            num_workers=workers,
            pin_memory=pinned,
            recycle_memory=True,
            persistent_workers=True,
            prefetch_factor=PREFETCH,
        )
    return DataLoader(
        data,
        batch_size=1,
        collate_fn=as_it_is,
        num_workers=workers,
        pin_memory=pinned,
        persistent_workers=workers > 0,
        prefetch_factor=PREFETCH if workers else None,
    )


def reserve(workers: int, depth: int = 0) -> int:
    """Return how many batches wait in front of a step that stood still for a while."""
    return workers * PREFETCH + depth + 1


def check_shared_memory(batch_bytes: int, workers: int) -> None:
    """Raise RuntimeError unless shared memory holds what the workers put there.

    A worker that finds it full dies of a bus error, which says nothing.
    """
    needed = 1.5 * reserve(workers) * batch_bytes
    free = shared_memory_bytes()
    if free is not None and needed > free:
        raise RuntimeError(
            f"{workers} workers need {needed / 1e9:.1f} GB of /dev/shm, and {free / 1e9:.1f} GB "
            "are free; use fewer workers or a smaller batch"
        )


def shared_memory_bytes() -> int | None:
    """Return what is free of the memory that processes share."""
    try:
        return shutil.disk_usage("/dev/shm").free
    except OSError:
        return None
