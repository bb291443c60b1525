"""The report as text, for a terminal of 100 columns."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from torchfast._core.shell import size
from torchfast.profiling.gap_lines import idle_by_line
from torchfast.profiling.kernels import TINY_US, short
from torchfast.profiling.verdict import largest_gaps

if TYPE_CHECKING:
    from torchfast.profiling.report import ProfileReport

_ROWS: Final = 8
# What a line costs in idle time below that is not worth a row.
_LEAST_SHARE: Final = 0.005
_MEANING: Final = {
    "data": "waiting for a batch",
    "sync": "after a wait of the host",
    "launch": "the host launches too slowly",
    "python": "the host runs Python",
    "compile": "torch.compile compiles",
    "allocation": "memory from the driver",
    "device": "from one kernel to the next",
    "unknown": "no launch in the trace",
}


def table_of(report: ProfileReport) -> str:
    """Return the report as lines of text."""
    return "\n".join(
        line.rstrip()
        for part in (
            _head(report),
            _findings(report),
            _time(report),
            _phases(report),
            _gaps(report),
            _kernels(report),
            _copies(report),
            _memory(report),
            _roofline(report),
            _remarks(report),
        )
        for line in part
    )


def _head(report: ProfileReport) -> Iterator[str]:
    verdict = report.verdict
    where = f" at {verdict.line}" if verdict.line else ""
    yield f"{verdict.name}{where}: {verdict.text}"
    yield f"  try: {verdict.lever}"


def _findings(report: ProfileReport) -> Iterator[str]:
    if not report.findings:
        return
    yield ""
    yield "found"
    for f in report.findings:
        yield f"  {f.kind:<27} {f.share:>5.1%}  {f.text}"
        yield f"  {'':<27} {'':>5}  {'at ' + f.line + '; ' if f.line else ''}try: {f.lever}"


def _time(report: ProfileReport) -> Iterator[str]:
    f = report.figures
    yield ""
    names = report.trace.device_names
    on = names[f.device] if 0 <= f.device < len(names) else "the host alone"
    yield f"time of a step, over {f.num_steps} steps, {on}"
    yield f"  {'step':<30} {f.step_us / 1e3:>9.3f} ms"
    if not f.launched:
        return
    yield f"  {'busy':<30} {_ms(report, f.busy_us)}"
    yield f"  {'idle':<30} {_ms(report, f.idle_us)}"
    for cause, us in sorted(f.idle_by_cause.items(), key=lambda item: -item[1]):
        num = sum(1 for gap in f.gaps if gap.cause == cause)
        yield f"    {_MEANING[cause]:<28} {_ms(report, us)}  {num / f.num_steps:>7.1f} gaps a step"
    if f.waits_us or f.pace < 1.0:
        yield f"  idle at the host's own pace    {_own_ms(report, f.waits_us + f.late_us)}"
        yield f"    {'for waits of the host':<28} {_own_ms(report, f.waits_us)}"
        yield f"    {'it is late all the same':<28} {_own_ms(report, f.late_us)}"
    yield (
        f"  {f.num_launches / f.num_steps:.0f} launches and {f.num_kernels / f.num_steps:.0f} "
        f"kernels a step, {_part(f.num_tiny, f.num_kernels)} of them below {TINY_US:.0f} us"
    )
    if f.arithmetic_us:
        unknown = f.arithmetic_us - f.tensor_core_us - f.no_tensor_core_us
        yield (
            f"  products, convolutions, attention: {_part(f.tensor_core_us, f.arithmetic_us)} of "
            f"their time on tensor cores, {_part(f.no_tensor_core_us, f.arithmetic_us)} not, "
            f"{_part(unknown, f.arithmetic_us)} the name does not tell"
        )
    if f.communication_us:
        hidden_us = f.communication_us - f.exposed_communication_us
        yield (
            f"  collectives {_ms(report, f.communication_us).strip()}, "
            f"{_part(hidden_us, f.communication_us)} of it hidden behind other work, "
            f"{f.per_step_ms(f.exposed_communication_us):.3f} ms exposed"
        )


def _phases(report: ProfileReport) -> Iterator[str]:
    f = report.figures
    yield ""
    if f.phases:
        yield "phases             kernels ms  elapsed ms   of step  launches  host ms"
        for p in f.phases:
            host = f.host_phases.get(p.phase)
            yield (
                f"  {p.phase:<15} {f.per_step_ms(p.kernel_us):>11.3f} "
                f"{f.per_step_ms(p.elapsed_us):>11.3f} {f.share(p.elapsed_us):>9.1%} "
                f"{p.num_launches / f.num_steps:>9.1f} "
                f"{'' if host is None else f'{f.per_step_ms(host):.3f}':>8}"
            )
        return
    yield "phases on the host        ms   of step"
    for phase, us in sorted(f.host_phases.items(), key=lambda item: -item[1]):
        yield f"  {phase:<15} {f.per_step_ms(us):>10.3f} {f.share(us):>9.1%}"


def _gaps(report: ProfileReport) -> Iterator[str]:
    f = report.figures
    if lines := [row for row in idle_by_line(f.gaps) if f.share(row.total_us) >= _LEAST_SHARE]:
        yield ""
        yield "idle, by the line of the host           ms   of step   gaps"
        for row in lines[:_ROWS]:
            yield (
                f"  {_MEANING[row.cause]:<30} {f.per_step_ms(row.total_us):>9.3f} "
                f"{f.share(row.total_us):>9.1%} {row.num / f.num_steps:>6.1f}  {row.line}"
            )
    longest = [gap for gap in largest_gaps(f, 5) if gap.length >= TINY_US]
    if not longest:
        return
    yield ""
    yield "longest gaps         ms  cause"
    for gap in longest:
        what = f": {gap.what}" if gap.what else ""
        yield (
            f"  at {gap.start / 1e3:>9.3f} {gap.length / 1e3:>8.3f}  {_MEANING[gap.cause]}{what}"
            f"{' at ' + gap.line if gap.line else ''}"
        )


def _kernels(report: ProfileReport) -> Iterator[str]:
    f = report.figures
    if f.top_kernels:
        yield ""
        yield "kernels                                                  ms    share   count  cores"
        for row in f.top_kernels[:_ROWS]:
            cores = {"yes": "tensor", "no": "none", "unknown": ""}[row.tensor_cores]
            yield (
                f"  {short(row.name, 50):<50} {f.per_step_ms(row.total_us):>8.3f} "
                f"{f.of_kernels(row.total_us):>7.1%} {row.num / f.num_steps:>7.1f}  {cores}"
            )
        kinds = [f"{kind} {f.of_kernels(us):.0%}" for kind, us in f.by_category.items()]
        yield f"  by kind: {', '.join(kinds[:_ROWS])}"
    if f.top_operators:
        yield ""
        total = f.kernel_us or f.window_us
        yield "operators                                                ms    share   count"
        for row in f.top_operators[:_ROWS]:
            yield (
                f"  {row.name[:50]:<50} {f.per_step_ms(row.total_us):>8.3f} "
                f"{row.total_us / total if total else 0.0:>7.1%} {row.num / f.num_steps:>7.1f}"
            )


def _copies(report: ProfileReport) -> Iterator[str]:
    f = report.figures
    if not f.copies:
        return
    yield ""
    yield "copies                                             ms     hidden   count  bytes a step"
    for c in f.copies:
        yield (
            f"  {c.name[:44]:<44} {f.per_step_ms(c.total_us):>8.3f} "
            f"{_part(c.hidden_us, c.total_us):>9} {c.num / f.num_steps:>7.1f}  "
            f"{size(int(c.num_bytes / f.num_steps))}"
        )


def _memory(report: ProfileReport) -> Iterator[str]:
    for use in report.memory:
        kept = f"; the allocator held {size(use.reserved_bytes)}" if use.reserved_bytes else ""
        yield ""
        yield f"memory of {use.device}: at most {size(use.peak_bytes)}, in {use.peak_phase}{kept}"
        yield f"  {'':<15} {'at the peak':>18} {'least':>10} {'most':>10}"
        for name, most in sorted(use.most.items(), key=lambda item: -use.at_peak.get(item[0], 0)):
            now = use.at_peak.get(name, 0)
            yield (
                f"  {name:<15} {size(now):>10} {_part(now, use.peak_bytes):>7} "
                f"{size(use.least[name]):>10} {size(most):>10}"
            )


def _roofline(report: ProfileReport) -> Iterator[str]:
    f = report.figures
    known = [row for row in report.roofline if row.is_known]
    unknown = [row for row in report.roofline if not row.is_known]
    if not report.roofline:
        return
    yield ""
    yield f"{'products and attention':<50} {'ms a step':>9}  TFLOP/s   GB/s  of ceiling"
    for row in unknown:
        ms = f.per_step_ms(row.total_us)
        yield f"  {row.name:<50} {ms:>7.3f}  not known: the trace has no shapes"
    for row in known[:_ROWS]:
        part = "" if math.isnan(row.of_ceiling) else f"{row.of_ceiling:.0%} {row.bound}"
        yield (
            f"  {row.name[:40]:<40} {row.dtype:<9} {f.per_step_ms(row.total_us):>7.3f} "
            f"{row.flops / 1e12:>8.1f} {row.bytes_a_second / 1e9:>6.0f}  {part}"
        )
    if report.ceilings is not None:
        best = ", ".join(f"{n} {v / 1e12:.0f} TFLOP/s" for n, v in report.ceilings.flops.items())
        yield f"  ceilings measured here: {best}, {report.ceilings.bytes_a_second / 1e9:.0f} GB/s"


def _remarks(report: ProfileReport) -> Iterator[str]:
    if report.remarks:
        yield ""
        for remark in report.remarks:
            yield f"note: {remark}"


def _ms(report: ProfileReport, us: float) -> str:
    f = report.figures
    return f"{f.per_step_ms(us):>9.3f} ms {f.share(us):>7.1%}"


def _own_ms(report: ProfileReport, us: float) -> str:
    f = report.figures
    return f"{f.own_ms(us):>9.3f} ms {f.share(us):>7.1%}"


def _part(some: float, every: float) -> str:
    return f"{some / every:.0%}" if every else "0%"
