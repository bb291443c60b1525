"""The allocator's blocks at the moment at which memory ran out.

By the time that Python hears of it, the backward pass is torn down and its buffers are free again.
So torch is asked to call at the moment itself (its out-of-memory observer), and what it knows then
is kept: how much was asked for, how much was free, and every block, without tensors and without
waiting for the device. The observer cannot be taken off again, so there is one for the process,
attached at the first need, which does nothing unless a step is under way.
"""

from __future__ import annotations

import logging
import re
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, final

import torch

logger = logging.getLogger(__name__)

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_ASKED = re.compile(r"Tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB|TiB)")


@final
@dataclass(frozen=True, kw_only=True)
class MemoryMoment:
    """What the allocator knew at a moment.

    Attributes:
        requested_bytes: What was asked for in vain; None if that is not known.
        free_bytes: Free on the device, as the driver sees it.
        limit_bytes: The most that this process may take.
        total_bytes: What the device has.
        allocated_bytes: In tensors, by the allocator's own counter.
        reserved_bytes: Taken from the device, by the allocator's own counter.
        segments: Each with its blocks, as ``torch.cuda.memory_snapshot`` lists them; None where
            the allocator does not tell them.
        snapshot: All that torch's memory visualizer can read; None unless it is wanted.
    """

    requested_bytes: int | None = None
    free_bytes: int | None = None
    limit_bytes: int | None = None
    total_bytes: int | None = None
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    segments: list[dict[str, Any]] | None = field(default=None, repr=False)
    snapshot: Mapping[str, Any] | None = field(default=None, repr=False)


class MomentSource(Protocol):
    """Where a moment comes from."""

    def open(self) -> None:
        """Keep the moment at which memory runs out from now on."""

    def close(self) -> None:
        """Keep none any more; the one that was kept stays."""

    def take(self) -> MemoryMoment:
        """Return the moment that was kept, else the present one; the next is another."""

    def start(self) -> None:
        """Begin to note lines and history, as far as that was asked for."""

    def stop(self) -> None:
        """End it, and keep no moment any more."""


@final
class CUDAMoments:
    """The allocator of a CUDA device.

    Args:
        device: Which.
        lines: Whether torch is to note which line allocates each block, some microseconds each.
        history: So many allocations and frees are kept for a snapshot; 0 means no snapshot.

    Synchronizes: Never.
    """

    def __init__(self, device: torch.device, *, lines: bool = False, history: int = 0) -> None:
        self.index = device.index
        self.is_open = False  # a step is under way, so that a moment is worth to be kept
        self._device = device
        self._lines, self._history = lines, history
        self._kept: MemoryMoment | None = None
        self._records = False

    def open(self) -> None:
        """Keep the moment at which memory runs out from now on."""
        self._kept = None
        self.is_open = True

    def close(self) -> None:
        """Keep none any more; the one that was kept stays."""
        self.is_open = False

    def start(self) -> None:
        """Have torch call when memory runs out, and note what was asked for."""
        _listen(self)
        if not (self._lines or self._history) or torch._C._cuda_isHistoryEnabled():
            return  # nothing is wanted, or the program records it for itself
        torch.cuda.memory._record_memory_history(
            enabled="all" if self._history else "state",
            context="all" if self._history else "state",
            stacks="python",
            max_entries=self._history or 1,
            device=self._device,
        )
        self._records = True

    def stop(self) -> None:
        """End what `start` began."""
        _LISTENING.discard(self)
        if self._records:
            torch.cuda.memory._record_memory_history(enabled=None, device=self._device)
        self._records = False

    def keep(self, requested: int, limit: int, free: int) -> None:
        """Note the moment; called by torch, in whichever thread allocates."""
        self._kept = self._now(requested, limit, free)

    def take(self) -> MemoryMoment:
        """Return the last moment at which memory ran out, else the present one."""
        kept, self._kept = self._kept, None
        if kept is not None:
            return kept
        return self._now(None, None, None)

    def _now(self, requested: int | None, limit: int | None, free: int | None) -> MemoryMoment:
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        total = torch.cuda.get_device_properties(self._device).total_memory
        if free is None:
            with suppress(RuntimeError):  # within a capture the driver may not be asked
                free, _ = torch.cuda.mem_get_info(self._device)
        snapshot = segments = None
        with suppress(RuntimeError):  # the driver's allocator tells no blocks
            snapshot = torch.cuda.memory._snapshot() if self._history else None
            every = (
                torch.cuda.memory_snapshot(include_traces=False)
                if snapshot is None
                else snapshot["segments"]
            )
            segments = [segment for segment in every if segment["device"] == self.index]
        return MemoryMoment(
            requested_bytes=requested,
            free_bytes=free,
            limit_bytes=total if limit is None else limit,
            total_bytes=total,
            allocated_bytes=_counter(stats, "allocated_bytes"),
            reserved_bytes=_counter(stats, "reserved_bytes"),
            segments=segments,
            snapshot=snapshot,
        )


@final
class NoMoments:
    """A device without an allocator that could be asked, such as the CPU."""

    def open(self) -> None:
        """Nobody tells when memory runs out."""

    def close(self) -> None:
        """Nothing was opened."""

    def start(self) -> None:
        """Nothing is noted."""

    def stop(self) -> None:
        """Nothing was begun."""

    def take(self) -> MemoryMoment:
        """Return a moment of which nothing is known."""
        return MemoryMoment()


def moments_of(device: torch.device, *, lines: bool, history: int) -> MomentSource:
    """Return where the moments of a device come from."""
    if device.type != "cuda":
        return NoMoments()
    return CUDAMoments(device, lines=lines, history=history)


def requested_of(message: str) -> int | None:
    """Return how much was asked for, read from torch's message; None if it does not say.

    Example:
        >>> requested_of("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has ...")
        1610612736
    """
    found = _ASKED.search(message)
    return None if found is None else int(float(found[1]) * _UNITS[found[2]])


# Torch's observer is for the process and for good, so those that listen to it are held here.
_LISTENING: weakref.WeakSet[CUDAMoments] = weakref.WeakSet()
_ATTACHED = threading.Event()


def _listen(source: CUDAMoments) -> None:
    _LISTENING.add(source)
    if _ATTACHED.is_set():
        return
    # The driver's allocator and allocators of others refuse: then the account is taken late.
    with suppress(RuntimeError, AttributeError):
        attach: Any = torch._C._cuda_attach_out_of_memory_observer  # type: ignore[attr-defined]
        attach(_observe)
        _ATTACHED.set()


def _observe(device: int, requested: int, limit: int, free: int) -> None:
    """Keep the moment for those with a step under way; an error here would hide the other one."""
    for source in list(_LISTENING):
        if source.index == device and source.is_open:
            with suppress(Exception):
                source.keep(requested, limit, free)


def _counter(stats: Mapping[str, Any], name: str) -> int:
    return int(stats.get(name, {}).get("all", {}).get("current", 0))
