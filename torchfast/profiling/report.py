"""What a trace says, in one object: the verdict, the figures behind it, and single faults.

``print(report)`` is a table for a terminal, `ProfileReport.write_html` a page that opens from disk,
`ProfileReport.to_dict` the same for a program.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from torchfast.profiling.ceilings import Ceilings
from torchfast.profiling.figures import Figures, measure_trace
from torchfast.profiling.findings import Finding, find_faults
from torchfast.profiling.gap_lines import gaps_with_lines, idle_by_line
from torchfast.profiling.kernels import copy_direction, is_pageable_copy, short
from torchfast.profiling.memory import MemoryUse, memory_use
from torchfast.profiling.page import page_of
from torchfast.profiling.places import Places
from torchfast.profiling.roofline import RooflineRow, roofline
from torchfast.profiling.table import table_of
from torchfast.profiling.trace import Trace, read_trace
from torchfast.profiling.verdict import Verdict, in_order, judge, largest_gaps

_MOST_ROWS = 20
# Below this a step with a log line or a slow batch is a good part of all.
_FEW_STEPS = 5


@final
@dataclass(frozen=True, kw_only=True)
class ProfileReport:
    """Where the time of a step went.

    Attributes:
        verdict: What limits the step, the figures that say so, and what to try.
        findings: Single faults, those that cost most first.
        figures: All figures.
        trace: The trace that they are of.
        memory: What memory was taken for, by device; empty unless the trace has it.
        roofline: The operators against the ceilings; empty without shapes in the trace.
        ceilings: What the device reached when it was measured; None if it was not.
        remarks: What is missing or was left out.
    """

    verdict: Verdict
    findings: tuple[Finding, ...]
    figures: Figures
    trace: Trace
    memory: tuple[MemoryUse, ...] = ()
    roofline: tuple[RooflineRow, ...] = ()
    ceilings: Ceilings | None = None
    remarks: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return what a program needs, in values that JSON has."""
        f = self.figures
        return {
            "trace": self.trace.name,
            "devices": self.trace.device_names,
            "verdict": self.verdict.to_dict(),
            "findings": [finding.to_dict() for finding in self.findings]
            or [{"kind": "none", "line": None, "figure": 0.0}],
            "steps": f.num_steps,
            "step_ms": f.step_us / 1e3,
            "untraced_step_ms": None if f.untraced_us is None else f.untraced_us / 1e3,
            "busy_ms": f.per_step_ms(f.busy_us),
            "idle_ms": f.per_step_ms(f.idle_us),
            "communication_ms": f.per_step_ms(f.communication_us),
            "exposed_communication_ms": f.per_step_ms(f.exposed_communication_us),
            "idle_ms_by_cause": {c: f.per_step_ms(us) for c, us in f.idle_by_cause.items()},
            "idle_by_line": [
                {
                    "cause": row.cause,
                    "line": row.line,
                    "ms": f.per_step_ms(row.total_us),
                    "count": row.num / f.num_steps,
                }
                for row in idle_by_line(f.gaps)[:_MOST_ROWS]
            ],
            "longest_gaps": [
                {
                    "start_ms": gap.start / 1e3,
                    "ms": gap.length / 1e3,
                    "cause": gap.cause,
                    "what": gap.what,
                    "line": gap.line,
                }
                for gap in largest_gaps(f, _MOST_ROWS)
            ],
            "phases": [
                {
                    "phase": p.phase,
                    "kernel_ms": f.per_step_ms(p.kernel_us),
                    "busy_ms": f.per_step_ms(p.busy_us),
                    "elapsed_ms": f.per_step_ms(p.elapsed_us),
                    "launches": p.num_launches / f.num_steps,
                }
                for p in f.phases
            ],
            "host_ms_by_phase": {p: f.per_step_ms(us) for p, us in f.host_phases.items()},
            "kernels": [
                {
                    "name": short(row.name),
                    "full_name": row.name,
                    "category": row.kind,
                    "tensor_cores": row.tensor_cores,
                    "ms": f.per_step_ms(row.total_us),
                    "count": row.num / f.num_steps,
                }
                for row in f.top_kernels[:_MOST_ROWS]
            ],
            "operators": [
                {
                    "name": row.name,
                    "ms": f.per_step_ms(row.total_us),
                    "count": row.num / f.num_steps,
                }
                for row in f.top_operators[:_MOST_ROWS]
            ],
            "copies": [
                {
                    "name": c.name,
                    "direction": copy_direction(c.name),
                    "pageable": is_pageable_copy(c.name),
                    "count": c.num / f.num_steps,
                    "bytes": c.num_bytes / f.num_steps,
                    "ms": f.per_step_ms(c.total_us),
                    "hidden_ms": f.per_step_ms(c.hidden_us),
                }
                for c in f.copies
            ],
            "kernel_ms_by_category": {c: f.per_step_ms(us) for c, us in f.by_category.items()},
            "launches": f.num_launches / f.num_steps,
            "compiles": f.num_compiles,
            "memory": [use.to_dict() for use in self.memory],
            "roofline": [row.to_dict() for row in self.roofline],
            "ceilings": self.ceilings.to_dict() if self.ceilings else None,
            "remarks": list(self.remarks),
        }

    def write_json(self, path: str | os.PathLike[str]) -> None:
        """Write `to_dict` into a file."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")

    def write_html(self, path: str | os.PathLike[str]) -> None:
        """Write a page that needs nothing else: figures, tables and the timeline."""
        Path(path).write_text(page_of(self), encoding="utf-8")

    def __str__(self) -> str:
        return table_of(self)


def analyse_trace(
    path: str | os.PathLike[str],
    *,
    lines: str | os.PathLike[str] | None = None,
    ceilings: Ceilings | None = None,
    progress: Callable[[float], None] | None = None,
) -> ProfileReport:
    """Say where the time goes in a trace that torch.profiler wrote.

    Needs no device: a trace of another machine is read as well.

    Args:
        path: The trace, ``.json`` or ``.json.gz``, of any size.
        lines: A second trace of the same loop, with Python frames, for the lines of what is found;
            `torchfast.profile` takes it by itself. The first serves where it has frames.
        ceilings: What the device can do, for the roofline.
        progress: Told now and then which part of the trace has been read, from 0 to 1.

    Returns:
        The verdict and all figures.

    Raises:
        TraceError: The file is empty, or no trace of torch.profiler.
        OSError: It cannot be read.

    Synchronizes: Never.
    """
    trace = read_trace(path, progress=progress)
    lined = read_trace(lines) if lines is not None else None
    return report_on(trace, lined, ceilings)


def report_on(
    trace: Trace,
    lined: Trace | None = None,
    ceilings: Ceilings | None = None,
    untraced_us: float | None = None,
) -> ProfileReport:
    """Return the report on a trace that was read; `measure_trace` says what `untraced_us` is.

    Lines are those of `lined`, or else its own where it has any.
    """
    lined = trace if lined is None else lined
    figures = measure_trace(trace, untraced_us)
    figures = replace(figures, gaps=gaps_with_lines(trace, figures, lined))
    findings = find_faults(trace, figures, lined)
    verdict = judge(figures, findings)
    memory = tuple(memory_use(trace, figures.launched))
    return ProfileReport(
        verdict=verdict,
        findings=tuple(in_order(findings, verdict)),
        figures=figures,
        trace=trace,
        memory=memory,
        roofline=tuple(roofline(figures, ceilings)),
        ceilings=ceilings,
        remarks=tuple(_remarks(trace, figures, lined, memory)),
    )


def _remarks(
    trace: Trace, figures: Figures, lined: Trace, memory: Sequence[MemoryUse]
) -> list[str]:
    remarks = list(trace.remarks)
    if not figures.launched:
        remarks.append("the trace has no work of a device; the host alone is looked at")
    elif figures.num_devices > 1:
        remarks.append(
            f"the trace has work on {figures.num_devices} devices; device {figures.device} is "
            "shown, the busiest"
        )
    if not trace.steps:
        remarks.append("no steps are marked in the trace (ProfilerStep#...); it counts as one")
    elif len(trace.steps) < _FEW_STEPS:
        remarks.append(
            f"{len(trace.steps)} steps are few: one that is unlike the others moves every figure; "
            f"measure {_FEW_STEPS} or more"
        )
    if not Places(lined):
        remarks.append("the trace has no Python frames, so lines are not known")
    if any(p.phase == "replay" for p in figures.phases):
        remarks.append(
            "a CUDA graph's kernels have one launch, so its phases are one, replay; profile the "
            "step with Plan(cuda_graph=False) to see them"
        )
    if figures.untraced_us is not None and figures.pace < 1.0:
        remarks.append(
            f"before the profiler began a step took the host {figures.untraced_us / 1e3:.2f} ms; "
            f"the verdict and the findings take its own work for {figures.pace:.0%} of what it "
            "took in the trace"
        )
    if memory and not trace.held:
        remarks.append(
            "the trace does not say which memory was taken before it for parameters, gradients and "
            "the state of optimizers: that of a device is told as other, that of the host not at "
            "all; torchfast.profile() notes what it is"
        )
    lost = sum(1 for each in figures.launched if each.call is None)
    if lost:
        remarks.append(f"{lost} kernels or copies have no launch in the trace; forward is assumed")
    return remarks
