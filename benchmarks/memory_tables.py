"""The tables of what recompute and offload save and cost."""

from __future__ import annotations

import operator
from typing import Any

from benchmarks import baseline_tables


def recompute(result: dict[str, Any]) -> list[str]:
    """Return a line for each model, mode and way to recompute."""
    lines = [
        "| model | step | recompute | ms | times none (quartiles) | planned "
        "| kept for the backward, MiB | planned | peak, MiB | same bits |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for row in result["rows"]:
        sizes = " | ".join(_mib(row[f"{what}_bytes"]) for what in ("kept", "planned", "peak"))
        planned = "" if row["planned_cost"] is None else f"{row['planned_cost']:.3f}"
        lines.append(
            f"| {row['name']} | {row['mode']} | {row['recompute'] or 'none'} "
            f"| {baseline_tables.figure(row['ms'])} | {_ratio(row, 'cost')} "
            f"| {planned} | {sizes} | {_yes(row['same_bits'])} |"
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


def offload_training(result: dict[str, Any]) -> list[str]:
    """Return a line for each set of levers under which the Llama was trained."""
    bus = result["bus_bytes_per_s"]
    lines = [
        f"{result['title']}; AdamW, gradients clipped.",
        "",
        "| step | levers | ms | times plain (quartiles) | peak, GB | of the plain peak | sent, GB "
        f"| of what the bus ({bus / 1e9:.0f} GB/s) allows | same bits, or losses apart by |",
        "|---|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for row in sorted(result["rows"], key=operator.itemgetter("mode")):  # eager first
        peak = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e9:.2f}"
        share, carried = (
            "" if row[key] is None else f"{row[key]:.0%}" for key in ("of_plain_peak", "of_allowed")
        )
        lines.append(
            f"| {row['mode']} | {row['arm']} | {baseline_tables.figure(row['ms'])} "
            f"| {_ratio(row, 'time_ratio')} | {peak} | {share} "
            f"| {row['sent_bytes'] / 1e9:.2f} | {carried} | {_alike(row)} |"
        )
    told = "Times plain are of the plain steps of the same run, of which the last run's stand here."
    return [*lines, "", told, *_left_out(result)]


def offload_update(result: dict[str, Any]) -> list[str]:
    """Return a line for each number of micro-batches and each place where the update is made."""
    lines = [
        f'{result["title"]}; AdamW. "Update" is clipping and update by themselves, once the '
        "backward is over.",
        "",
        "| micro-batches | update on | threads | ms a step | times the device (quartiles) "
        "| times itself without overlap (quartiles) "
        "| update, ms | peak, GB | begun in the backward, taken back | same bits as the first of "
        "its kind |",
        "|---:|---|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for row in result["rows"]:
        same = "" if row["same_bits"] is None else _yes(row["same_bits"])
        lines.append(
            f"| {row['accumulate']} | {row['arm']} | {row['threads'] or ''} "
            f"| {baseline_tables.figure(row['ms'])} "
            f"| {_ratio(row, 'time_ratio')} | {_ratio(row, 'waiting_ratio')} "
            f"| {baseline_tables.figure(row['update_ms'])} | {row['peak_bytes'] / 1e9:.2f} "
            f"| {', '.join(map(str, (row['counters'] or {}).values()))} | {same} |"
        )
    return lines + _left_out(result)


def fragmentation(result: dict[str, Any]) -> list[str]:
    """Return a line for each allocator: what it has reserved by the peak of tensors, by steps."""
    marks = result["rows"][0]["after_steps"]
    lines = [
        f"| after so many steps | {' | '.join(f'{mark:,}' for mark in marks)} |",
        f"|---|{'---:|' * len(marks)}",
    ]
    for row in result["rows"]:
        shares = " | ".join(f"{share:.2f}" for share in row["reserved_by_peak"])
        # A device that was full made the allocator give back what it could.
        full = f", device full {row['retries']} times" if row["retries"] else ""
        lines.append(f"| {row['arm']}{full} | {shares} |")
    peak = result["rows"][0]["peak_bytes"]
    return [*lines, "", f"At the end tensors have needed {peak / 1e9:.2f} GB at most."]


def out_of_memory(result: dict[str, Any]) -> list[str]:
    """Return a line for each stage in which memory ran out."""
    lines = [
        "| ran out in | in use, MB | lines in use differ from the allocator's figure by "
        "| from the figure read just before by | all lines differ from what is reserved by "
        "| account taken in, ms | next step trains |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for row in result["rows"]:
        errors = " | ".join(
            f"{abs(row[f'{what}_error']):.3%}" for what in ("in_use", "seen", "reserved")
        )
        lines.append(
            f"| {row['stage']} | {row['in_use_bytes'] / 1e6:.1f} | {errors} "
            f"| {baseline_tables.figure(row['ms'])} | {_yes(row['goes_on'])} |"
        )
    return lines


def largest(result: dict[str, Any]) -> list[str]:
    """Return a line for each set of levers: the largest batch, and the largest model."""
    rows = {(row["search"], row["levers"]): row for row in result["rows"]}
    limit_gb = result["settings"]["limit_gb"]
    limit = "" if limit_gb is None else f", of which {limit_gb:g} GB are used"
    what = []
    for search, text in (
        ("batch", "Batch: sequences of {context:,} tokens, {layers} layers of width {width:,}."),
        ("model", "Model: {batch} sequence of {context:,} tokens, layers of width {width:,}."),
    ):
        shapes = [row["shape"] for (kind, _), row in rows.items() if kind == search]
        what += [text.format(**shape) for shape in shapes[:1]]
    host_gb = min(row["host_bytes"] for row in rows.values()) / 1e9
    what.append(f"The host has {host_gb:,.0f} GB, for what waits there.")
    lines = [
        f"On one device{limit}. {' '.join(what)}",
        "",
        "| levers | largest batch | times plain | tokens/s | largest model | times plain "
        "| tokens/s |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for levers in dict.fromkeys(name for _, name in rows):
        cells = [levers]
        for search, key in (("batch", "largest"), ("model", "num_parameters")):
            cells += _largest(rows.get((search, levers)), rows.get((search, "plain")), key)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _largest(row: dict[str, Any] | None, plain: dict[str, Any] | None, key: str) -> list[str]:
    if row is None:
        return [""] * 3
    bound = "" if row["settled"] else "at least "
    if not row["largest"]:
        return ["nothing fits" if row["settled"] else "not found in time", "", ""]
    size = f"{row['largest']}"
    if key == "num_parameters":
        size = f"{row[key] / 1e9:.2f}B ({row['largest']} layers)"
    is_known = plain is not None and plain["largest"]
    times = f"{bound}{row[key] / plain[key]:.2f}" if is_known else ""
    return [f"{bound}{size}", times, f"{row['tokens_per_s']:,.0f}"]


def _left_out(result: dict[str, Any]) -> list[str]:
    """Return lines for what was asked for and not measured."""
    return [line for text in result.get("left_out", ()) for line in ("", f"Left out: {text}.")]


def _mib(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / 2**20:,.0f}"


def _alike(row: dict[str, Any]) -> str:
    if row["same_bits"] is None:
        return f"{row['loss_difference']:.2%}"
    return _yes(row["same_bits"])


def _ratio(row: dict[str, Any], key: str) -> str:
    """Return a ratio with its quartiles; nothing where there is none."""
    if row.get(key) is None:
        return ""
    low, high = row[f"{key}_quartiles"]
    return f"{row[key]:.3f} ({low:.3f} to {high:.3f})"


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "**no**"
