"""Where an axis starts and ends, where its ticks are and what they are called.

Ticks are 1, 2 or 5 times a power of ten apart. The x axis ends where the data does, for a run
has no more steps than it has, and begins at 0 if the data begins close to it; the y axis ends on
ticks, so that a reader sees its range.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Axis(NamedTuple):
    """A range of numbers with labelled ticks."""

    low: float
    high: float
    ticks: list[tuple[float, str]]
    scale: Callable[[float], float]  # float, or log10

    def part(self, value: float) -> float:
        """Return where `value` lies, from 0 at the low end to 1 at the high one."""
        low, high = self.scale(self.low), self.scale(self.high)
        return (self.scale(value) - low) / (high - low)


def x_axis_of(values: Sequence[float]) -> Axis:
    """Return the axis of the steps, or of whatever the lines run along."""
    low, high = _widened(min(values, default=0.0), max(values, default=1.0))
    if 0 < low <= (high - low) * 0.05:  # steps that begin at 1, or at the first log step
        low = 0.0
    step = _nice_step(high - low, 7)
    if all(value.is_integer() for value in values):  # there is no step 1.5
        step = max(step, 1.0)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    ticks = [index * step for index in range(first, last + 1)]
    return Axis(low, high, _labelled(ticks, step), float)


def y_axis_of(values: Sequence[float], log_y: bool) -> Axis:
    """Return the axis of the values; all are positive if it is to be logarithmic."""
    low, high = min(values, default=0.1), max(values, default=1.0)
    if log_y and high / low >= 3:
        return _log_axis(low, high)
    # A range too short for 1, 2, 5 has even ticks on the logarithmic scale too: the lowest
    # multiple of their step is still positive.
    low, high = _widened(low, high)
    step = _nice_step(high - low, 6)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [index * step for index in range(first, last + 1)]
    return Axis(ticks[0], ticks[-1], _labelled(ticks, step), math.log10 if log_y else float)


def _log_axis(low: float, high: float) -> Axis:
    exponents = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    ladder = [float(f"{digit}e{exponent}") for exponent in exponents for digit in (1, 2, 5)]
    first = max(index for index, value in enumerate(ladder) if value <= low)
    last = min(index for index, value in enumerate(ladder) if value >= high)
    ticks = ladder[first : last + 1]
    if len(ticks) > 9:
        decades = [tick for tick in ticks if f"{tick:e}".startswith("1.")]
        ticks = decades[:: math.ceil(len(decades) / 10)]
    labelled = [label for tick in ticks for label in _labelled([tick], tick)]
    return Axis(ladder[first], ladder[last], labelled, math.log10)


def _widened(low: float, high: float) -> tuple[float, float]:
    """Return the range, made wider if it is too narrow to divide."""
    size = max(abs(low), abs(high))
    if high - low > max(size * 1e-9, 1e-290):
        return low, high
    margin = size * 0.1 if size > 1e-280 else 0.5
    return low - margin, high + margin


def _nice_step(span: float, most: int) -> float:
    """Return the least of 1, 2, 5 times a power of ten that cuts `span` into at most `most`."""
    least = span / most * (1 - 1e-9)
    exponent = math.floor(math.log10(least))
    return next(step for d in (1, 2, 5, 10, 20) if (step := float(f"{d}e{exponent}")) >= least)


def _labelled(ticks: Sequence[float], step: float) -> list[tuple[float, str]]:
    """Label ticks that lie `step` apart, in thousands or millions where that is shorter."""
    top = max(abs(tick) for tick in ticks)
    if top and not 1e-3 <= top < 1e9:
        digits = max(0, math.floor(math.log10(top)) - math.floor(math.log10(step)))
        return [(tick, _scientific(tick, digits)) for tick in ticks]
    unit, suffix = 1.0, ""
    if top >= 1e6 and step >= 1e4:
        unit, suffix = 1e6, "M"
    elif top >= 1e4 and step >= 1e2:
        unit, suffix = 1e3, "k"
    decimals = max(0, -math.floor(math.log10(step / unit) + 1e-9))
    return [(tick, f"{tick / unit:,.{decimals}f}{suffix}" if tick else "0") for tick in ticks]


def _scientific(value: float, digits: int) -> str:
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.{digits}e}".split("e")
    return f"{mantissa}e{int(exponent)}"
