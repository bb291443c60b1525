"""MemoryPool: a named region of device memory of its own.

Memory that lives long and memory of a step share segments, and what lives long leaves holes between
what does not. What is allocated in a pool of its own shares segments with nobody: caches, buffers
of evaluation, weights that are loaded in the middle of a run. And its size can be read.

Only this thread's requests are routed: a backward runs in threads of torch's, whose gradients go
where they always go. A pool keeps its memory until it is let go and all its tensors are. In a
capture requests belong to the graph, so a pool steps aside there.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, TypeAlias, final

import torch

from torchfast._core.arguments import explain_keywords
from torchfast._core.decisions import Decision
from torchfast._core.device import check_device, is_capturing

PoolId: TypeAlias = tuple[int, int]
NO_POOL: Final = (0, 0)  # the number of what is in no pool of its own


@dataclass(frozen=True, kw_only=True)
class PoolStatistics:
    """What a pool holds.

    Attributes:
        name: Of the pool.
        reserved_bytes: In its segments.
        allocated_bytes: In tensors.
        num_segments: How many segments.
    """

    name: str
    reserved_bytes: int = 0
    allocated_bytes: int = 0
    num_segments: int = 0

    @property
    def fragmentation(self) -> float:
        """Which part of what is reserved is in no tensor."""
        return 1 - self.allocated_bytes / self.reserved_bytes if self.reserved_bytes else 0.0

    def __add__(self, other: PoolStatistics) -> PoolStatistics:
        """Return what two pools hold together, under the name of the first."""
        return PoolStatistics(
            name=self.name,
            reserved_bytes=self.reserved_bytes + other.reserved_bytes,
            allocated_bytes=self.allocated_bytes + other.allocated_bytes,
            num_segments=self.num_segments + other.num_segments,
        )


@final
class MemoryPool:
    """A context in which this thread allocates in a pool of its own.

    Args:
        name: For its statistics, and for records and accounts as long as this object is kept.
        device: A CUDA device; None means the current one. On others, requests go where they go.

    Attributes:
        name: Its name.
        device: Its device.

    Raises:
        TypeError: ``name`` is no string, or ``device`` is none.
        ValueError: No such device.
        UnsupportedDeviceError: A device that this machine or torch build has not.
        RuntimeError: It is entered while it is entered.

    Numerics: Bitwise equal.
    Synchronizes: Never.

    Example:
        >>> pool = MemoryPool("cache", device="cpu")
        >>> with pool:
        ...     cache = torch.zeros(1024)
        >>> pool.statistics().name, pool.decision.outcome
        ('cache', 'stepped aside')
    """

    @explain_keywords
    def __init__(self, name: str, *, device: torch.device | str | int | None = None) -> None:
        if not isinstance(name, str):
            raise TypeError(f"name must be a string, got {name!r} ({type(name).__name__})")
        self.name = name
        default = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = check_device(default if device is None else device)
        # Whose memory lives as long as this object and all tensors in it.
        self._pool: Any = None
        self._stack: ExitStack | None = None
        _LIVING.add(self)

    @property
    def pool_id(self) -> PoolId | None:
        """The number that torch knows the pool by; None before its first use."""
        return None if self._pool is None else tuple(self._pool.id)

    @property
    def decision(self) -> Decision:
        """Whether there is such a pool."""
        if self.device.type == "cuda":
            detail = f"{self.name!r} has segments of its own on {self.device}"
            return Decision(lever="memory pool", outcome="applied", detail=detail)
        detail = f"{self.name!r} is no pool: torch has pools of memory on CUDA devices only"
        return Decision(lever="memory pool", outcome="stepped aside", detail=detail)

    def statistics(self) -> PoolStatistics:
        """Return what the pool holds now; zeros before its first use, and on other devices."""
        if self._pool is None:
            return PoolStatistics(name=self.name)
        segments = torch.cuda.memory_snapshot(self._pool.id, include_traces=False)
        return PoolStatistics(
            name=self.name,
            reserved_bytes=sum(segment["total_size"] for segment in segments),
            allocated_bytes=sum(segment["allocated_size"] for segment in segments),
            num_segments=len(segments),
        )

    def __enter__(self) -> MemoryPool:
        if self._stack is not None:
            raise RuntimeError(f"memory pool {self.name!r} is entered already; leave it first")
        self._stack = ExitStack()
        if self.device.type == "cuda" and not is_capturing():
            if self._pool is None:
                self._pool = torch.cuda.MemPool()
            self._stack.enter_context(torch.cuda.use_mem_pool(self._pool, self.device))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        stack, self._stack = self._stack, None
        assert stack is not None
        stack.__exit__(kind, error, trace)

    def __repr__(self) -> str:
        return f"MemoryPool({self.name!r}, device={str(self.device)!r})"


# Torch knows pools by numbers, those of graphs among them. What says whose memory is whose (the
# account of a step that does not fit, the monitor) finds the names here.
_LIVING: weakref.WeakSet[MemoryPool] = weakref.WeakSet()


def living_pools() -> Mapping[PoolId, MemoryPool]:
    """Return the pools that have been used and live, by the numbers that torch has for them."""
    return {number: pool for pool in list(_LIVING) if (number := pool.pool_id) is not None}
