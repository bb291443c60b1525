"""The picture of the timeline: two panels on one axis, each with loading, copying and computing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from xml.sax.saxutils import escape

from benchmarks.plots import FONT, INK, MUTED, WIDTH

LEFT, RIGHT, TOP = 132, 728, 84
LANE, BAND, GAP, PANEL_GAP = 13, 26, 8, 34
TITLE = "What runs at the same time"
IDLE = "#f3f5f7"
# Of Okabe and Ito's palette, told apart with any colour vision.
ROWS = (
    ("fetch", "load (CPU)", "#e69f00"),
    ("copy", "copy (bus)", "#0072b2"),
    ("compute", "compute (GPU)", "#009e73"),
)
TICKS = (1, 2, 5, 10, 20, 50, 100, 200, 500)
THINNEST = 0.6  # pixels: a short copy is to be seen too


def panels_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the panels in a file of figures, that of the timeline or that of all sections."""
    rows = result["panels"] if "panels" in result else result["sections"]["timeline"]["rows"]
    return [row for row in rows if row.get("status", "ran") == "ran"]


def drawn(result: dict[str, Any]) -> str:
    """Return the picture as the text of an SVG file."""
    panels = panels_of(result)
    if not panels:
        raise SystemExit("there is no panel to draw: nothing ran")
    length = max(panel["window_ms"] for panel in panels)
    bottom = TOP + sum(_height(panel) + PANEL_GAP for panel in panels) - PANEL_GAP
    height = bottom + 52
    described = " ".join(f"{p['title']}: the GPU computes {p['busy']:.0%}." for p in panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="title desc" '
        f'font-family="{FONT}" font-size="12">',
        f'<title id="title">{TITLE}</title>',
        f'<desc id="desc">{escape(described)}</desc>',
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8" '
        'fill="#ffffff" stroke="#d8dee4"/>',
        f'<text x="24" y="32" font-size="16" font-weight="600" fill="{INK}">{TITLE}</text>',
        f'<text x="24" y="51" fill="{MUTED}">{escape(_source(result))}</text>',
    ]
    top = TOP
    for panel in panels:
        parts += _panel(panel, top, length)
        top += _height(panel) + PANEL_GAP
    parts += _axis(length, bottom)
    return "\n".join([*parts, "</svg>", ""])


def _source(result: dict[str, Any]) -> str:
    machine = result.get("machine", {})
    return (
        f"The same job twice, measured: {machine.get('gpu') or 'CPU'}, torch {machine.get('torch')}"
    )


def _lanes(panel: dict[str, Any]) -> int:
    return 1 + max((lane for lane, _, _ in panel["fetch"]), default=0)


def _band(panel: dict[str, Any], name: str) -> int:
    """Return the height of a row: a lane for each process that loads."""
    return max(BAND, LANE * _lanes(panel)) if name == "fetch" else BAND


def _height(panel: dict[str, Any]) -> int:
    return sum(_band(panel, name) + GAP for name, _, _ in ROWS) - GAP


def _x(ms: float, length: float) -> float:
    return LEFT + (RIGHT - LEFT) * ms / length


def _panel(panel: dict[str, Any], top: int, length: float) -> Iterator[str]:
    yield f"<g><title>{escape(panel['title'])}</title>"
    yield (
        f'<text x="{LEFT}" y="{top - 8}" font-weight="600" fill="{INK}">'
        f"{escape(panel['title'])}</text>"
    )
    yield (
        f'<text x="{RIGHT}" y="{top - 8}" text-anchor="end" fill="{MUTED}">'
        f"the GPU computes {panel['busy']:.0%} of the time</text>"
    )
    width = _x(panel["window_ms"], length) - LEFT
    for name, label, colour in ROWS:
        band = _band(panel, name)
        yield f'<rect x="{LEFT}" y="{top}" width="{width:.2f}" height="{band}" fill="{IDLE}"/>'
        yield (
            f'<text x="{LEFT - 10}" y="{top + band / 2 + 4:g}" text-anchor="end" fill="{INK}">'
            f"{label}</text>"
        )
        lane_height = band / _lanes(panel) if name == "fetch" else band
        for span in panel[name]:
            lane, start, end = span if name == "fetch" else (0, *span)
            yield _bar(start, end, length, top + lane * lane_height, lane_height, colour)
        top += band + GAP
    yield "</g>"


def _bar(start: float, end: float, length: float, top: float, height: float, colour: str) -> str:
    left = _x(start, length)
    # A hair of the background between neighbours, so that each is seen.
    width = max(_x(end, length) - left - 0.8, THINNEST)
    return (
        f'<rect x="{left:.2f}" y="{top + 1:g}" width="{width:.2f}" height="{height - 2:g}" '
        f'fill="{colour}"><title>{start:.1f} to {end:.1f} ms</title></rect>'
    )


def _axis(length: float, bottom: int) -> Iterator[str]:
    step = next((tick for tick in TICKS if length / tick <= 11), TICKS[-1])
    for number in range(int(length // step) + 1):
        x = _x(number * step, length)
        yield f'<path d="M{x:.2f} {bottom + 4}v5" stroke="#8c959f"/>'
        yield (
            f'<text x="{x:.2f}" y="{bottom + 22}" text-anchor="middle" fill="{MUTED}">'
            f"{number * step}</text>"
        )
    yield (
        f'<text x="{(LEFT + RIGHT) / 2:g}" y="{bottom + 40}" text-anchor="middle" fill="{INK}">'
        "ms</text>"
    )
