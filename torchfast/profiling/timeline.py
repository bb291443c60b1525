"""The timeline as an SVG: a lane for each stream, the phases as a band, idle time in red.

A step may have thousands of kernels, and a screen some thousand columns. Work that lies closer
together than a column is drawn as one bar, so that the drawing stays small and nothing that is
longer than a column is lost. What runs in a bar is told by its tooltip.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final
from xml.sax.saxutils import escape, quoteattr

from torchfast.profiling.intervals import Interval, union
from torchfast.profiling.kernels import short
from torchfast.profiling.projection import Launched

if TYPE_CHECKING:
    from torchfast.profiling.report import ProfileReport

_WIDTH: Final = 1120
_LEFT: Final = 110
_LANE: Final = 22
_GAP: Final = 6
_TOP: Final = 26
_TEXT: Final = 60  # what the text of a tick may take
# At most so many steps are drawn; one after another they look alike.
_STEPS: Final = 3
PHASE_COLOURS: Final = {
    "data_wait": "#e69f00",
    "h2d": "#56b4e9",
    "forward": "#0072b2",
    "backward": "#009e73",
    "communication": "#cc79a7",
    "update": "#8a63d2",
    "replay": "#0072b2",
    "d2h": "#5f6670",
}
IDLE_COLOUR: Final = "#d1242f"


def timeline_of(report: ProfileReport) -> str:
    """Return the drawing; an empty string without work of a device."""
    f = report.figures
    if not f.launched:
        return ""
    begin, end = _window(report)
    shown = [e for e in f.launched if e.work.end > begin and e.work.start < end]
    if not shown or end <= begin:
        return ""
    scale = _Scale(begin, end)
    lanes: dict[int, list[Launched]] = defaultdict(list)
    for each in shown:
        lanes[each.work.stream].append(each)
    parts: list[str] = []
    row = 0
    for label, bars in _rows(report, shown, lanes, scale):
        top = _TOP + row * (_LANE + _GAP)
        parts.append(
            f'<text x="{_LEFT - 8}" y="{top + 15}" text-anchor="end" class="label">'
            f"{escape(label)}</text>"
            f'<rect x="{_LEFT}" y="{top}" width="{_WIDTH - _LEFT}" height="{_LANE}" class="lane"/>'
        )
        parts += [
            f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{_LANE}" fill="{colour}">'
            f"<title>{escape(title)}</title></rect>"
            for x, width, colour, title in bars
        ]
        row += 1
    height = _TOP + row * (_LANE + _GAP) + 4
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" '
        f"aria-label={quoteattr('Timeline of the device: streams, phases and idle time')}>"
        + "".join(_ticks(scale, height))
        + "".join(parts)
        + "</svg>"
    )


Bar = tuple[float, float, str, str]


class _Scale:
    """Time to columns."""

    def __init__(self, begin: float, end: float) -> None:
        self.begin, self.end = begin, end
        self.column = (end - begin) / (_WIDTH - _LEFT)

    def x(self, time: float) -> float:
        inside = min(max(time, self.begin), self.end)
        return _LEFT + (inside - self.begin) / self.column


def _window(report: ProfileReport) -> Interval:
    """Return the stretch to draw: a few steps of the middle, by the work that they launched."""
    f, steps = report.figures, report.trace.steps
    whole = (f.busy[0][0], f.busy[-1][1])
    if len(steps) <= _STEPS:
        return whole
    first = (len(steps) - _STEPS) // 2
    starts = [
        next((e.work.start for e in f.launched if e.call and e.call.start >= s.start), None)
        for s in (steps[first], steps[first + _STEPS])
    ]
    begin, end = starts
    return (begin, end) if begin is not None and end is not None and end > begin else whole


def _rows(
    report: ProfileReport,
    shown: Sequence[Launched],
    lanes: dict[int, list[Launched]],
    scale: _Scale,
) -> Iterator[tuple[str, list[Bar]]]:
    yield "phases", _phase_bars(shown, scale)
    for stream in sorted(lanes, key=lambda s: -sum(e.work.end - e.work.start for e in lanes[s])):
        yield f"stream {stream}", _work_bars(lanes[stream], scale)
    yield "idle", _idle_bars(report, scale)


def _phase_bars(shown: Sequence[Launched], scale: _Scale) -> list[Bar]:
    """Return a bar for each stretch of one phase, idle time of less than a column included."""
    bars: list[tuple[float, float, str]] = []
    for each in shown:
        start, end, phase = each.work.start, each.work.end, each.phase
        if bars and bars[-1][2] == phase:
            bars[-1] = (bars[-1][0], max(end, bars[-1][1]), phase)
        elif end - start >= scale.column or not bars or start >= bars[-1][1]:
            bars.append((start, end, phase))
    return [
        (
            scale.x(start),
            max(0.5, scale.x(end) - scale.x(start)),
            PHASE_COLOURS[phase],
            f"{phase}: {(end - start) / 1e3:.3f} ms",
        )
        for start, end, phase in bars
    ]


def _work_bars(lane: Sequence[Launched], scale: _Scale) -> list[Bar]:
    bars: list[Bar] = []
    group: list[Launched] = []
    for each in [*lane, None]:
        near = (
            each is not None
            and bool(group)
            and each.phase == group[0].phase
            and each.work.start - group[-1].work.end < scale.column
            and (each.work.end - each.work.start < 2 * scale.column)
            and (group[-1].work.end - group[-1].work.start < 2 * scale.column)
        )
        if group and not near:
            start, end = group[0].work.start, group[-1].work.end
            name = short(group[0].work.name) if len(group) == 1 else f"{len(group)} pieces of work"
            title = f"{name}, {group[0].phase}, {end - start:.1f} us"
            colour = PHASE_COLOURS[group[0].phase]
            bars.append((scale.x(start), max(0.4, scale.x(end) - scale.x(start)), colour, title))
            group = []
        if each is not None:
            group.append(each)
    return bars


def _idle_bars(report: ProfileReport, scale: _Scale) -> list[Bar]:
    gaps = [g for g in report.figures.gaps if g.end > scale.begin and g.start < scale.end]
    long = [g for g in gaps if g.length >= scale.column]
    bars = [
        (
            scale.x(g.start),
            scale.x(g.end) - scale.x(g.start),
            IDLE_COLOUR,
            f"idle {g.length / 1e3:.3f} ms: {g.cause}{' ' + g.what if g.what else ''}"
            f"{' at ' + g.line if g.line else ''}",
        )
        for g in long
    ]
    # What is shorter than a column still colours the column it is in, faintly.
    small = union((g.start, g.start + scale.column / 2) for g in gaps if g.length < scale.column)
    bars += [
        (scale.x(a), max(0.4, scale.x(b) - scale.x(a)), f"{IDLE_COLOUR}66", "short gaps")
        for a, b in small
    ]
    return bars


def _ticks(scale: _Scale, height: float) -> Iterator[str]:
    span = scale.end - scale.begin
    step = 10 ** int(len(str(int(max(span, 1)))) - 1)
    while span / step < 5:
        step /= 2
    number = 0
    while number * step <= span:
        x = scale.x(scale.begin + number * step)
        yield (
            f'<line x1="{x:.1f}" y1="18" x2="{x:.1f}" y2="{height}" class="tick"/>'
            f'<text x="{x:.1f}" y="13" text-anchor="{_anchor(x)}" class="time">'
            f"{number * step / 1e3:g} ms</text>"
        )
        number += 1


def _anchor(x: float) -> str:
    """Return the side of a tick that its text stands on: not beyond the edge of the drawing."""
    return "start" if x < _WIDTH - _TEXT else "end"
