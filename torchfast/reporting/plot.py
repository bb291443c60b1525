"""Curves as an SVG, without a plotting library.

The file stands alone: no script, no font, no style sheet, so it shows in a README, a browser or
a pull request, on a card of its own that reads on a dark page too. Equal input gives equal bytes,
so a plot under version control changes only with its numbers.

A curve of a million points would be a file of tens of megabytes for 720 pixels. Each series is
cut into buckets of neighbouring points and keeps the lowest and the highest of each, so a spike
of one step stays visible; an average would hide it.
"""

import os
import re
import secrets
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, SupportsFloat
from xml.sax.saxutils import escape

from torchfast.reporting._axes import Axis, x_axis_of, y_axis_of
from torchfast.reporting.jsonl import checked_file_path

_WIDTH: Final = 720
_HEIGHT: Final = 440
_RIGHT: Final = 692
_BOTTOM: Final = 384
_MAX_POINTS: Final = 1000
_MAX_LEGEND_ROWS: Final = 4
# The palette of Okabe and Ito, told apart with any colour vision, less its yellow and black.
_COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#5f6670")
_DASHES: Final = ("", ' stroke-dasharray="7 4"', ' stroke-dasharray="2 3"')
_INK: Final = 'fill="#1f2328"'
_MUTED: Final = 'fill="#59636e"'
_FONT: Final = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
# Characters that XML 1.0 has no way to write, lone surrogates included.
_NOT_XML: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

_Point = tuple[float, float]


class _Frame(NamedTuple):
    """The rectangle of the plot, and what its sides mean."""

    left: float
    top: float
    x_axis: Axis
    y_axis: Axis

    def x(self, value: float) -> float:
        return self.left + (_RIGHT - self.left) * self.x_axis.part(value)

    def y(self, value: float) -> float:
        return _BOTTOM - (_BOTTOM - self.top) * self.y_axis.part(value)


def plot_lines(
    path: str | os.PathLike[str],
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    title: str = "",
    x_label: str = "step",
    y_label: str = "loss",
    log_y: bool = False,
) -> None:
    """Draw one line per series into an SVG file, with the last value in the legend.

    The file appears whole or not at all; parent folders are created. If no point at all can be
    drawn (a run that diverged at once), the plot is empty and its legend says why.

    Args:
        path: The file to write or replace.
        series: Points ``(x, y)`` by name, joined in the order given. A point that is not finite
            breaks the line; with `log_y` so does one that is not positive. Above 1000 points
            the lowest and the highest of each bucket are drawn.
        title: Above the plot; none if empty.
        x_label: Below the x axis.
        y_label: Beside the y axis.
        log_y: Make the y axis logarithmic.

    Raises:
        TypeError: An argument, a name or a number has the wrong type.
        ValueError: There is no series, a series is empty, a point is no pair, or `path` is a
            folder.
        OSError: The file cannot be written.

    Synchronizes: Never, unless a point holds a device tensor, whose value is read.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "loss.svg"
        >>> plot_lines(path, {"adamw": [(1, 4.1), (2, 3.2), (3, 2.9)]}, title="Training loss")
        >>> path.read_text().startswith("<svg")
        True
    """
    target = checked_file_path(path)
    for name, text in (("title", title), ("x_label", x_label), ("y_label", y_label)):
        if not isinstance(text, str):
            raise TypeError(f"{name}={text!r}: expected a str")
    lines = _checked(series)
    drawn = [point for line in lines.values() for point in line if _drawable(point, log_y)]
    x_axis = x_axis_of([x for x, _ in drawn])
    y_axis = y_axis_of([y for _, y in drawn], log_y)
    left = 48 + max(_text_width(label) for _, label in y_axis.ticks)
    heading = 58 if title else 32
    legend, legend_height = _legend(lines, left, heading)
    frame = _Frame(left, heading + legend_height, x_axis, y_axis)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" font-family="{_FONT}" font-size="12">',
        f"<title>{_escaped(title or f'{y_label} by {x_label}')}</title>",
        f'<rect x="0.5" y="0.5" width="{_WIDTH - 1}" height="{_HEIGHT - 1}" rx="8" '
        'fill="#ffffff" stroke="#d8dee4"/>',
        f'<text x="{left:.2f}" y="34" font-size="16" font-weight="600" {_INK}>'
        f"{_escaped(_shortened(title, 64))}</text>"
        if title
        else "",
        *legend,
        *_grid(frame, x_label, y_label),
    ]
    for index, (name, line) in enumerate(lines.items()):
        parts += _drawn_line(index, name, line, frame, log_y)
    _write_whole(target, "\n".join([*filter(None, parts), "</svg>", ""]).encode("utf-8"))


