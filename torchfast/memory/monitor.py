"""Watching memory over a run: counters of the host at a cadence, and a verdict that says why.

A step that runs out of memory after ten hours says only that. Which of three things happened shows
in how the counters moved before (see `diagnosis`), and reading them costs some hundred microseconds
of the host every ``every`` steps, and no sync.

Where memory leaks, the line that does it is looked for: torch notes for some steps which line each
block was allocated by, and of two looks at what lives the difference is what stays.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from typing import Any, final

import torch

from torchfast._core.arguments import check_flag, check_int, explain_init_keywords
from torchfast._core.decisions import Decision
from torchfast._core.device import check_device, is_capturing
from torchfast.memory.diagnosis import LEAST_SAMPLES, GrowingLine, MemoryDiagnosis, judge
from torchfast.memory.samples import MemorySample
from torchfast.memory.sources import CUDAMemory, MemorySource, ProcessMemory

logger = logging.getLogger(__name__)

_LINES_SHOWN = 3
_TRACED = 4  # samples that the search for a line takes


@final
@explain_init_keywords
class MemoryMonitor:
    """Samples memory after steps, and says whether it leaks, is in pieces, or is too little.

    On the CPU it watches the resident set of the process; where the system does not tell that, it
    steps aside.

    Args:
        device: Whose memory.
        every: Steps between samples.
        history: Samples that are kept; the verdict is on these.
        find_lines: Whether torch is to note which lines allocate, for four samples, once a leak is
            suspected.
        source: Where figures come from, in place of the device.

    Raises:
        TypeError: ``every`` or ``history`` is no int.
        ValueError: One is too small.
        UnsupportedDeviceError: This machine has no such device.
    Numerics: Bitwise equal.
    Synchronizes: Never.

    Example:
        >>> monitor = MemoryMonitor("cpu", every=1)
        >>> for _ in range(3):
        ...     monitor.step()
        >>> monitor.diagnosis().verdict
        'unknown'
    """

    def __init__(
        self,
        device: str | torch.device,
        *,
        every: int = 16,
        history: int = 128,
        find_lines: bool = True,
        source: MemorySource | None = None,
    ) -> None:
        self._every = check_int("every", every, minimum=1)
        check_int("history", history, minimum=LEAST_SAMPLES)
        self._samples: deque[MemorySample] = deque(maxlen=history)
        self._source = _source_of(check_device(device, data=False)) if source is None else source
        self._find_lines = check_flag("find_lines", find_lines)
        self._step = 0
        self._told: set[str] = set()
        self._silent = False
        self._trace_left = 0
        self._before: Mapping[str, int] = {}
        self._lines: tuple[GrowingLine, ...] = ()
        self._no_lines = "" if find_lines else "find_lines=False"

    def step(self) -> None:
        """Note the end of a step; every so many of them, look at memory.

        Call it at the same point of each step, outside of a capture.
        """
        self._step += 1
        if self._step % self._every or self._silent or is_capturing():
            return
        sample = self._source.read(self._step)
        if sample is None:
            # Nothing was allocated yet, or the system does not tell.
            self._silent = not self._source.has_segments
            return
        self._samples.append(sample)
        if self._trace_left:
            self._trace()
        else:
            self._look()

    @property
    def samples(self) -> tuple[MemorySample, ...]:
        """The samples that are kept, oldest first."""
        return tuple(self._samples)

    def diagnosis(self) -> MemoryDiagnosis:
        """Return what the samples say by now."""
        found = self._judge()
        if found.verdict == "fragmentation":
            # Worth a look at every segment, which a healthy run is spared.
            pools = self._source.pools().values()
            found = self._judge(
                self._source.expandable(),
                self._source.private_bytes(),
                sum(pool.reserved_bytes - pool.allocated_bytes for pool in pools),
            )
        if found.verdict != "leak":
            return found
        evidence = found.evidence
        if self._no_lines:
            evidence += f"; its line was not looked for: {self._no_lines}"
        return MemoryDiagnosis(
            verdict="leak",
            evidence=evidence,
            remedy=found.remedy,
            slope_bytes=found.slope_bytes,
            reserved_slope_bytes=found.reserved_slope_bytes,
            lines=self._lines,
        )

    def to_record(self) -> dict[str, Any]:
        """Return the last sample and the verdict as JSON-ready builtins; empty without a sample."""
        if not self._samples:
            return {}
        last, found = self._samples[-1], self._judge()
        named = {
            name: {"reserved_bytes": pool.reserved_bytes, "allocated_bytes": pool.allocated_bytes}
            for name, pool in self._source.pools().items()
        }
        return {
            "allocated_bytes": last.allocated_bytes,
            "reserved_bytes": last.reserved_bytes,
            "fragmentation": last.fragmentation,
            "rounding": last.rounding,
            "retries": last.num_retries,
            "pools": dict(last.pools or {}),
            "named_pools": named,
            "slope_bytes": found.slope_bytes,
            "reserved_slope_bytes": found.reserved_slope_bytes,
            "verdict": found.verdict,
        }

    def decision(self) -> Decision:
        """Return what to say in a report."""
        if self._silent:
            return Decision(
                lever="memory",
                outcome="stepped aside",
                detail="this system does not tell what a process holds, so memory is not watched",
            )
        detail = f"{self._source.name}, every {self._every} steps: {self.diagnosis()}"
        return Decision(lever="memory", outcome="applied", detail=detail)

    def close(self) -> None:
        """End a search for lines that is under way; the samples stay."""
        self._trace_left = 0
        self._source.stop_trace()

    def __repr__(self) -> str:
        """Say whose memory, and what of it."""
        return f"MemoryMonitor({self._source.name}, every={self._every}, {self._judge().verdict})"

    def _judge(
        self, expandable: bool = False, private_bytes: int = 0, pools_free_bytes: int = 0
    ) -> MemoryDiagnosis:
        return judge(
            tuple(self._samples),
            limit_bytes=self._source.limit_bytes,
            noise_bytes=self._source.noise_bytes,
            has_segments=self._source.has_segments,
            expandable=expandable,
            private_bytes=private_bytes,
            pools_free_bytes=pools_free_bytes,
        )

    def _look(self) -> None:
        found = self._judge()
        if found.verdict in ("healthy", "unknown") or found.verdict in self._told:
            return
        if found.verdict == "leak" and self._find_lines:
            refused = self._source.start_trace()
            if refused is None:
                self._trace_left = _TRACED
                return
            self._no_lines = refused
        self._warn()

    def _trace(self) -> None:
        """Look at what lives after the first sample of a search, and after the last."""
        self._trace_left -= 1
        if self._trace_left == _TRACED - 1:
            self._before = self._source.live_by_line()
        if self._trace_left:
            return
        after = self._source.live_by_line()
        self._source.stop_trace()
        grown = {line: size - self._before.get(line, 0) for line, size in after.items()}
        most = sorted((line for line in grown if grown[line] > 0), key=lambda line: -grown[line])
        self._lines = tuple(
            GrowingLine(line=line, num_bytes=grown[line]) for line in most[:_LINES_SHOWN]
        )
        self._before = {}
        if self._judge().verdict == "leak":
            self._warn()

    def _warn(self) -> None:
        found = self.diagnosis()
        self._told.add(found.verdict)
        logger.warning("the memory of %s at step %d: %s", self._source.name, self._step, found)


def _source_of(device: torch.device) -> MemorySource:
    return CUDAMemory(device) if device.type == "cuda" else ProcessMemory()
