"""The tables of float8 and low-bit state: what a step takes, and where the loss ends."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks import baseline_tables

CURVE_GROUPS = ("curves", "warm-up", "decay")  # whose rows are curves, not times


def steps(result: dict[str, Any]) -> list[str]:
    """Return a line for each method of each group that takes turns."""
    lines = [
        "| group | method | ms | tokens a second | times the first of the group (quartiles) "
        "| held, GiB | optimizer state, GiB | of the first one's |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    rows = {(row["group"], row["method"]): row for row in result["rows"]}
    for (group, method), row in rows.items():
        if group in CURVE_GROUPS:
            continue
        low, high = row["ratio_quartiles"]
        # What is by hand does not say.
        first = rows.get((group, row["reference"]), {}).get("state_bytes")
        own = row.get("state_bytes")
        state = "" if own is None else f"{own / 2**30:.2f}"
        part = f"{own / first:.1%}" if own and first else ""
        lines.append(
            f"| {group} | {method} | {baseline_tables.figure(row['ms'])} "
            f"| {row['items_per_s']:,.0f} | {row['ratio']:.3f} ({low:.3f} to {high:.3f}) "
            f"| {row['held_bytes'] / 2**30:.1f} | {state} | {part} |"
        )
    return lines


def curves(result: dict[str, Any], group: str = "curves") -> list[str]:
    """Return a line for each plan that trained on real text, beside bf16 as far as both go.

    What began with other weights is beside bf16 that began with the same; bf16 itself beside the
    first one, which is the noise.

    Args:
        result: What stands in the file.
        group: Of which rows: one of `CURVE_GROUPS`.
    """
    losses = {row["method"]: row["losses"] for row in result["rows"] if row["group"] == group}
    drifts: dict[str, list[float]] = {}
    whole: dict[str, float] = {}
    for name, own in losses.items():
        plan, *weights = name.split(_WEIGHTS)
        plain = losses.get(_PLAIN if plan == _PLAIN else _WEIGHTS.join([_PLAIN, *weights]))
        if plain:  # a run may have measured another plan alone
            drifts[name] = _drifts(own, plain)
            steps = min(len(own), len(plain))
            whole[name] = statistics.fmean(own[:steps]) / statistics.fmean(plain[:steps]) - 1
    noise = [abs(found[-1]) for name, found in drifts.items() if name.startswith(_OTHER)]
    lines = [
        "| plan | steps | loss, mean of the last tenth | from bf16 | furthest tenth | all steps "
        "| within the noise |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for name, own in losses.items():
        last = statistics.fmean(own[-max(1, len(own) // _PARTS) :])
        cells = [""] * 3
        if found := drifts.get(name):
            cells = [f"{part:+.2%}" for part in (found[-1], max(found, key=abs), whole[name])]
        is_judged = found and noise and not name.startswith(_PLAIN)
        cells.append(_yes(abs(found[-1]) <= max(noise)) if is_judged else "")
        lines.append(f"| {name} | {len(own)} | {last:.4f} | {' | '.join(cells)} |")
    if noise:
        detail = f"{max(noise):.2%}, with {len(noise)} of them"
        lines += ["", f"The noise is how far bf16 ends from itself with other weights: {detail}."]
    return lines


def choice(result: dict[str, Any]) -> list[str]:
    """Return a line for each model and step: what was chosen, and what that takes beside bf16."""
    lines = [
        "| model | a step's | step | choice | bf16, ms | ms | times bf16 (quartiles) "
        "| at most 2 % slower |",
        "|---|---:|---|---|---:|---:|---:|---|",
    ]
    for row in result["rows"]:
        low, high = row["ratio_quartiles"]
        lines.append(
            f"| {row['model']} | {row['items']:,} {row['unit']} | {row['step']} "
            f"| {row['choice'].partition(';')[0]} | {baseline_tables.figure(row['bf16_ms'])} "
            f"| {baseline_tables.figure(row['ms'])} | {row['ratio']:.3f} ({low:.3f} to {high:.3f}) "
            f"| {_yes(row['ratio'] <= 1.02)} |"
        )
    return lines


_WEIGHTS = ", weights"
_PLAIN, _OTHER = "bf16", f"bf16{_WEIGHTS}"
_PARTS = 10


def _drifts(own: list[float], plain: list[float]) -> list[float]:
    """Return how far a curve is from another, tenth by tenth of the steps that both have."""
    steps = min(len(own), len(plain))
    size = max(1, steps // _PARTS)
    starts = range(steps % size, steps, size)
    means = [[statistics.fmean(x[at : at + size]) for at in starts] for x in (own, plain)]
    return [mine / other - 1 for mine, other in zip(*means, strict=True)]


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "**no**"