def _checked(series: Mapping[str, Sequence[tuple[float, float]]]) -> dict[str, list[_Point]]:
    if not isinstance(series, Mapping):
        raise TypeError(f"series={series!r}: expected a mapping from names to (x, y) pairs")
    if not series:
        raise ValueError("series is empty: expected at least one named sequence of (x, y) pairs")
    for name, points in series.items():
        if not isinstance(name, str):
            raise TypeError(f"series has the name {name!r}: expected a str")
        if len(points) == 0:  # not bool(): an array of pairs has none
            raise ValueError(f"series[{name!r}] is empty: expected at least one (x, y) pair")
    return {
        name: [_pair(point, f"series[{name!r}][{index}]") for index, point in enumerate(points)]
        for name, points in series.items()
    }


def _pair(point: tuple[float, float], where: str) -> _Point:
    try:
        x, y = point
        return _real(x), _real(y)
    except (TypeError, ValueError, OverflowError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{where}={point!r}: expected a pair of numbers (x, y)") from error


def _real(value: object) -> float:
    if isinstance(value, float):
        return value
    if not isinstance(value, SupportsFloat):  # text, which float() would parse, is none
        raise TypeError(f"{value!r} is not a number")
    return float(value)


def _drawable(point: _Point, log_y: bool) -> bool:
    # Beyond these bounds the distance of two points, or of two ticks, leaves the range of floats.
    x, y = point
    return abs(x) <= 1e300 and abs(y) <= 1e300 and (y >= 1e-300 or not log_y)


def _legend(lines: Mapping[str, Sequence[_Point]], left: float, top: int) -> tuple[list[str], int]:
    """Return the legend, on one row if it fits and else in columns, and its height."""
    entries = [(_shortened(name, 28), f"{line[-1][1]:.4g}") for name, line in lines.items()]
    widths = [44 + _text_width(f"{label} {value}") for label, value in entries]
    places = [(left + sum(widths[:index]), top) for index in range(len(entries))]
    if left + sum(widths) - 18 > _RIGHT:
        columns = max(1, int((_RIGHT + 18 - left) / max(widths)))
        cells = range(columns * _MAX_LEGEND_ROWS)
        places = [(left + i % columns * max(widths), top + i // columns * 20) for i in cells]
    more = len(entries) - len(places)
    shown = len(places) - 1 if more > 0 else len(entries)  # the last place says how many more
    parts = [
        f'<path d="M{x:.2f} {y - 4}h18" {_stroke(index)}/>'
        f'<text x="{x + 24:.2f}" y="{y}" {_MUTED}>{_escaped(label)} '
        f'<tspan font-weight="600" {_INK}>{value}</tspan></text>'
        for index, ((label, value), (x, y)) in enumerate(
            zip(entries[:shown], places[:shown], strict=True)
        )
    ]
    if more > 0:
        parts.append(
            f'<text x="{places[-1][0]:.2f}" y="{places[-1][1]}" {_MUTED}>+ {more + 1} more</text>'
        )
    last = min(len(entries), len(places)) - 1
    return parts, places[last][1] - top + 18


def _grid(frame: _Frame, x_label: str, y_label: str) -> Iterator[str]:
    left, top = frame.left, frame.top
    for value, label in frame.x_axis.ticks:
        x = frame.x(value)
        yield f'<path d="M{x:.2f} {top:.2f}V{_BOTTOM}" stroke="#f0f2f5"/>'
        yield f'<text x="{x:.2f}" y="{_BOTTOM + 18}" text-anchor="middle" {_MUTED}>{label}</text>'
    for value, label in frame.y_axis.ticks:
        y = frame.y(value)
        yield f'<path d="M{left:.2f} {y:.2f}H{_RIGHT}" stroke="#e4e8ec"/>'
        yield f'<text x="{left - 8:.2f}" y="{y + 4:.2f}" text-anchor="end" {_MUTED}>{label}</text>'
    yield f'<path d="M{left:.2f} {_BOTTOM}H{_RIGHT}" stroke="#8c959f"/>'
    x, y = (left + _RIGHT) / 2, (top + _BOTTOM) / 2
    yield (
        f'<text x="{x:.2f}" y="{_BOTTOM + 40}" text-anchor="middle" {_INK}>'
        f"{_escaped(_shortened(x_label, 64))}</text>"
    )
    yield (
        f'<text transform="translate(24 {y:.2f}) rotate(-90)" text-anchor="middle" {_INK}>'
        f"{_escaped(_shortened(y_label, 36))}</text>"
    )


def _drawn_line(
    index: int, name: str, line: Sequence[_Point], frame: _Frame, log_y: bool
) -> Iterator[str]:
    path, dots = [], []
    for run in _runs(line, log_y):
        pixels = [(frame.x(x), frame.y(y)) for x, y in run]
        if len(pixels) == 1:
            dots.append(f'<circle cx="{pixels[0][0]:.2f}" cy="{pixels[0][1]:.2f}" r="3"/>')
        else:
            path.append("M" + "L".join(f"{x:.2f} {y:.2f}" for x, y in pixels))
    yield f"<g><title>{_escaped(name)}</title>"
    if path:
        yield f'<path d="{"".join(path)}" {_stroke(index)} stroke-linejoin="round"/>'
    if dots:
        yield f'<g fill="{_COLOURS[index % len(_COLOURS)]}">{"".join(dots)}</g>'
    yield "</g>"


def _runs(line: Sequence[_Point], log_y: bool) -> list[list[_Point]]:
    """Return what is drawn of a line, at most `_MAX_POINTS` points, cut where it breaks."""
    indices = [index for index, point in enumerate(line) if _drawable(point, log_y)]
    count = len(indices)
    kept: Sequence[int] = range(count)  # ranks among the drawable points
    if count > _MAX_POINTS:
        buckets = _MAX_POINTS // 2 - 1  # two points of each, and both ends of the line
        chosen = {0, count - 1}
        for bucket in range(buckets):
            ranks = range(bucket * count // buckets, (bucket + 1) * count // buckets)
            chosen.add(min(ranks, key=lambda rank: line[indices[rank]][1]))
            chosen.add(max(ranks, key=lambda rank: line[indices[rank]][1]))
        kept = sorted(chosen)
    runs: list[list[_Point]] = []
    previous = None
    for rank in kept:
        # Equal distances: every point between the two, thinned out or not, is drawable.
        joined = previous is not None and indices[rank] - indices[previous] == rank - previous
        if not joined:
            runs.append([])
        runs[-1].append(line[indices[rank]])
        previous = rank
    return runs


def _stroke(index: int) -> str:
    colour = _COLOURS[index % len(_COLOURS)]
    dash = _DASHES[index // len(_COLOURS) % len(_DASHES)]
    return f'fill="none" stroke="{colour}" stroke-width="1.75" stroke-opacity="0.85"{dash}'


def _text_width(text: str) -> float:
    """Estimate the width at 12 px, on the wide side, since the reader's font decides."""
    return sum(12 if unicodedata.east_asian_width(c) in "WF" else 7 for c in text)


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _escaped(text: str) -> str:
    return escape(_NOT_XML.sub("\ufffd", text))


def _write_whole(target: Path, content: bytes) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder: a rename is atomic only within one file system.
    temporary = target.parent / f".{secrets.token_hex(8)}.tmp"
    try:
        temporary.write_bytes(content)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
