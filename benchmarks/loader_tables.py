"""The tables of ``loader_CARD.json``, in Markdown: what was measured of the loader, row by row.

A row is judged only where it can be. Where the upstream supplies less than the step takes, the row
says "supply-bound" instead of a verdict; what had no time left, or failed, stays in its table with
the reason. The controls, which have to fail, are rows too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.baseline_tables import figure, why_not

Result = dict[str, Any]
Row = dict[str, Any]

PICTURE = "loader_timeline.svg"
NOT_RUN = "This part was not measured."
# A trace says whether copies overlap with a step only where the device has steps to do.
BUSY = 0.8
ENOUGH = 1.2  # as benchmarks/loader_eta.py has it
PEERS = ("by hand", "timm", "Accelerate", "Lightning Fabric")
STEPS = (
    "A step takes at least 1.4 times what the workers need to supply a batch that nobody pins. "
    "The others pin with torch's thread, which may need longer; in the row with the long step a "
    "step takes 1.4 times that too, and nobody is starved."
)
OURS = ("torchfast", "torchfast reuse", "torchfast, plain DataLoader", "torchfast, torch pins")


def efficiency(result: Result) -> list[str]:
    """Return how much of a step's speed is left, a line for each form of each ratio."""
    found = ran(section(result, "eta"))
    lines = []
    if found:
        row = found[0]
        judged = [row for row in found if row["verdict"] in ("held", "missed")]
        lines = [
            f"Batches of {row['bytes'] / 1e6:.1f} MB, {figure(row['transfer_ms'])} ms on the bus "
            f"({row['gb_s']:.1f} GB/s); {row['workers']} worker processes. Held: "
            f"{sum(row['verdict'] == 'held' for row in judged)} of {len(judged)} rows that can be "
            "judged.",
            "",
        ]
    head = (
        "| bus / step | depth | ``reuse`` | upstream | supply / demand | step, ms "
        "| with the loader, ms | η (quartiles) | other processes | verdict |",
        "|---:|---:|---|---|---:|---:|---:|---|---|---|",
    )
    return lines + table(result, "eta", head, lambda row: _efficiency_cells(result, row))


def _efficiency_cells(result: Result, row: Row) -> list[str]:
    start = [f"{row['ratio']:.0%}", str(row["depth"]), _flag(row["reuse"])]
    if row["status"] != "ran":
        return [*start, _upstream(row), "", "", "", "", "", why_not(row)]
    start[0] = f"{row['actual_ratio']:.0%}"
    low, high = row["eta_quartiles"]
    again = [f"{other['eta']:.3f}" for other in _repetitions(result, row)]
    verdicts = {"supply-bound": "supply-bound, not judged", "WRONG BYTES": "**wrong bytes**"}
    return [
        *start,
        _upstream(row),
        "in memory" if not row["supply_ms"] else figure(row["supply_over_demand"]),
        figure(row["resident_ms"]),
        figure(row["loader_ms"]),
        f"{row['eta']:.3f} ({low:.3f} to {high:.3f})",
        ", ".join(again),
        verdicts.get(row["verdict"], row["verdict"]),
    ]


def _repetitions(result: Result, row: Row) -> list[Row]:
    """Return the same row of processes that measured it again, where they got to it."""
    names = [name for name in result["sections"] if name.startswith("eta again ")]
    rows = [other for name in names for other in ran(result["sections"][name])]
    return [other for other in rows if _form(other) == _form(row)]


def _form(row: Row) -> tuple[Any, ...]:
    is_list = row.get("upstream") == "pinned list"
    form = ("ratio", "depth", "reuse", "recycled", "graphed")
    return (*(row[name] for name in form), is_list)


def _upstream(row: Row) -> str:
    """Return what the batches came from, whether in memory that is used again, and the launches."""
    recycled = ", recycled" if row["recycled"] else ""
    return f"{row.get('upstream', 'workers')}{recycled}{'' if row['graphed'] else ', one by one'}"


def overlap(result: Result) -> list[str]:
    """Return how much of the copies ran beside kernels, and whether anything made the host wait."""
    head = (
        "| batches | ``reuse`` | copies beside kernels | copies a step, ms | GB/s | pinned "
        "| the device computes | the loop waited | verdict |",
        "|---|---|---:|---|---:|---|---:|---|---|",
    )
    guard = (
        "| batches | ``reuse`` | steps | under the guard against synchronisation | verdict |",
        "|---|---|---:|---|---|",
    )

    def part(measure: str) -> Callable[[Row], bool]:
        return lambda row: row["measure"] == measure

    lines = table(result, "overlap", head, _overlap_cells, part("overlap"))
    if not section(result, "overlap")["rows"]:
        return lines
    return [*lines, "", *table(result, "overlap", guard, _guard_cells, part("no synchronisation"))]


