"""A setting of the ranks that is measured: all of them try the same, and take the same.

How much of the gradients is best reduced at a time, or how many blocks are best gathered ahead,
depends on the model, the GPUs and what lies between them. So each candidate is tried on the first
batch. Times differ between ranks, and so would the choices; what counts is the slowest rank's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch

from torchfast._core.rank_group import RankGroup

T = TypeVar("T")

ROUNDS = 3
RUNS = 3
# Replicas build their buckets anew behind the first run, and shards learn the order of the blocks.
WARM_UPS = 2
# What is not faster by this much is not worth leaving the usual value for.
LEAST_GAIN = 0.02


class Tuned(NamedTuple, Generic[T]):
    """A setting that was measured.

    Attributes:
        value: What was taken, on all ranks alike.
        times_ms: Of each candidate: the median of the slowest rank's times of a forward and
            backward.
    """

    value: T
    times_ms: dict[T, float]

    def __str__(self) -> str:
        times = ", ".join(f"{value} {ms:.2f}" for value, ms in self.times_ms.items())
        return f"{self.value} was measured the best (ms: {times})"


def tune(
    candidates: Sequence[T],
    use: Callable[[T], None],
    work: Callable[[], object],
    ranks: RankGroup,
    device: torch.device,
) -> Tuned[T]:
    """Return the candidate that is fastest on the slowest rank, and put it in force.

    Args:
        candidates: What to try, the usual value first: it is left only for a gain of 2 %.
        use: Puts a candidate in force.
        work: A forward and backward, collectives included.
        ranks: Who measures together.
        device: Where.

    Synchronizes: Often.
    """
    times: dict[T, list[float]] = {value: [] for value in candidates}
    for round_number in range(ROUNDS):
        for offset in range(len(candidates)):
            value = candidates[(round_number + offset) % len(candidates)]
            use(value)
            for _ in range(WARM_UPS):
                work()
            times[value] += [_timed(work, device) for _ in range(RUNS)]
    own = {value: statistics.median(found) for value, found in times.items()}
    of_ranks = ranks.gather(list(own.values()))
    slowest = dict(zip(candidates, map(max, zip(*of_ranks, strict=True)), strict=True))
    usual, best = candidates[0], min(candidates, key=slowest.__getitem__)
    if slowest[best] > slowest[usual] * (1 - LEAST_GAIN):
        best = usual
    use(best)
    return Tuned(best, slowest)


def _timed(work: Callable[[], object], device: torch.device) -> float:
    _wait(device)
    begin = time.perf_counter()
    work()
    _wait(device)
    return (time.perf_counter() - begin) * 1e3


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
