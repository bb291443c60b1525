"""The tables of what recompute and offload save and cost."""

from __future__ import annotations

from typing import Any

from benchmarks import baseline_tables


def recompute(result: dict[str, Any]) -> list[str]:
    """Return a line for each model, mode and way to recompute."""
    lines = [
        "| model | step | recompute | ms | times none (quartiles) | planned "
        "| kept for the backward, MiB | peak, MiB | same bits |",
        "|---|---|---|---:|---:|---:|---:|---:|---|",
    ]
    for row in result["rows"]:
        low, high = row["cost_quartiles"]
        lines.append(
            f"| {row['name']} | {row['mode']} | {row['recompute'] or 'none'} "
            f"| {baseline_tables.figure(row['ms'])} | {row['cost']:.3f} ({low:.3f} to {high:.3f}) "
            f"| {row['planned_cost']:.3f} | {row['planned_bytes'] / 2**20:,.0f} "
            f"| {_mib(row['peak_bytes'])} | {_yes(row['same_bits'])} |"
        )
    return lines


def offload(result: dict[str, Any]) -> list[str]:
    """Return a line for each shape, mode and way to hold activations."""
    bus = result["bus_bytes_per_s"]
    lines = [
        "| blocks | step | activations | ms | times plain | peak, GB | sent, GB "
        f"| of the bus ({bus / 1e9:.0f} GB/s) | same bits |",
        "|---|---|---|---:|---:|---:|---:|---:|---|",
    ]
    for row in result["rows"]:
        shape = f"{row['blocks']} of width {row['width']:,}, {row['batch']} x {row['length']:,}"
        share = "" if row["bus_share"] is None else f"{row['bus_share']:.0%}"
        lines.append(
            f"| {shape} | {row['mode']} | {row['arm']} | {baseline_tables.figure(row['ms'])} "
            f"| {row['time_ratio']:.3f} | {row['peak_bytes'] / 1e9:.2f} "
            f"| {row['sent_bytes'] / 1e9:.2f} | {share} | {_yes(row['same_bits'])} |"
        )
    return lines


def _mib(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / 2**20:,.0f}"


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "**no**"