def _overlap_cells(row: Row) -> list[str]:
    start = [row["upstream"], _flag(row["reuse"])]
    if row["status"] != "ran" or row["overlap"] is None:
        why = why_not(row) if row["status"] != "ran" else row.get("reason", "no copies were seen")
        return [*start, "", "", "", "", "", "", why]
    busy = row["kernel_ms_a_step"] / row["span_ms_a_step"]
    waits = row["host_waits_of_the_loop"]
    verdict = "held" if row["held"] else "missed"
    if row["upstream"].startswith("control"):
        verdict = "**the control overlaps**" if row["held"] else "as a control should be"
    elif busy < BUSY:
        verdict = "supply-bound, not judged"
    return [
        *start,
        f"{row['overlap']:.1%}",
        f"{row['copies_a_step']:.1f}, {figure(row['copy_ms_a_step'])}",
        figure(row["copy_gb_s"]),
        "all" if row["all_pinned"] else "**not all**",
        f"{busy:.0%}",
        ", ".join(f"{name} {count}x" for name, count in waits.items()) or "never",
        verdict,
    ]


def _guard_cells(row: Row) -> list[str]:
    start = [row["upstream"], _flag(row["reuse"])]
    if row["status"] != "ran":
        return [*start, "", "", why_not(row)]
    verdicts = {True: "as it should be", False: "**not held**", None: "nothing to guard on a CPU"}
    said = " ".join((row["error"] or "nothing waited").replace("|", "/").split())
    return [*start, str(row["steps"]), said, verdicts[row["held"]]]


def next_cost(result: Result) -> list[str]:
    """Return what a call of ``next()`` costs the host, and how a short step fares."""
    head = (
        "| batches from | ``reuse`` | before each call the loop | median, µs | 90 %, µs "
        "| target 50 µs |",
        "|---|---|---|---:|---:|---|",
    )
    launch = (
        "| batches from | how | supply / demand | step, ms | with the loader, ms | more, µs "
        "| η (quartiles) |",
        "|---|---|---|---:|---:|---:|---|",
    )
    lines = table(result, "next", head, _next_cells, lambda row: row["upstream"] != "pieces")
    for row in ran(section(result, "next")):
        if "pieces_us" in row:
            pieces = ", ".join(f"{name} {us:.1f}" for name, us in row["pieces_us"].items())
            lines += ["", f"What single calls take on that machine, in µs: {pieces}."]
    return [*lines, "", *table(result, "launch", launch, _launch_cells)]


def _next_cells(row: Row) -> list[str]:
    pause = {"sleep": "sleeps", "spin": "computes"}.get(row["pause"], row["pause"])
    start = [row["upstream"], _flag(row["reuse"]), pause]
    if row["status"] != "ran":
        return [*start, "", "", why_not(row)]
    held = {True: "held", False: "missed", None: "for comparison"}[row.get("held")]
    return [*start, f"{row['median_us']:.1f}", f"{row['p90_us']:.1f}", held]


def _launch_cells(row: Row) -> list[str]:
    start = [row["upstream"], row["how"]]
    if row["status"] != "ran":
        return [*start, "", "", "", "", why_not(row)]
    low, high = row["eta_quartiles"]
    supply = row["supply_over_demand"]
    bound = ", supply-bound" if supply is not None and supply < ENOUGH else ""
    return [
        *start,
        "in memory" if supply is None else f"{figure(supply)}{bound}",
        figure(row["resident_ms"]),
        figure(row["loader_ms"]),
        f"{row['more_us']:+z.1f}",
        f"{row['eta']:.3f} ({low:.3f} to {high:.3f})",
    ]


def memory(result: Result) -> list[str]:
    """Return what memory was after many epochs, and by how much it had grown since it settled."""
    head = (
        "| ``reuse`` | ``across_epochs`` | epochs | on the device, MB | pinned, MB | open files "
        "| threads | of the process, MB | verdict |",
        "|---|---|---:|---:|---:|---:|---:|---:|---|",
    )
    lines = table(result, "memory", head, _memory_cells)
    if not section(result, "memory")["rows"]:
        return lines
    return [*lines, "", "Each with its growth since the sixth epoch; some epochs broke off."]


