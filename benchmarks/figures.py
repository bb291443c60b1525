"""From what was measured to what is written: medians, spreads, and whether a method trains."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

# A method is broken if its loss is off the reference's by more than this part of the reference's
# fall.
PART_OF_FALL = 0.15
# Compared are medians of so many losses in a row: batches differ, and a model on the edge of
# stability (experts that are chosen) has single steps that differ by rounding alone, by half of the
# whole fall. Of all recorded methods none was off by more than 0.12 of it.
LOSSES_IN_A_ROW = 4
# What only a trace tells.
TRACED = ("device_ms", "host_syncs", "num_kernels", "num_launches")


def summary(
    warm_up: Mapping[str, Any],
    blocks: Sequence[Mapping[str, float]],
    reference_blocks: Sequence[Mapping[str, float]],
) -> dict[str, Any]:
    """Return the figures of a method that ran; those of `TRACED` are not known yet."""
    blocks_ms = [block["ms"] for block in blocks]
    median_ms = statistics.median(blocks_ms)
    losses = warm_up["losses"]
    return {
        "status": "ran",
        "blocks_ms": blocks_ms,
        "reference_blocks_ms": [block["ms"] for block in reference_blocks],
        "best_ms": [block["best_ms"] for block in blocks],
        "reference_best_ms": [block["best_ms"] for block in reference_blocks],
        "median_ms": median_ms,
        "spread": spread(blocks_ms),
        "host_ms": statistics.median(block["host_ms"] for block in blocks),
        "peak_bytes": warm_up["peak_bytes"],
        "reserved_bytes": warm_up["reserved_bytes"],
        "cold_start_s": max(warm_up["elapsed_s"] - len(losses) * median_ms / 1e3, 0.0),
        **dict.fromkeys(TRACED),
        "losses": losses,
    }


def spread(values: Sequence[float]) -> float:
    """Return the distance of the quartiles as a part of the median."""
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / middle


def trains(losses: Sequence[float], reference: Sequence[float]) -> bool:
    """Return whether losses follow a reference's, which falls, from the first steps to the last."""
    allowed = PART_OF_FALL * fall(reference)
    pairs = zip(smoothed(losses), smoothed(reference), strict=True)
    is_near = all(abs(a - b) < allowed for a, b in pairs)
    # A median may pass over a loss that is none.
    return is_near and all(math.isfinite(loss) for loss in losses)


def fall(losses: Sequence[float]) -> float:
    """Return by how much the loss fell."""
    return losses[0] - smoothed(losses)[-1]


def smoothed(losses: Sequence[float]) -> list[float]:
    """Return the median of each few losses in a row."""
    windows = (losses[i : i + LOSSES_IN_A_ROW] for i in range(len(losses) - LOSSES_IN_A_ROW + 1))
    return [statistics.median(window) for window in windows]


def judge(methods: Mapping[str, dict[str, Any]], reference: str) -> None:
    """Write into each method that ran whether it trains, by the losses of the reference.

    Where not even the reference learns, nothing is proved, and all are broken.
    """
    expected = methods[reference]["losses"]
    for figures in methods.values():
        if figures["status"] == "ran":
            figures["trains"] = trains(figures["losses"], expected)
