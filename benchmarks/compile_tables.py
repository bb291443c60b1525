"""The tables of what compiling costs and gives, and of the loss over a large vocabulary."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.baseline_tables import figure, why_not

Row = dict[str, Any]


def cold(result: Row) -> list[str]:
    """Return what a deep model's start and step take by blocks, whole and not compiled."""
    lines = [
        "| compiled | first step, s | a step, ms | graphs | compiling, s |",
        "|---|---:|---:|---:|---:|",
    ]
    lines += [_line(row, row["compiled"]) for row in _rows(result, "cold")]
    found = _summary(result, "cold")
    if "start" in found:
        verdict = "held" if found["held"] else "**not held**"
        lines += [
            "",
            f"By blocks starts in {found['start']:.1%} of the time of whole (a third is asked "
            f"for), and its steps take {found['slower']:+.2%} (2% is): {verdict}.",
        ]
    return lines


def warm(result: Row) -> list[str]:
    """Return what a second process takes that finds in a folder what the first has compiled."""
    lines = [
        "| process | first step, s | found in the cache | not found | folder, MB |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in _rows(result, "warm"):
        if row["status"] != "ran":
            lines.append(f"| {row['cache']} | {why_not(row)} |  |  |  |")
            continue
        counted = row.get("compile", {})
        hits, misses = (
            sum(counted.get(f"cache_{cache}_{what}", 0) for cache in ("autograd", "graph"))
            for what in ("hits", "misses")
        )
        lines.append(
            f"| {row['cache']} | {figure(row['first_step_s'])} | {hits} | {misses} "
            f"| {row['cache_bytes'] / 1e6:.1f} |"
        )
    found = _summary(result, "warm")
    if "start" in found:
        verdict = "held" if found["held"] else "**not held**"
        lines += [
            "",
            f"The second starts in {found['start']:.1%} of the time of the first (a tenth is asked "
            f"for), and {'misses nothing' if found['proved'] else '**misses some**'}: {verdict}.",
        ]
    return lines


def curves(result: Row) -> list[str]:
    """Return the last losses, compiled and not, by seed."""
    found = _summary(result, "curves")
    if "difference" not in found:
        return ["Not measured."]
    lines = ["| seed | compiled | not compiled |", "|---|---:|---:|"]
    pairs = zip(found["compiled"], found["not_compiled"], strict=True)
    lines += [f"| {seed} | {own:.4f} | {plain:.4f} |" for seed, (own, plain) in enumerate(pairs)]
    within = "within" if found["held"] else "**beyond**"
    return [
        *lines,
        "",
        f"The mean difference is {found['difference']:+.4f}, {within} what the seeds differ by "
        f"({found['noise']:.4f}).",
    ]


def workloads(result: Row) -> list[str]:
    """Return a line for each workload: what was compiled, and how long it took."""
    lines = [
        "| workload | first step, s | a step, ms | graphs | compiling, s | breaks | recompiles "
        "| form |",
        "|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for row in _rows(result, "workloads"):
        if row["status"] != "ran":
            lines.append(f"| {row['workload']} | {why_not(row)} |{' |' * 6}")
            continue
        counted = row.get("compile", {})
        breaks, again = (counted.get(name, 0) for name in ("graph_breaks", "recompiles"))
        lines.append(f"{_line(row, row['workload'])} {breaks} | {again} | {row['form']} |")
    return lines


def losses(result: Row) -> list[str]:
    """Return a line for each shape and method of the loss over a large vocabulary."""
    lines = [
        "| shape | tokens, width, vocabulary | method | ms (quartiles) | peak, MiB "
        "| first call, s | off fp32 |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    for row in result["rows"]:
        turns = row["turns_ms"]
        low, _, high = statistics.quantiles(turns, n=4) if len(turns) > 1 else turns * 3
        peak = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:,.0f}"
        lines.append(
            f"| {row['name']} | {row['tokens']:,}, {row['width']:,}, {row['vocabulary']:,} "
            f"| {row['method']} | {figure(row['ms'])} ({figure(low)} to {figure(high)}) | {peak} "
            f"| {row['first_s']:.1f} | {row['error']:.5f} |"
        )
    return lines


def compiled_update(result: Row) -> list[str]:
    """Return a line for each workload and optimizer, with what "auto" has found."""
    lines = [
        "| workload | optimizer | a step as it is, ms | update compiled | saved, ms "
        '| ``"auto"`` takes | weights off |',
        "|---|---|---:|---:|---:|---|---:|",
    ]
    trained: dict[tuple[str, str], dict[str, Row]] = {}
    for row in result["rows"]:
        trained.setdefault((row["workload"], row["optimizer"]), {})[row["update"]] = row
    for (workload, optimizer), ways in trained.items():
        plain, compiled, auto = (ways[update] for update in ("False", "True", "auto"))
        # Not by graphs: what was compiled to be measured, and left, counts as one.
        is_left = not auto["update_graphs"] or any("runs as it is" in t for t in auto["told"])
        taken = "as it is" if is_left else "compiled"
        lines.append(
            f"| {workload} | {optimizer} | {_with_quartiles(plain)} | {_with_quartiles(compiled)} "
            f"| {plain['ms'] - compiled['ms']:.2f} | {taken} | {compiled['apart']:.1e} |"
        )
    return lines


def _with_quartiles(row: Row) -> str:
    low, high = map(figure, row["quartiles_ms"])
    return f"{figure(row['ms'])} ({low} to {high})"


def _line(row: Row, name: str) -> str:
    if row["status"] != "ran":
        return f"| {name} | {why_not(row)} |  |  |  |"
    counted = row.get("compile", {})
    seconds = f"{counted['s']:.1f}" if "s" in counted else ""
    return (
        f"| {name} | {figure(row['first_step_s'])} | {figure(row.get('step_ms'))} "
        f"| {counted.get('graphs', 0)} | {seconds} |"
    )


def _rows(result: Row, section: str) -> list[Row]:
    rows: list[Row] = result["sections"].get(section, {}).get("rows", [])
    return rows


def _summary(result: Row, section: str) -> Row:
    found: Row = result["sections"].get(section, {}).get("summary", {})
    return found
