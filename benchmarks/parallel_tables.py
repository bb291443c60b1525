"""The tables of training on several GPUs."""

from __future__ import annotations

from typing import Any

from benchmarks.baseline_tables import figure

_BY_HAND = "graph by hand"
_HEAD = (
    "| workload | arm | ms | times the graph by hand | items a second | scaling | peak, GB |",
    "|---|---|---:|---:|---:|---:|---:|",
)


def many_gpus(result: dict[str, Any]) -> list[str]:
    """Return a line for each workload and arm: the step, beside the captured one by hand."""
    lines = list(_HEAD)
    for workload, rows in result["workloads"].items():
        by_hand = {_kind(r): r for r in rows if r["arm"].endswith(f", {_BY_HAND}") and "ms" in r}
        alone = next((r for r in rows if r["is_alone"] and "ms" in r), None)
        for row in rows:
            if "failed" in row:
                reason = row["failed"].strip().splitlines()[-1].replace("|", "\\|")
                lines.append(f"| {workload} | {row['arm']} | failed: {reason} | | | | |")
                continue
            bar = by_hand.get(_kind(row))
            ratio = "" if bar is None or bar is row else f"{row['ms'] / bar['ms']:.3f}"
            scaling = ""
            if alone is not None and row is not alone:
                scaling = f"{row['items_per_s'] / alone['items_per_s'] / result['ranks']:.1%}"
            peak = "" if row["peak_gb"] is None else f"{row['peak_gb']:.2f}"
            lines.append(
                f"| {workload} | {row['arm']} | {figure(row['ms'])} | {ratio} "
                f"| {row['items_per_s']:,.0f} | {scaling} | {peak} |"
            )
    return lines


def communication(result: dict[str, Any]) -> list[str]:
    """Return a line for each profiled arm and rank: how much of its communication is hidden."""
    lines = [
        "| workload | arm | rank | step, ms | collectives, ms | that nothing hides, ms | hidden |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for workload, rows in result["workloads"].items():
        for row in rows:
            for rank, found in enumerate(row.get("communication", ())):
                talk, bare = found["communication_ms"], found["exposed_communication_ms"]
                hidden = "" if not talk else f"{1 - bare / talk:.1%}"
                lines.append(
                    f"| {workload} | {row['arm']} | {rank} | {figure(found['step_ms'])} "
                    f"| {figure(talk)} | {figure(bare)} | {hidden} |"
                )
    return lines


def _kind(row: dict[str, Any]) -> str:
    return str(row["arm"]).rpartition(", ")[0]
