"""What memory looked like at a step, and how it moves over many of them.

All is read from counters that torch's allocator keeps on the host. Nothing waits for the device.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_WINDOWS = 4


@dataclass(frozen=True, kw_only=True)
class MemorySample:
    """The allocator's counters after a step.

    Attributes:
        step: After which step.
        allocated_bytes: In tensors, rounding included.
        reserved_bytes: Taken from the device.
        requested_bytes: What was asked for, without rounding.
        inactive_split_bytes: Free pieces of segments that are partly in use, which nobody but a
            tensor that fits can have. Segments that grow are not counted.
        peak_bytes: The most that tensors held at once.
        num_retries: How often everything free had to be returned before there was room.
        num_ooms: How often there was none then.
        pools: Reserved bytes by pool: ``"small"`` (tensors up to 1 MB), ``"large"``, and, from
            torch 2.13 on, how much of both is ``"private"``: of graphs and of `MemoryPool`.
    """

    step: int
    allocated_bytes: int
    reserved_bytes: int
    requested_bytes: int = 0
    inactive_split_bytes: int = 0
    peak_bytes: int = 0
    num_retries: int = 0
    num_ooms: int = 0
    pools: Mapping[str, int] | None = None

    @property
    def fragmentation(self) -> float:
        """The share of what is reserved that lies in pieces between tensors."""
        return self.inactive_split_bytes / self.reserved_bytes if self.reserved_bytes else 0.0

    @property
    def rounding(self) -> float:
        """The share of what is allocated that nobody asked for."""
        if not self.allocated_bytes or not self.requested_bytes:
            return 0.0
        return max(0.0, 1.0 - self.requested_bytes / self.allocated_bytes)


def sample_of(step: int, stats: Mapping[str, Any]) -> MemorySample:
    """Return the sample that ``torch.cuda.memory_stats_as_nested_dict()`` holds."""

    def number(name: str, pool: str = "all", kind: str = "current") -> int:
        return int(stats.get(name, {}).get(pool, {}).get(kind, 0))

    pools = {pool: number("reserved_bytes", f"{pool}_pool") for pool in ("small", "large")}
    private = stats.get("reserved_bytes_by_private_pools")
    if private is not None:
        pools["private"] = sum(int(held["all"]["current"]) for held in private.values())
    return MemorySample(
        step=step,
        allocated_bytes=number("allocated_bytes"),
        reserved_bytes=number("reserved_bytes"),
        requested_bytes=number("requested_bytes"),
        inactive_split_bytes=number("inactive_split_bytes"),
        peak_bytes=number("allocated_bytes", kind="peak"),
        num_retries=int(stats.get("num_alloc_retries", 0)),
        num_ooms=int(stats.get("num_ooms", 0)),
        pools=pools,
    )


@dataclass(frozen=True, kw_only=True)
class Trend:
    """How a value moves over steps.

    Attributes:
        slope: By least squares, a step.
        growth: The slope over all of the steps.
        rises: Whether it truly rises: the slope is far above what chance makes of the scatter, and
            the lowest value of each quarter is above that of the quarter before, by a good part of
            what the slope says. A value that jumps, or rises at first and then stays, does not,
            though it may go on by a few bytes a step.
    """

    slope: float
    growth: float
    rises: bool


# The slope over its standard error. Chance gives 6 once in a billion, if samples are independent.
_SURE = 6.0
# Of what a steady rise adds to a quarter; a leak may come in steps, or only in some of them.
_LEAST_SHARE = 0.25


def trend(steps: Sequence[int], values: Sequence[int]) -> Trend:
    """Return how ``values`` move over ``steps``; flat where there are too few."""
    number = len(values)
    if number < 2 * _WINDOWS or steps[-1] == steps[0]:
        return Trend(slope=0.0, growth=0.0, rises=False)
    middle, mean = math.fsum(steps) / number, math.fsum(values) / number
    spread = math.fsum((x - middle) ** 2 for x in steps)
    slope = math.fsum((x - middle) * (y - mean) for x, y in zip(steps, values, strict=True))
    slope /= spread
    scatter = math.fsum(
        (y - mean - slope * (x - middle)) ** 2 for x, y in zip(steps, values, strict=True)
    )
    error = math.sqrt(scatter / (number - 2) / spread)
    bounds = [number * i // _WINDOWS for i in range(_WINDOWS + 1)]
    floors = [min(values[a:b]) for a, b in itertools.pairwise(bounds)]
    growth = slope * (steps[-1] - steps[0])
    least = _LEAST_SHARE * growth / _WINDOWS
    climbs = all(b - a > max(0.0, least) for a, b in itertools.pairwise(floors))
    return Trend(slope=slope, growth=growth, rises=climbs and slope > _SURE * error)
