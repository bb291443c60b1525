"""What memory was taken for, over time, as stacked areas of an SVG and a table beneath."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Final

from torchfast._core.shell import size
from torchfast.profiling.memory import MemoryUse
from torchfast.profiling.trace import HostSpan

_WIDTH: Final = 1120
_LEFT: Final = 110
_TOP: Final = 18
_HEIGHT: Final = 200
_TICKS: Final = 4
# Names of steps that stand closer together than this are not written.
_TEXT: Final = 60
MEMORY_COLOURS: Final = {
    "other": "#5f6670",
    "parameters": "#0072b2",
    "optimizer state": "#8a63d2",
    "inputs": "#56b4e9",
    "gradients": "#009e73",
    "activations": "#e69f00",
    "temporary": "#cc79a7",
}


def areas_of(use: MemoryUse, steps: list[HostSpan]) -> str:
    """Return the drawing: time to the right with the steps marked, bytes upwards."""
    begin = min([use.times_us[0], *(step.start for step in steps[:1])])
    end = max([use.times_us[-1], *(step.end for step in steps[-1:])])
    column = max(end - begin, 1e-9) / (_WIDTH - _LEFT)
    xs = [f"{_LEFT + (time - begin) / column:.1f}" for time in use.times_us]
    below = [0] * len(xs)
    areas = []
    for name, values in use.by_category.items():
        above = [b + v for b, v in zip(below, values, strict=True)]
        line = _held(xs, [_y(b, use.peak_bytes) for b in above])
        back = _held(xs, [_y(b, use.peak_bytes) for b in below])
        title = f"{name}: from {size(use.least[name])} to {size(use.most[name])}"
        areas.append(
            f'<polygon points="{" ".join([*line, *reversed(back)])}" '
            f'fill="{MEMORY_COLOURS[name]}"><title>{escape(title)}</title></polygon>'
        )
        below = above
    marks = [_LEFT + (step.start - begin) / column for step in steps]
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_TOP + _HEIGHT + 8}" role="img" '
        f'aria-label="Memory over time">{"".join(_heights(use.peak_bytes))}{"".join(areas)}'
        f"{''.join(_steps(marks))}</svg>"
    )


def _held(xs: list[str], ys: list[float]) -> list[str]:
    """Return the points of a line that stays where it is until the next moment."""
    points = [f"{xs[0]},{ys[0]:.1f}"]
    for x, before, y in zip(xs[1:], ys, ys[1:], strict=False):
        if before != y:
            points += [f"{x},{before:.1f}", f"{x},{y:.1f}"]
    last = f"{xs[-1]},{ys[-1]:.1f}"
    return points if points[-1] == last else [*points, last]


def _y(num: float, peak: int) -> float:
    return _TOP + _HEIGHT * (1 - num / max(peak, 1))


def _heights(peak: int) -> Iterator[str]:
    for number in range(_TICKS + 1):
        num = peak * number / _TICKS
        y = _y(num, peak)
        yield (
            f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH}" y2="{y:.1f}" class="tick"/>'
            f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" class="label">'
            f"{escape(size(int(num)))}</text>"
        )


def _steps(marks: list[float]) -> Iterator[str]:
    written = float("-inf")
    for number, x in enumerate(marks, 1):
        if not _LEFT <= x <= _WIDTH:
            continue
        yield f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{_TOP + _HEIGHT}" class="tick"/>'
        if x - written >= _TEXT and x < _WIDTH - _TEXT:
            written = x
            yield f'<text x="{x:.1f}" y="13" class="time">step {number}</text>'