def _memory_cells(row: Row) -> list[str]:
    start = [_flag(row["reuse"]), _flag(row["across_epochs"])]
    verdict = "as it should be" if row.get("held") else "**not held**"
    if row["control_keeps_batches"]:
        grows = "the control, which keeps its batches, grows"
        verdict = grows if row.get("held") else "**the control does not grow**"
    if row["status"] != "ran":
        return [*start, "", "", "", "", "", "", why_not(row)]
    last, grown = row["seen"][-1], row["grown"]
    names = ("reserved_bytes", "pinned_bytes", "open_files", "threads", "resident_set_bytes")
    return [
        *start,
        str(row["epochs"]),
        *(_grown(last[name], grown[name], name.endswith("bytes")) for name in names),
        verdict,
    ]


def _grown(value: int | None, by: int | None, is_bytes: bool) -> str:
    if value is None or by is None:
        return ""
    return f"{value / 1e6:,.1f} {by / 1e6:+,.1f}" if is_bytes else f"{value} {by:+d}"


def peers(result: Result) -> list[str]:
    """Return the time of a step with each loader, a line for each kind of batch."""
    methods = (*PEERS, *OURS)
    head = (
        f"| batches | MB | workers' supply, ms | resident | {' | '.join(methods)} "
        "| torchfast / best other (quartiles) |",
        f"|---|---:|---:|---:|{'---:|' * len(methods)}---|",
    )
    lines = table(result, "peers", head, _peer_cells)
    absent = [
        f"{name} on {row['kind']}: {' '.join(why.split())}"
        for row in ran(section(result, "peers"))
        for name, why in row["left_out"].items()
    ]
    if not section(result, "peers")["rows"]:
        return lines
    lines += ["", f"Milliseconds a step, the median of blocks that take turns. {STEPS}"]
    return [*lines, *([f"Left out: {'; '.join(absent)}."] if absent else [])]


def _peer_cells(row: Row) -> list[str]:
    methods = (*PEERS, *OURS)
    if row["status"] != "ran":
        return [row["kind"], "", "", "", *("" for _ in methods), why_not(row)]
    taken = {name: figure(method["median_ms"]) for name, method in row["methods"].items()}
    pinned = row["supply_pinned_ms"]
    supply = figure(row["supply_ms"]) + (f", pinned {figure(pinned)}" if pinned else "")
    ours = row["ratio_to_best_peer"].get("torchfast")
    ratio = "torchfast did not run"
    if ours is not None:
        low, high = ours["quartiles"]
        ratio = f"{ours['median']:.3f} ({low:.3f} to {high:.3f}) of {row['best_peer']}"
    return [
        row["kind"],
        figure(row["bytes"] / 1e6),
        supply,
        taken["resident"],
        *(taken.get(name, "–") for name in methods),
        ratio,
    ]


def timeline(result: Result) -> list[str]:
    """Return the line that shows the picture of the timeline; the picture is another file."""
    found = ran(section(result, "timeline"))
    if not found:
        return table(result, "timeline", ("| way |", "|---|"), lambda row: [why_not(row)])
    said = "; ".join(f"{row['title']}, the GPU computes {row['busy']:.0%}" for row in found)
    return [f"![Loading, copying and computing over time: {said}](../_static/{PICTURE})"]


# -- What all have in common -----------------------------------------------------------------------


def section(result: Result, name: str) -> Row:
    """Return a group of rows, an empty one if it was not measured."""
    found: Row = result["sections"].get(name, {"status": "left out", "rows": []})
    return found


def ran(group: Row) -> list[Row]:
    """Return the rows with figures."""
    return [row for row in group["rows"] if row["status"] == "ran"]


def table(
    result: Result,
    name: str,
    head: tuple[str, str],
    cells: Callable[[Row], list[str]],
    is_wanted: Callable[[Row], bool] = lambda _: True,
) -> list[str]:
    """Return a section's rows as a table, and why it ended before its time if it did."""
    group = section(result, name)
    return list(_table(group, head, cells, [row for row in group["rows"] if is_wanted(row)]))


def _table(
    group: Row, head: tuple[str, str], cells: Callable[[Row], list[str]], rows: list[Row]
) -> Iterator[str]:
    if rows:
        yield from head
        yield from (f"| {' | '.join(cells(row))} |" for row in rows)
    if group["status"] != "ran":
        if rows:
            yield ""
        yield f"{NOT_RUN if not rows else 'The rest was not measured.'} ({why_not(group)})"


def _flag(value: bool) -> str:
    return "yes" if value else "no"
