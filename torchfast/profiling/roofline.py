"""Operators against the ceilings of the device: how near to what is possible they are.

The shapes of an operator's inputs tell how many operations it has to do and how many bytes it has
to move at least. The quotient, its intensity, says which ceiling holds for it: with few operations
for each byte it is the memory's, with many the arithmetic's. What it reached, over that ceiling, is
how much of the device it used. Only operators whose cost follows from their shapes are placed:
products and attention in the forward pass, products in the backward pass.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, final

from torchfast.profiling.ceilings import Ceilings
from torchfast.profiling.figures import Figures
from torchfast.profiling.kernels import tensor_cores
from torchfast.profiling.trace import HostSpan

_BYTES: Final = {
    "float": 4,
    "double": 8,
    "c10::BFloat16": 2,
    "c10::Half": 2,
    "c10::Float8_e4m3fn": 1,
    "c10::Float8_e5m2": 1,
}
_ATTENTION: Final = "aten::_scaled_dot_product_"
_TYPES: Final = {"float": "float32", "c10::BFloat16": "bfloat16", "c10::Half": "float16"}

Shapes = Sequence[Sequence[int]]


@final
@dataclass(frozen=True, kw_only=True)
class RooflineRow:
    """An operator on inputs of one kind.

    Attributes:
        name: The operator and its shapes.
        dtype: The type that its arithmetic has: ``"tf32"`` where float32 ran on tensor cores.
        num: How many times it ran.
        total_us: The time of its kernels in all.
        flops: Operations a second that it reached.
        bytes_a_second: The bytes that it had to move at least, a second.
        intensity: Operations for each of those bytes.
        bound: ``"compute"`` or ``"bandwidth"``; empty without ceilings.
        of_ceiling: What it reached of the ceiling that holds for it; NaN without ceilings, and for
            attention, whose operations are counted as if nothing were masked.
    """

    name: str
    dtype: str
    num: int
    total_us: float
    flops: float
    bytes_a_second: float
    intensity: float
    bound: str = ""
    of_ceiling: float = math.nan

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        known = asdict(self)
        known["of_ceiling"] = None if math.isnan(self.of_ceiling) else self.of_ceiling
        return known


def roofline(figures: Figures, ceilings: Ceilings | None, most: int = 20) -> list[RooflineRow]:
    """Return the operators that took most time, against the ceilings if there are any."""
    times: dict[tuple[str, str], float] = defaultdict(float)
    calls: dict[tuple[str, str], set[tuple[str, float]]] = defaultdict(set)
    cost: dict[tuple[str, str], tuple[float, float]] = {}
    for each in figures.launched:
        if each.work.kind != "kernel":
            continue
        # The innermost operator with a known cost: aten::linear calls aten::addmm.
        for span in reversed(each.stack):
            if span.kind == "op" and (found := cost_of(span)) is not None:
                dtype = _TYPES.get(_first_type(span), _first_type(span))
                if dtype == "float32" and tensor_cores(each.work.name) == "yes":
                    dtype = "tf32"
                key = (_label(span), dtype)
                times[key] += each.work.end - each.work.start
                calls[key].add((span.thread, span.start))
                cost[key] = found
                break
    rows = [_row(key, times[key], len(calls[key]), cost[key], ceilings) for key in times]
    return sorted(rows, key=lambda row: -row.total_us)[:most]


def _row(
    key: tuple[str, str], us: float, num: int, cost: tuple[float, float], ceilings: Ceilings | None
) -> RooflineRow:
    seconds = max(us, 1e-3) / 1e6
    flops, moved = cost[0] * num / seconds, cost[1] * num / seconds
    intensity = cost[0] / max(cost[1], 1.0)
    bound, part = "", math.nan
    # How much of an attention its mask leaves out the shapes do not tell: a causal one does half.
    is_placed = not key[0].startswith(_ATTENTION)
    if ceilings is not None and key[1] in ceilings.flops and is_placed:
        by_memory = intensity * ceilings.bytes_a_second
        bound = "compute" if ceilings.flops[key[1]] < by_memory else "bandwidth"
        part = flops / min(ceilings.flops[key[1]], by_memory)
    return RooflineRow(
        name=key[0],
        dtype=key[1],
        num=num,
        total_us=us,
        flops=flops,
        bytes_a_second=moved,
        intensity=intensity,
        bound=bound,
        of_ceiling=part,
    )


def cost_of(span: HostSpan) -> tuple[float, float] | None:
    """Return operations, and bytes moved at least, of an operator whose shapes tell them.

    Example:
        >>> facts = {"Input Dims": [[2, 3], [3, 4]], "Input type": ["float", "float"]}
        >>> cost_of(HostSpan("aten::mm", "op", 0, 1, "1", facts))
        (48.0, 104.0)
    """
    facts: Mapping[str, Any] = span.facts or {}
    try:
        shapes = [[int(n) for n in s] for s in facts["Input Dims"] if _is_shape(s)]
        sizes = _numbers(span.name, shapes)
        if sizes is None:
            return None
        operations, elements = sizes
        return float(operations), float(elements * _BYTES.get(_first_type(span), 4))
    except (KeyError, TypeError, ValueError, IndexError, OverflowError):
        return None


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(n, int) for n in value)


def _numbers(name: str, shapes: Shapes) -> tuple[int, int] | None:
    """Return operations and elements read and written."""
    if name in ("aten::addmm", "aten::baddbmm"):
        shapes = shapes[-2:]  # before them stands the bias
    if name in ("aten::mm", "aten::addmm"):
        (m, k), (_, n) = shapes[0], shapes[1]
        return 2 * m * n * k, m * k + k * n + m * n
    if name in ("aten::bmm", "aten::baddbmm"):
        (b, m, k), (_, _, n) = shapes[0], shapes[1]
        return 2 * b * m * n * k, b * (m * k + k * n + m * n)
    if name.startswith(_ATTENTION) and "backward" not in name:
        (*batch, queries, width), (*_, keys, _) = shapes[0], shapes[1]
        b = math.prod(batch)
        return 4 * b * queries * keys * width, 2 * b * width * (queries + keys)
    return None


def _first_type(span: HostSpan) -> str:
    types = [t for t in (span.facts or {}).get("Input type", []) if t in _BYTES]
    return str(types[0]) if types else "float"


def _label(span: HostSpan) -> str:
    shapes = [s for s in (span.facts or {}).get("Input Dims", []) if _is_shape(s)]
    return f"{span.name} {' '.join('x'.join(map(str, s)) for s in shapes[:3])}"
