"""Operators against the ceilings of the device: how near to what is possible they are.

The shapes of an operator's inputs tell how many operations it has to do and how many bytes it has
to move at least. The quotient, its intensity, says which ceiling holds for it: with few operations
for each byte it is the memory's, with many the arithmetic's. What it reached, over that ceiling, is
how much of the device it used. Only operators whose cost follows from their inputs are placed:
products, convolutions and attention, forward and backward. Of the same kernels in the replay of a
CUDA graph, or made by torch.compile, the trace has no shapes: their time is told, and that the rest
is not known.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, final

from torchfast.profiling.ceilings import Ceilings
from torchfast.profiling.figures import Figures
from torchfast.profiling.kernels import ARITHMETIC, category, tensor_cores
from torchfast.profiling.operator_costs import ATTENTION, Cost, cost_of, first_type, is_shape
from torchfast.profiling.projection import Launched
from torchfast.profiling.trace import HostSpan

_TYPES: Final = {
    "float": "float32",
    "c10::BFloat16": "bfloat16",
    "c10::Half": "float16",
    "c10::Float8_e4m3fn": "float8_e4m3fn",
    "c10::Float8_e5m2": "float8_e5m2",
}


@final
@dataclass(frozen=True, kw_only=True)
class RooflineRow:
    """An operator on inputs of one kind.

    Attributes:
        name: The operator and its shapes.
        dtype: The type that its arithmetic has: ``"tf32"`` where float32 ran on tensor cores.
        num: How many times it ran; of what is not known, how many kernels.
        total_us: The time of its kernels in all.
        flops: Operations a second that it reached; NaN where the trace does not tell, as in the
            replay of a CUDA graph.
        bytes_a_second: The bytes that it had to move at least, a second; NaN likewise.
        intensity: Operations for each of those bytes; NaN likewise.
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
        return {
            name: None if isinstance(value, float) and math.isnan(value) else value
            for name, value in asdict(self).items()
        }

    @property
    def is_known(self) -> bool:
        """Whether the trace tells what it had to do."""
        return not math.isnan(self.flops)


def roofline(figures: Figures, ceilings: Ceilings | None, most: int = 20) -> list[RooflineRow]:
    """Return the operators that took most time, against the ceilings if there are any.

    Behind them stands the time of kernels of that kind of which nothing else is known.
    """
    unknown: dict[str, list[float]] = defaultdict(list)
    times: dict[tuple[str, str], float] = defaultdict(float)
    calls: dict[tuple[str, str], set[tuple[str, float]]] = defaultdict(set)
    cost: dict[tuple[str, str], Cost] = {}
    for each in figures.launched:
        if each.work.kind != "kernel":
            continue
        # The innermost operator with a known cost: aten::linear calls aten::addmm.
        for span in reversed(each.stack):
            if span.kind == "op" and (found := cost_of(span)) is not None:
                dtype = _TYPES.get(first_type(span), first_type(span))
                if dtype == "float32" and tensor_cores(each.work.name) == "yes":
                    dtype = "tf32"
                key = (_label(span), dtype)
                times[key] += each.work.end - each.work.start
                calls[key].add((span.thread, span.start))
                cost[key] = found
                break
        else:
            if category(each.work.name) in ARITHMETIC:
                unknown[_where(each)].append(each.work.end - each.work.start)
    rows = [_row(key, times[key], len(calls[key]), cost[key], ceilings) for key in times]
    rows = sorted(rows, key=lambda row: -row.total_us)[:most]
    return rows + [_unknown(name, times) for name, times in sorted(unknown.items())]


def _where(each: Launched) -> str:
    if each.phase == "replay":
        return "in replays of CUDA graphs"
    return "in compiled kernels" if each.work.name.startswith("triton") else "of other operators"


def _unknown(name: str, times: Sequence[float]) -> RooflineRow:
    return RooflineRow(
        name=name,
        dtype="",
        num=len(times),
        total_us=sum(times),
        flops=math.nan,
        bytes_a_second=math.nan,
        intensity=math.nan,
    )


def _row(
    key: tuple[str, str], us: float, num: int, cost: Cost, ceilings: Ceilings | None
) -> RooflineRow:
    seconds = max(us, 1e-3) / 1e6
    flops, moved = cost.operations * num / seconds, cost.num_bytes * num / seconds
    intensity = cost.operations / max(cost.num_bytes, 1.0)
    bound, part = "", math.nan
    # How much of an attention its mask leaves out the shapes do not tell: a causal one does half.
    is_placed = not key[0].startswith(ATTENTION)
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


def _label(span: HostSpan) -> str:
    shapes = [s for s in (span.facts or {}).get("Input Dims", []) if is_shape(s)]
    return f"{span.name} {' '.join('x'.join(map(str, s)) for s in shapes[:3])}"
