"""The report as one HTML page that needs nothing else: no script, no font, no other file.

Everything that comes from the trace (names of kernels, paths, operators) is escaped, so a page can
be passed on and opened from disk. It follows the reader's choice of a light or a dark screen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, Final

from torchfast._core.shell import size
from torchfast.profiling.gap_lines import idle_by_line
from torchfast.profiling.kernels import TINY_US, short
from torchfast.profiling.memory_drawing import MEMORY_COLOURS, areas_of
from torchfast.profiling.timeline import IDLE_COLOUR, PHASE_COLOURS, timeline_of
from torchfast.profiling.verdict import largest_gaps

if TYPE_CHECKING:
    from torchfast.profiling.memory import MemoryUse
    from torchfast.profiling.report import ProfileReport

_STYLE: Final = """
:root{color-scheme:light dark;--ink:#1f2328;--soft:#59636e;--line:#d1d9e0;--paper:#fff;
--lane:#f3f5f7}
@media (prefers-color-scheme:dark){:root{--ink:#e6edf3;--soft:#9198a1;--line:#3d444d;
--paper:#0d1117;--lane:#1b222b}}
body{margin:0 auto;max-width:1180px;padding:24px;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif}
h1{font-size:26px;margin:0}h2{font-size:18px;margin:32px 0 8px}
p{margin:6px 0}.soft,caption{color:var(--soft)}
.verdict{border-left:6px solid #d1242f;padding:8px 16px;background:var(--lane)}
.verdict.fine{border-color:#1a7f37}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
table.figures{width:auto;min-width:60%}
th,td{text-align:left;padding:4px 18px 4px 0;border-bottom:1px solid var(--line);vertical-align:top}
th{font-weight:600;color:var(--soft)}td.n,th.n{text-align:right}
th,td.n,td.fault,td.type{white-space:nowrap}
td:last-child,th:last-child{padding-right:0}td.name{overflow-wrap:anywhere}
td.line{font:13px/22px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
.scroll{overflow-x:auto}
svg{width:100%;height:auto;display:block}
svg .label,svg .time{font-size:12px;fill:var(--soft)}svg .lane{fill:var(--lane)}
svg .tick{stroke:var(--line);stroke-width:1}
.key{display:inline-block;width:12px;height:12px;border-radius:2px;margin:0 5px 0 14px}
.key:first-child{margin-left:0}
code{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
"""


def page_of(report: ProfileReport) -> str:
    """Return the page."""
    parts = "".join(_parts(report))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(report.verdict.name)}: {escape(report.trace.name)}</title>"
        f"<style>{_STYLE}</style></head><body>{parts}</body></html>\n"
    )


def _parts(report: ProfileReport) -> Iterator[str]:
    f, verdict = report.figures, report.verdict
    names = report.trace.device_names
    on = names[f.device] if 0 <= f.device < len(names) else "the host alone"
    where = f" <code>{escape(verdict.line)}</code>" if verdict.line else ""
    own = ""
    if f.untraced_us is not None and f.pace < 1.0:
        own = f" under the profiler, {f.untraced_us / 1e3:.3f} ms before it began"
    fine = " fine" if verdict.name == "fine" else ""
    yield (
        f'<div class="verdict{fine}"><h1>{escape(verdict.name)}{where}</h1>'
        f"<p>{escape(verdict.text)}</p><p><b>Try:</b> {escape(verdict.lever)}</p></div>"
        f'<p class="soft">{escape(report.trace.name)}, {escape(on)}, {f.num_steps} steps, '
        f"{f.step_us / 1e3:.3f} ms a step{own}</p>"
    )
    if report.findings:
        yield "<h2>Found</h2>" + _table(
            ("fault", "of the step#", "what", "line", "try"),
            [(x.kind, f"{x.share:.1%}", x.text, x.line or "", x.lever) for x in report.findings],
        )
    if drawing := timeline_of(report):
        shown = dict.fromkeys(p.phase for p in f.phases)
        keys = "".join(_key(PHASE_COLOURS[phase], phase) for phase in shown)
        yield f"<h2>Timeline</h2>{drawing}<p>{keys}{_key(IDLE_COLOUR, 'idle')}</p>"
    yield from _time(report)
    yield from _work(report)
    for use in report.memory:
        yield _memory(report, use)
    if report.remarks:
        notes = "".join(f"<li>{escape(remark)}</li>" for remark in report.remarks)
        yield f"<h2>Notes</h2><ul>{notes}</ul>"


def _time(report: ProfileReport) -> Iterator[str]:
    f = report.figures
    if not f.phases:
        yield "<h2>Phases on the host</h2>" + _table(
            ("phase", "ms a step#", "of the step#"),
            [
                (phase, f"{f.per_step_ms(us):.3f}", f"{f.share(us):.1%}")
                for phase, us in sorted(f.host_phases.items(), key=lambda item: -item[1])
            ],
        )
        return
    yield "<h2>Phases</h2>" + _table(
        ("phase", "kernels ms#", "elapsed ms#", "of the step#", "launches#", "host ms#"),
        [
            (
                p.phase,
                f"{f.per_step_ms(p.kernel_us):.3f}",
                f"{f.per_step_ms(p.elapsed_us):.3f}",
                f"{f.share(p.elapsed_us):.1%}",
                f"{p.num_launches / f.num_steps:.1f}",
                # What is inferred from kernels has no annotation on the host.
                f"{f.per_step_ms(f.host_phases[p.phase]):.3f}" if p.phase in f.host_phases else "",
            )
            for p in f.phases
        ],
    )
    yield "<h2>Idle</h2>" + _table(
        ("cause", "ms a step#", "of the step#", "gaps a step#"),
        [
            (
                cause,
                f"{f.per_step_ms(us):.3f}",
                f"{f.share(us):.1%}",
                f"{sum(1 for g in f.gaps if g.cause == cause) / f.num_steps:.1f}",
            )
            for cause, us in sorted(f.idle_by_cause.items(), key=lambda item: -item[1])
        ],
    )
    if lines := idle_by_line(f.gaps)[:12]:
        yield "<h2>Idle by line</h2>" + _table(
            ("cause", "ms a step#", "of the step#", "gaps a step#", "line"),
            [
                (
                    row.cause,
                    f"{f.per_step_ms(row.total_us):.3f}",
                    f"{f.share(row.total_us):.1%}",
                    f"{row.num / f.num_steps:.1f}",
                    row.line,
                )
                for row in lines
            ],
        )
    if f.communication_us:
        yield "<h2>Collectives</h2>" + _table(
            ("ms a step#", "of the step#", "hidden behind other work#", "exposed ms#"),
            [
                (
                    f"{f.per_step_ms(f.communication_us):.3f}",
                    f"{f.share(f.communication_us):.1%}",
                    f"{1 - f.exposed_communication_us / f.communication_us:.0%}",
                    f"{f.per_step_ms(f.exposed_communication_us):.3f}",
                )
            ],
        )
    yield "<h2>Longest gaps</h2>" + _table(
        ("at ms#", "ms#", "cause", "what", "line"),
        [
            (
                f"{g.start / 1e3:.3f}",
                f"{g.length / 1e3:.3f}",
                g.cause,
                g.what,
                g.line or "",
            )
            for g in largest_gaps(f, 12)
        ],
    )


def _work(report: ProfileReport) -> Iterator[str]:
    f = report.figures
    if f.top_kernels:
        tiny = f.num_tiny / f.num_kernels
        yield (
            f"<h2>Kernels</h2><p>{f.num_launches / f.num_steps:.0f} launches and "
            f"{f.num_kernels / f.num_steps:.0f} kernels a step; {tiny:.0%} of these take less than "
            f"{TINY_US:.0f} µs. Casts are {f.of_kernels(f.cast_us):.1%} of their time.</p>"
        )
        yield _table(
            ("kernel", "kind", "tensor cores", "ms a step#", "share#", "count#"),
            [
                (
                    short(row.name),
                    row.kind,
                    row.tensor_cores if row.tensor_cores != "unknown" else "",
                    f"{f.per_step_ms(row.total_us):.3f}",
                    f"{f.of_kernels(row.total_us):.1%}",
                    f"{row.num / f.num_steps:.1f}",
                )
                for row in f.top_kernels[:15]
            ],
        )
    if f.top_operators:
        total = f.kernel_us or f.window_us or 1.0
        yield "<h2>Operators</h2>" + _table(
            ("operator", "ms a step#", "share#", "count#"),
            [
                (
                    row.name,
                    f"{f.per_step_ms(row.total_us):.3f}",
                    f"{row.total_us / total:.1%}",
                    f"{row.num / f.num_steps:.1f}",
                )
                for row in f.top_operators[:12]
            ],
        )
    if f.copies:
        yield "<h2>Copies</h2>" + _table(
            ("copy", "ms a step#", "hidden behind kernels#", "count#", "bytes a step#"),
            [
                (
                    c.name,
                    f"{f.per_step_ms(c.total_us):.3f}",
                    f"{c.hidden_us / c.total_us if c.total_us else 0.0:.0%}",
                    f"{c.num / f.num_steps:.1f}",
                    size(int(c.num_bytes / f.num_steps)),
                )
                for c in f.copies
            ],
        )
    if report.roofline:
        yield "<h2>Products and attention</h2>" + _table(
            (
                "operator",
                "type",
                "ms a step#",
                "TFLOP/s#",
                "FLOP a byte#",
                "limit",
                "of the limit#",
            ),
            [
                (
                    row.name,
                    row.dtype,
                    f"{f.per_step_ms(row.total_us):.3f}",
                    f"{row.flops / 1e12:.1f}" if row.is_known else "not known",
                    f"{row.intensity:.0f}" if row.is_known else "not known",
                    row.bound,
                    "" if math.isnan(row.of_ceiling) else f"{row.of_ceiling:.0%}",
                )
                for row in report.roofline
            ],
        )


def _memory(report: ProfileReport, use: MemoryUse) -> str:
    kept = f"; the allocator held {size(use.reserved_bytes)}" if use.reserved_bytes else ""
    keys = "".join(_key(MEMORY_COLOURS[name], name) for name in use.most)
    rows = [
        (
            name,
            size(use.at_peak.get(name, 0)),
            f"{use.at_peak.get(name, 0) / max(use.peak_bytes, 1):.0%}",
            size(use.least[name]),
            size(most),
        )
        for name, most in use.most.items()
    ]
    return (
        f"<h2>Memory of {escape(use.device)}</h2><p>At most {size(use.peak_bytes)}, in "
        f"{use.peak_phase}{kept}.</p>{areas_of(use, report.trace.steps)}<p>{keys}</p>"
        + _table(("what", "at the peak#", "of the peak#", "least#", "most#"), rows)
    )


def _key(colour: str, text: str) -> str:
    return f'<span class="key" style="background:{colour}"></span>{escape(text)}'


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; a column whose head ends in ``#`` holds numbers.

    One of which no row has anything, as of lines without lines, is left out.
    """
    rows = list(rows)
    shown = [i for i in range(len(head)) if i == 0 or any(row[i] for row in rows)]
    head, rows = [head[i] for i in shown], [[row[i] for i in shown] for row in rows]
    kinds = [_kind(name) for name in head]
    first = "".join(
        f"<th{' class=n' if kind == 'n' else ''}>{escape(name.rstrip('#'))}</th>"
        for name, kind in zip(head, kinds, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(
            f"<td class={kind}>{_path(cell) if kind == 'line' else escape(cell)}</td>"
            for cell, kind in zip(row, kinds, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    # Figures that stand far from their names are hard to follow.
    style = "" if len(kinds) - kinds.count("n") > 2 else " class=figures"
    return f'<div class="scroll"><table{style}><tr>{first}</tr>{body}</table></div>'


def _kind(head: str) -> str:
    if head.endswith("#"):
        return "n"
    return head if head in ("line", "fault", "type") else "name"


def _path(text: str) -> str:
    """Return a path that is broken between folders, and not within the number of its line."""
    return escape(text).replace("/", "/<wbr>")
