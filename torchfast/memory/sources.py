"""Where the figures of memory come from: a CUDA device's allocator, or the process.

The lines of code that allocate can be told on CUDA only, by torch's record of what each block in
use was allocated by. It costs some microseconds an allocation, so it runs for some steps only, and
keeps one entry for each block that lives, no history.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, final

import torch

from torchfast._core.cgroups import usable_memory
from torchfast.memory.memory_pool import NO_POOL, PoolStatistics, living_pools
from torchfast.memory.samples import MemorySample, sample_of

_HIDDEN = tuple(
    str(Path(path).parent) + os.sep for path in (torch.__file__, str(Path(__file__).parent))
)
NO_LINE = "(no line of Python: a backward pass or a graph)"


class MemorySource(Protocol):
    """What a `MemoryMonitor` reads from."""

    name: str
    """Whose memory, in words."""
    limit_bytes: int | None
    """The most that there is; None if that is not known."""
    noise_bytes: int
    """Growth below this means nothing."""
    has_segments: bool
    """Whether memory is reserved in segments, which can be fragmented."""

    def read(self, step: int) -> MemorySample | None:
        """Return the figures, without waiting for the device; None if there are none yet."""

    def expandable(self) -> bool:
        """Whether segments grow."""

    def private_bytes(self) -> int:
        """Return what pools of graphs have reserved; slow."""

    def pools(self) -> Mapping[str, PoolStatistics]:
        """Return what each `MemoryPool` holds, by its name."""

    def start_trace(self) -> str | None:
        """Begin to note which lines allocate; return why not, if not."""

    def live_by_line(self) -> Mapping[str, int]:
        """Return the bytes that live, by the line that allocated them, if it was noted."""

    def stop_trace(self) -> None:
        """End it."""


@final
class CUDAMemory:
    """The allocator of a CUDA device.

    Synchronizes: Never. `live_by_line` and `private_bytes` look at every block, on the host.
    """

    noise_bytes = 2**20
    has_segments = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.name = str(device)
        share = torch.cuda.get_per_process_memory_fraction(device)
        total = torch.cuda.get_device_properties(device).total_memory
        self.limit_bytes: int | None = int(total * share)
        self._tracing = False

    def read(self, step: int) -> MemorySample | None:
        """Return the allocator's counters."""
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        return sample_of(step, stats) if stats else None

    def expandable(self) -> bool:
        """Whether a segment that grows is there."""
        return any(segment.get("is_expandable") for segment in self._segments())

    def private_bytes(self) -> int:
        """Return what private pools have reserved that are no `MemoryPool`."""
        others = {NO_POOL, *living_pools()}
        return sum(
            segment["total_size"]
            for segment in self._segments()
            if tuple(segment.get("segment_pool_id", NO_POOL)) not in others
        )

    def pools(self) -> Mapping[str, PoolStatistics]:
        """Return what each `MemoryPool` of the device holds; those of one name together."""
        found: dict[str, PoolStatistics] = {}
        for pool in living_pools().values():
            if pool.device == self._device:
                told = pool.statistics()
                found[pool.name] = found[pool.name] + told if pool.name in found else told
        return found

    def start_trace(self) -> str | None:
        """Begin to note lines; where somebody does already, what is noted there is read."""
        if torch._C._cuda_isHistoryEnabled():
            return None
        torch.cuda.memory._record_memory_history(
            enabled="state", context="state", stacks="python", max_entries=1, device=self._device
        )
        self._tracing = True
        return None

    def live_by_line(self) -> Mapping[str, int]:
        """Return the bytes of blocks in use, by line."""
        lines: Counter[str] = Counter()
        for segment in self._segments():
            for block in segment["blocks"]:
                # A block from before has no frames. It is told of as well: what counts is the
                # difference of two looks, from which it falls out.
                if block["state"] == "active_allocated":
                    lines[line_of(block.get("frames") or ())] += block["size"]
        return lines

    def stop_trace(self) -> None:
        """End what `start_trace` began."""
        if self._tracing:
            torch.cuda.memory._record_memory_history(enabled=None, device=self._device)
        self._tracing = False

    def _segments(self) -> list[Any]:
        segments = torch.cuda.memory_snapshot(include_traces=False)
        return [segment for segment in segments if segment["device"] == self._device.index]


@final
class ProcessMemory:
    """What the process holds of the memory of its machine or container: all that a CPU can tell.

    Its lines are not told, and it is noisy: the system gives and takes in pages.
    """

    name = "the process"
    noise_bytes = 64 * 2**20
    has_segments = False

    def __init__(self) -> None:
        self.limit_bytes = usable_memory()
        self._peak = 0

    def read(self, step: int) -> MemorySample | None:
        """Return the resident set; None where the system does not tell it."""
        try:
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        except (OSError, ValueError, IndexError):
            return None
        size = pages * os.sysconf("SC_PAGE_SIZE")
        self._peak = max(self._peak, size)
        return MemorySample(
            step=step, allocated_bytes=size, reserved_bytes=size, peak_bytes=self._peak
        )

    def expandable(self) -> bool:
        """There are no segments."""
        return False

    def private_bytes(self) -> int:
        """There are no pools."""
        return 0

    def pools(self) -> Mapping[str, PoolStatistics]:
        """There are no pools."""
        return {}

    def start_trace(self) -> str | None:
        """Say that lines cannot be told."""
        return "on the CPU torch does not note which line allocates"

    def live_by_line(self) -> Mapping[str, int]:
        """Nothing is noted."""
        return {}

    def stop_trace(self) -> None:
        """Nothing was begun."""


def line_of(frames: Sequence[Mapping[str, Any]]) -> str:
    """Return the innermost line that is neither torch's nor torchfast's."""
    known = [f for f in frames if str(f["filename"]).endswith(".py")]
    own = [f for f in known if not str(f["filename"]).startswith(_HIDDEN)]
    frame = next(iter(own or known), None)
    return NO_LINE if frame is None else f"{frame['filename']}:{frame['line']} in {frame['name']}"
