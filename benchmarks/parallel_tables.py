"""The tables of training on several GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.baseline_tables import figure

_BY_HAND, _NO_GRAPH = "graph by hand", "no graph by hand"
_HEAD = (
    "| workload | arm | ms | times the graph by hand | gain over no graph | items a second "
    "| scaling | peak, GB |",
    "|---|---|---:|---:|---:|---:|---:|---:|",
)


def many_gpus(result: dict[str, Any]) -> list[str]:
    """Return a line for each workload and arm: the step, beside the loops by hand."""
    rows = list(_of(result, "times"))
    found = {(row["workload"], row["arm"]): row for row in rows if "ms" in row}
    alone = {row["workload"]: row for row in found.values() if row["is_alone"]}
    lines = list(_HEAD)
    for row in rows:
        workload = row["workload"]
        if "failed" in row:
            lines.append(f"| {workload} | {row['arm']} | {_failure(row)} | | | | | |")
            continue
        ratio, slower = (_times(row, way, found) for way in (_BY_HAND, _NO_GRAPH))
        one, scaling = alone.get(workload), ""
        if one is not None and one is not row:
            scaling = f"{row['items_per_s'] / one['items_per_s'] / result['ranks']:.1%}"
        lines.append(
            f"| {workload} | {row['arm']} | {figure(row['ms'])} "
            f"| {'' if ratio is None else f'{ratio:.3f}'} "
            f"| {'' if slower is None else f'{1 / slower:.2f} times'} "
            f"| {row['items_per_s']:,.0f} | {scaling} "
            f"| {'' if row['peak_gb'] is None else format(row['peak_gb'], '.2f')} |"
        )
    return lines


def exact(result: dict[str, Any]) -> list[str]:
    """Return a line for each arm that was trained captured and as it is."""
    lines = ["| workload | arm | steps | of them replays | bits |", "|---|---|---:|---:|---|"]
    for row in _of(result, "exact"):
        start = f"| {row['workload']} | {row['arm']} |"
        if "failed" in row:
            lines.append(f"{start} | | {_failure(row)} |")
            continue
        bits = f"the same in {row['tensors']:,} tensors of each rank"
        if not row["same_bits"]:
            bits = f"other: {', '.join(row['differs'])}"
        lines.append(f"{start} {row['steps']} | {row['replays']} | {bits} |")
    return lines


def communication(result: dict[str, Any]) -> list[str]:
    """Return a line for each profiled arm and rank: how much of its communication is hidden."""
    lines = [
        "| workload | arm | rank | step, ms | collectives, ms | that nothing hides, ms | hidden |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in _of(result, "communication"):
        start = f"| {row['workload']} | {row['arm']} |"
        if "failed" in row:
            lines.append(f"{start}  | {_failure(row)} | | | |")
        for rank, found in enumerate(row.get("ranks", ())):
            talk, bare = found["communication_ms"], found["exposed_communication_ms"]
            hidden = "" if not talk else f"{1 - bare / talk:.1%}"
            lines.append(
                f"{start} {rank} | {figure(found['step_ms'])} "
                f"| {figure(talk)} | {figure(bare)} | {hidden} |"
            )
    return lines


def _of(result: dict[str, Any], group: str) -> Iterator[dict[str, Any]]:
    return (row for row in result["rows"] if row["group"] == group)


def _times(
    row: dict[str, Any], way: str, found: dict[tuple[str, str], dict[str, Any]]
) -> float | None:
    """Return how many times the step of another way of its kind a row's step takes."""
    other = found.get((row["workload"], f"{row['arm'].rpartition(', ')[0]}, {way}"))
    return None if other is None or other is row else float(row["ms"] / other["ms"])


def _failure(row: dict[str, Any]) -> str:
    reason = row["failed"].strip().splitlines()[-1].replace("|", "\\|")
    return f"failed: {reason}"
