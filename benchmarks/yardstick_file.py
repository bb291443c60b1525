"""The result file of the yardstick, which grows workload by workload and method by method."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.methods import METHODS
from benchmarks.workloads import NAMES


def taken_up(out: Path | None, about: dict[str, Any], *, any_commit: bool) -> dict[str, Any]:
    """Return the workloads that stand in a file, and the runs that they are from."""
    ignoring = ["cold_start_limit_s", *["commit"] * any_commit]
    result = results.resumed(out, about, ignoring=ignoring) if out else None
    if result is None:
        return {"runs": [], "workloads": {}}
    return {key: result[key] for key in ("runs", "workloads")}


def write(
    out: Path,
    about: dict[str, Any],
    name: str,
    measured: dict[str, Any],
    asked: Collection[str],
    run: dict[str, str],
    *,
    any_commit: bool,
) -> None:
    """Write what a run measured of a workload into the file, as it is by now."""
    with results.alone(out):
        whole = taken_up(out, about, any_commit=any_commit)
        add(whole, name, measured, asked, run)
        results.write(out, {**about, **whole})


def add(
    whole: dict[str, Any],
    name: str,
    measured: dict[str, Any],
    asked: Collection[str],
    run: dict[str, str],
) -> None:
    """Put what this run measured of a workload beside what stands there, or in its place."""
    if run not in whole["runs"]:
        whole["runs"].append(run)
    own = measured["methods"]
    for method in own.values():
        method["run"] = whole["runs"].index(run)
    earlier = whole["workloads"].get(name, {}).get("methods", {})
    # An interrupted run has not measured all that it was asked for.
    mine = {method: own[method] for method in asked if method in own}
    every = {**own, **earlier, **mine}
    ordered = {method: every[method] for method in METHODS if method in every}
    whole["workloads"][name] = {**measured, "methods": ordered}
    whole["workloads"] = {n: whole["workloads"][n] for n in NAMES if n in whole["workloads"]}
