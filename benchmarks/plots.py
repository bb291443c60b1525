"""The overview of the baseline as an SVG: one row a workload, time relative to the tuned loop.

Like the plots of ``torchfast.reporting`` the file stands alone on a white card, so that it reads on
a dark page too, its words are text, and equal figures give equal bytes. Of ``torch.compile``'s
modes and of the loops by hand the fastest is shown that trains; a method that does not train is
shown always, hollow and crossed.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from benchmarks.baseline_tables import relative, trains
from benchmarks.compare import REFERENCE

WIDTH, LEFT, RIGHT = 760, 176, 728
LEGEND_TOP, LEGEND_COLUMN, LEGEND_ROW, LEGEND_COLUMNS = 86, 182, 20, 4
LANE, ROW = 7, 50
FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
INK, MUTED = "#1f2328", "#59636e"
TITLE = "Time of a step, relative to the tuned plain loop"


class Family(NamedTuple):
    """Methods that share a mark. Of those that are alternatives only the best is shown."""

    label: str
    methods: str  # a regular expression of their whole names
    colour: str  # of Okabe and Ito's palette, told apart with any colour vision
    shape: str
    lane: int


FAMILIES = (
    Family("naive", "naive", "#5f6670", "circle", 0),
    Family("tuned", "tuned", "#1f2328", "circle", 1),
    Family("Lightning", "Lightning", "#e69f00", "circle", 2),
    Family("Accelerate", "Accelerate", "#e69f00", "square", 2),
    Family("transformers Trainer", "transformers Trainer", "#e69f00", "diamond", 2),
    Family("torch.compile, best mode", "compile .*", "#56b4e9", "circle", 3),
    Family("by hand, best", "by hand: .*", "#009e73", "circle", 4),
    Family("torchfast eager", "torchfast eager", "#d55e00", "circle", 5),
    Family("torchfast exact", r"torchfast exact( \+.*)?", "#d55e00", "square", 5),
    Family("fast, not compiled", "torchfast fast, not compiled", "#d55e00", "triangle", 5),
    Family(
        "torchfast fast", r"torchfast fast( \+.*|, (searched|unrolled))?", "#d55e00", "diamond", 5
    ),
)
NUM_LANES = 1 + max(family.lane for family in FAMILIES)


class Mark(NamedTuple):
    """A method on a workload."""

    method: str
    family: Family
    ratio: float
    ms: float
    trains: bool

    def __str__(self) -> str:
        """Return what the mark says."""
        broken = "" if self.trains else ", does not train"
        return f"{self.method}: {self.ratio:.2f} × {REFERENCE}, {self.ms:.3g} ms{broken}"


def baseline(result: dict[str, Any]) -> str:
    """Return the overview as the text of an SVG file."""
    rows = {name: marks_of(workload) for name, workload in result["workloads"].items()}
    rows = {name: marks for name, marks in rows.items() if marks}
    low, high = _range([mark.ratio for marks in rows.values() for mark in marks])
    num_legend_rows = math.ceil((len(FAMILIES) + 1) / LEGEND_COLUMNS)
    top = LEGEND_TOP + num_legend_rows * LEGEND_ROW
    bottom = top + ROW * len(rows)
    height = bottom + 60

    def x(ratio: float) -> float:
        return LEFT + (RIGHT - LEFT) * math.log(ratio / low) / math.log(high / low)

    described = [f"{name}: {'; '.join(map(str, marks))}." for name, marks in rows.items()]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="title desc" '
        f'font-family="{FONT}" font-size="12">',
        f'<title id="title">{TITLE}</title>',
        f'<desc id="desc">{escape(" ".join(described))}</desc>',
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8" '
        'fill="#ffffff" stroke="#d8dee4"/>',
        f'<text x="24" y="34" font-size="16" font-weight="600" fill="{INK}">{TITLE}</text>',
        f'<text x="24" y="54" fill="{MUTED}">Logarithmic; left is faster. '
        f"{escape(_source(result['machine']))}</text>",
        *_legend(),
        *_grid(low, high, x, top, bottom),
    ]
    for index, (name, marks) in enumerate(rows.items()):
        parts += _row(name, marks, x, top + ROW * index)
    return "\n".join([*parts, "</svg>", ""])


def marks_of(workload: dict[str, Any]) -> list[Mark]:
    """Return what is shown of a workload, in the order of the families."""
    found = []
    for family in FAMILIES:
        marks = [
            Mark(
                name,
                family,
                statistics.median(relative(method)),
                method["median_ms"],
                trains(method),
            )
            for name, method in workload["methods"].items()
            if re.fullmatch(family.methods, name) and method["status"] == "ran"
        ]
        best = sorted((mark for mark in marks if mark.trains), key=lambda mark: mark.ratio)[:1]
        found += [*(mark for mark in marks if not mark.trains), *best]
    return found


def _source(machine: dict[str, Any]) -> str:
    return f"{machine['gpu'] or 'CPU'}, torch {machine['torch']}"


def _range(ratios: list[float]) -> tuple[float, float]:
    """Return the ends of the axis: the data and 1, with some room."""
    return min([*ratios, 0.9]) / 1.08, max([*ratios, 1.1]) * 1.08


def _legend() -> Iterator[str]:
    entries = [(family, family.label, True) for family in FAMILIES]
    entries.append((FAMILIES[0]._replace(colour=MUTED), "does not train", False))
    for index, (family, label, solid) in enumerate(entries):
        x = 30 + index % LEGEND_COLUMNS * LEGEND_COLUMN
        y = LEGEND_TOP - 4 + index // LEGEND_COLUMNS * LEGEND_ROW
        yield _shape(family, x, y, solid)
        yield f'<text x="{x + 12}" y="{y + 4}" fill="{MUTED}">{escape(label)}</text>'


def _grid(low: float, high: float, x: Any, top: int, bottom: int) -> Iterator[str]:
    # Ticks close together where the range is narrow.
    digits = (1, 2, 5) if high / low > 30 else (1, 1.5, 2, 3, 5, 7)
    ladder = [float(f"{digit}e{exponent}") for exponent in range(-4, 4) for digit in digits]
    for tick in (tick for tick in ladder if low <= tick <= high):
        # The reference is the line that everything is seen against.
        stroke = 'stroke="#8c959f" stroke-width="1.5"' if tick == 1 else 'stroke="#e4e8ec"'
        yield f'<path d="M{x(tick):.2f} {top}V{bottom}" {stroke}/>'
        yield (
            f'<text x="{x(tick):.2f}" y="{bottom + 18}" text-anchor="middle" fill="{MUTED}">'
            f"{tick:g}</text>"
        )
    yield (
        f'<text x="{(LEFT + RIGHT) / 2:.2f}" y="{bottom + 42}" text-anchor="middle" fill="{INK}">'
        f"time relative to {REFERENCE}</text>"
    )


def _row(name: str, marks: list[Mark], x: Any, top: int) -> Iterator[str]:
    middle = top + ROW / 2
    yield f"<g><title>{escape(name)}</title>"
    yield f'<path d="M24 {top}H{RIGHT}" stroke="#f0f2f5"/>'
    yield f'<text x="24" y="{middle + 4:g}" fill="{INK}">{escape(name)}</text>'
    for mark in marks:
        y = middle + LANE * (mark.family.lane - (NUM_LANES - 1) / 2)
        shape = _shape(mark.family, x(mark.ratio), y, mark.trains)
        yield f"<g><title>{escape(str(mark))}</title>{shape}</g>"
    yield "</g>"


def _shape(family: Family, x: float, y: float, solid: bool) -> str:
    """Return a mark, hollow and crossed if it is not solid."""
    outlines = {
        "circle": "m-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z",
        "square": "m-3.5 -3.5h7v7h-7z",
        "diamond": "m0 -4.8l4.8 4.8l-4.8 4.8l-4.8 -4.8z",
        "triangle": "m0 -4.6l4.6 8h-9.2z",
    }
    place = f"M{x:.2f} {y:.2f}"
    if solid:
        paint = f'fill="{family.colour}" fill-opacity="0.85" stroke="#ffffff" stroke-width="0.75"'
        return f'<path d="{place}{outlines[family.shape]}" {paint}/>'
    cross = f"{place}m-4 -4l8 8m0 -8l-8 8"
    paint = f'fill="none" stroke="{family.colour}" stroke-width="1.5"'
    return f'<path d="{place}{outlines[family.shape]}{cross}" {paint}/>'
