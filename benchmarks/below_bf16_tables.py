"""The tables of float8 and low-bit state: what a step takes, and where the loss ends."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks import baseline_tables


def steps(result: dict[str, Any]) -> list[str]:
    """Return a line for each method of each group that takes turns."""
    lines = [
        "| group | method | ms | tokens a second | times the first of the group (quartiles) "
        "| held, GiB | optimizer state, GiB |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in result["rows"]:
        if row["group"] == "curves":
            continue
        low, high = row["ratio_quartiles"]
        state = f"{row['state_bytes'] / 2**30:.2f}" if "state_bytes" in row else ""
        lines.append(
            f"| {row['group']} | {row['method']} | {baseline_tables.figure(row['ms'])} "
            f"| {row['items_per_s']:,.0f} | {row['ratio']:.3f} ({low:.3f} to {high:.3f}) "
            f"| {row['held_bytes'] / 2**30:.1f} | {state} |"
        )
    return lines


def curves(result: dict[str, Any]) -> list[str]:
    """Return a line for each plan that trained on real text."""
    rows = {row["method"]: row for row in result["rows"] if row["group"] == "curves"}
    ends = {name: _end(row["losses"]) for name, row in rows.items()}
    lines = [
        "| plan | steps | loss, mean of the last tenth | from bf16 |",
        "|---|---:|---:|---:|",
    ]
    for name, row in rows.items():
        # A run may have measured another plan alone.
        drift = f"{ends[name] / ends['bf16'] - 1:+.2%}" if "bf16" in ends else ""
        lines.append(f"| {name} | {len(row['losses'])} | {ends[name]:.4f} | {drift} |")
    return lines


def _end(losses: list[float]) -> float:
    return statistics.fmean(losses[-max(1, len(losses) // 10) :])
