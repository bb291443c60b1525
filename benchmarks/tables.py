"""The tables and the plots of the documentation, made from the raw figures.

    PYTHONPATH=. python benchmarks/tables.py [--check]

Each table stands in README.md or a page of docs/ between ``<!-- figures: NAME -->`` and
``<!-- end -->`` and is rewritten from its file in benchmarks/results/. Where that was measured on
several cards, it is the file that was measured last, of the same day the one that `PREFERRED` has
first; where on none yet, the page keeps what it has, or says that nothing was measured. With
``--check`` nothing is written, and the exit status says whether a page or a plot differs from its
figures.
"""

from __future__ import annotations

import argparse
import json
import operator
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import (
    anchors,
    baseline_tables,
    below_bf16_tables,
    compile_tables,
    loader_tables,
    loader_timeline_plot,
    memory_tables,
    parallel_tables,
    plots,
    profiling_tables,
    results,
    sweep_tables,
)

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BASELINE = "baseline_CARD.json"
LOADER = "loader_CARD.json"
MANY_GPUS = "many_gpus_2xCARD.json"
COMPILE = "compile_cost_CARD.json"
# Whose file is taken where several cards have one of the same day: the first of these, or else of
# any, by name.
PREFERRED = ("h200", "h100")
PLOT = ROOT / "docs" / "_static" / "baseline.svg"
# Where the commands of a table's runs are listed, if not under it.
LISTED = {"baseline headline": "docs/benchmarks.md#all-workloads"}
BLOCK = re.compile(r"<!-- figures: ([\w -]+) -->\n.*?<!-- end -->", re.DOTALL)

Table = Callable[[dict[str, Any]], list[str]]


def baseline_plot(_result: dict[str, Any]) -> list[str]:
    """Return the line that shows the plot; the plot itself is another file."""
    return [f"![{plots.TITLE}, for every workload; the table has its figures](_static/{PLOT.name})"]


def main_job(result: dict[str, Any]) -> list[str]:
    """Return the table of the main job by number format."""
    summary = result["summary"]
    seeds = len(summary["fp32"]["differences"])
    lines = [
        "| format | held-out bits per byte | difference from fp32, mean of "
        f"{seeds} seeds | within the noise of a seed "
        f"({summary['seed_noise_bits_per_byte']:.4f}) |",
        "|---|---|---|---|",
    ]
    for fmt in ("fp32", "tf32", "bf16", "fp16"):
        row = summary[fmt]
        lines.append(
            f"| {fmt} | {row['mean']:.4f} | {row['mean_difference_from_fp32']:+.4f} | "
            f"{'yes' if row['within_noise'] else 'no'} |"
        )
    return lines


def branches(result: dict[str, Any]) -> list[str]:
    """Return the table of branches on side streams, a line for each set of experts and mode."""
    rows = result["rows"]
    counts = sorted({row["streams"] for row in rows})
    more = counts[1:]
    streams = " | ".join(f"{number} streams" for number in more)
    lines = [
        f"| experts, tokens, width | step | 1 stream, ms | {streams} "
        f"| graph's pool, {counts[0]} and {counts[-1]} streams | same bits |",
        f"|---|---|---:|{'---:|' * len(more)}---:|---|",
    ]
    kinds = dict.fromkeys((row["name"], row["mode"]) for row in rows)
    for name, mode in kinds:
        own = {r["streams"]: r for r in rows if (r["name"], r["mode"]) == (name, mode)}
        one, last = own[counts[0]], own[counts[-1]]
        gains = [f"{own[n]['gain']:.2f} times" for n in more]
        pools = [f"{row['pool_bytes'] / 2**20:,.0f} MiB" for row in (one, last) if mode == "graph"]
        same = "yes" if all(row["same_bits"] for row in own.values()) else "**no**"
        lines.append(
            f"| {one['experts']}, {one['tokens']:,}, {one['width']:,} | {mode} "
            f"| {baseline_tables.figure(one['ms'])} | {' | '.join(gains)} "
            f"| {' and '.join(pools)} | {same} |"
        )
    return lines


def checkpoint_cost(result: dict[str, Any]) -> list[str]:
    """Return the table of what checkpoints cost, a line for each figure that there is."""
    place, every = result["place"], result["settings"]["every"]
    found = {
        name: section["summary"]
        for name, section in result["sections"].items()
        if section.get("summary")
    }
    stall, cost, back = (found.get(name, {}) for name in ("stall", "throughput", "resume"))
    steps = [section["step_ms"] for section in result["sections"].values() if "step_ms" in section]
    lines = [
        f"A model of {result['num_parameters'] / 1e9:.2f} billion parameters with AdamW, plan "
        f"``{result['settings']['plan']}``; {place['file_system']}, which four threads write at "
        f"{baseline_tables.figure(place['write_gb_s'])} GB/s.",
        "",
        "| what | figure |",
        "|---|---|",
    ]
    if steps:
        lines.append(f"| a step | {baseline_tables.figure(steps[0])} ms |")
    if "running" in stall:
        running = stall["running"]
        low, high = (f"{pick(running['stalls_s']):.3f}" for pick in (min, max))
        lines += [
            f"| a checkpoint | {running['bytes'] / 1e9:.2f} GB |",
            f"| a save holds training up for | {running['stall_s']:.3f} s ({low} to {high}, "
            f"{running['saves']} saves) |",
            f"| and is on the disk after | {baseline_tables.figure(running['written_s'])} s |",
        ]
    for kind, what in (("first", "the first save"), ("blocking", "a blocking save")):
        if kind in stall:
            lines.append(f"| {what} holds it up for | {stall[kind]['stall_s']:.2f} s |")
    if "cost" in cost:
        low, high = cost["quartiles"]
        lines.append(
            f"| {every} steps with a checkpoint take longer by | {cost['cost']:.2%} "
            f"({low:.2%} to {high:.2%}, {cost['pairs']} pairs) |"
        )
    if "large" in back:
        large = back["large"]
        same = "the same bits" if large["same"] else "**other bits**"
        lines += [
            f"| loading it | {baseline_tables.figure(large['load_s'])} s |",
            f"| the next {large['steps']} steps | {same} |",
        ]
    if back.get("cuts"):
        lines.append(
            f"| a small model, cut at each step | {back['same']} of {back['cuts']} runs to the "
            f"bit; {back['live_graph']} cut between replays, {back['twice']} twice in an epoch |"
        )
    return lines


# The sections of a file that a table is made from; all where none are named.
PARTS = {
    "compile cold": ("cold",),
    "compile warm": ("warm",),
    "compile curves": ("curves",),
    "compile workloads": ("workloads",),
    "many gpus": ("times",),
    "exact on ranks": ("exact",),
    "communication": ("communication",),
    "loader efficiency": ("eta",),
    "loader overlap": ("overlap",),
    "loader next": ("next", "launch"),
    "loader memory": ("memory",),
    "loader peers": ("peers",),
    "loader timeline": ("timeline",),
    "below bf16": ("float8", "vocabulary", "kernels", "state"),
    "below bf16 curves": ("curves",),
    "below bf16 warm-up": ("warm-up",),
    "below bf16 decay": ("decay",),
}

# Beside these, "baseline NAME" is the table of the workload NAME.
TABLES: dict[str, tuple[str, Table]] = {
    "baseline headline": (BASELINE, baseline_tables.headline),
    "baseline summary": (BASELINE, baseline_tables.summary),
    "baseline plot": (BASELINE, baseline_plot),
    "anchors": (BASELINE, baseline_tables.anchor_table),
    "branches": ("branches_CARD.json", branches),
    "loader efficiency": (LOADER, loader_tables.efficiency),
    "loader overlap": (LOADER, loader_tables.overlap),
    "loader next": (LOADER, loader_tables.next_cost),
    "loader memory": (LOADER, loader_tables.memory),
    "loader peers": (LOADER, loader_tables.peers),
    "loader timeline": (LOADER, loader_tables.timeline),
    "checkpoint cost": ("checkpoint_cost_CARD.json", checkpoint_cost),
    "searched": ("searched_CARD.json", baseline_tables.searched),
    "compile cold": (COMPILE, compile_tables.cold),
    "compile warm": (COMPILE, compile_tables.warm),
    "compile curves": (COMPILE, compile_tables.curves),
    "compile workloads": (COMPILE, compile_tables.workloads),
    "losses": ("losses_CARD.json", compile_tables.losses),
    "compiled update": ("compiled_update_CARD.json", compile_tables.compiled_update),
    "below bf16": ("below_bf16_CARD.json", below_bf16_tables.steps),
    "below bf16 curves": ("below_bf16_CARD.json", below_bf16_tables.curves),
    "below bf16 warm-up": (
        "below_bf16_CARD.json",
        partial(below_bf16_tables.curves, group="warm-up"),
    ),
    "below bf16 decay": ("below_bf16_CARD.json", partial(below_bf16_tables.curves, group="decay")),
    "float8 choice": ("float8_choice_CARD.json", below_bf16_tables.choice),
    "recompute": ("recompute_CARD.json", memory_tables.recompute),
    "offload": ("offload_CARD.json", memory_tables.offload),
    "many gpus": (MANY_GPUS, parallel_tables.many_gpus),
    "exact on ranks": (MANY_GPUS, parallel_tables.exact),
    "communication": (MANY_GPUS, parallel_tables.communication),
    "offload training": ("offload_training_CARD.json", memory_tables.offload_training),
    "offload update": ("offload_update_CARD.json", memory_tables.offload_update),
    "largest": ("largest_CARD.json", memory_tables.largest),
    "fragmentation": ("fragmentation_CARD.json", memory_tables.fragmentation),
    "out of memory": ("out_of_memory_CARD.json", memory_tables.out_of_memory),
    "watching": ("watching_CARD.json", profiling_tables.watching),
    "first replay": ("first_replay_CARD.json", profiling_tables.first_replay),
    "graph events": ("graph_events_CARD.json", profiling_tables.graph_events),
    "compare check": ("compare_check_CARD.json", profiling_tables.compare_check),
    "slow to fast": ("slow_to_fast_CARD.json", profiling_tables.slow_to_fast),
    "slow scripts": ("slow_scripts_CARD.json", profiling_tables.slow_scripts),
    "sweep": ("sweep_CARD.json", sweep_tables.sweep),
    "sweep exact": ("sweep_exact_CARD.json", sweep_tables.sweep),
    "sweep bf16": ("sweep_bf16_CARD.json", sweep_tables.sweep),
    "sweep captured": ("sweep_captured_CARD.json", sweep_tables.sweep),
    "main job": ("main_job_curves_CARD.json", main_job),
}


def table_named(name: str) -> tuple[str, Table]:
    """Return the file of a table, with the placeholder for the card, and its function."""
    if name in TABLES:
        return TABLES[name]
    if name.startswith("baseline "):
        workload = name.removeprefix("baseline ")
        return BASELINE, partial(baseline_tables.workload, name=workload)
    raise SystemExit(
        f"a page has the figures {name!r}; there are {', '.join(TABLES)} and baseline NAME, "
        "with the name of a workload"
    )


def files(template: str) -> dict[str, Path]:
    """Return the files of this name by card, the preferred card first."""
    before, after = map(re.escape, template.split(results.CARD))
    # No card has an underscore: sweep_exact_h200.json is no sweep_CARD.json.
    pattern = re.compile(f"{before}([a-z0-9-]+){after}")
    matches = ((pattern.fullmatch(path.name), path) for path in RESULTS.glob("*.json"))
    found = {match[1]: path for match, path in matches if match}
    first = [card for card in PREFERRED if card in found]
    return {card: found[card] for card in (*first, *sorted(found.keys() - set(first)))}


def source(name: str) -> tuple[Path, dict[str, Any]] | None:
    """Return the file that a table is made from and what it has; None if nothing was measured."""
    template, _ = table_named(name)
    found = list(files(template).items())
    if template == BASELINE:
        found = found[:1]  # these tables are read beside each other: all of them are of one card
    if name == "anchors":
        found = [(card, path) for card, path in found if card == anchors.CARD]
    measured = []
    for _, path in found:
        result = json.loads(path.read_text())
        if dates := [run["date"] for run in runs(result, name)]:  # or only other parts are there
            measured.append((max(dates), path, result))
    if not measured:
        return None
    _, path, result = max(measured, key=operator.itemgetter(0))  # the first of those of one day
    return path, result


def render(name: str, above: set[str] | None = None) -> str | None:
    """Return the block of this name, markers included; None if nothing was measured yet.

    Args:
        name: Of the table.
        above: The lists of runs that the page has so far; one that is among them is not repeated.
    """
    if (found := source(name)) is None:
        return None
    path, result = found
    machine = result["machine"]
    device = machine["gpu"] or "CPU"
    devices = f"{result['ranks']} of {device}" if "ranks" in result else f"one {device}"
    where, listed = f"{devices}, torch {machine['torch']}", LISTED.get(name)
    above = set() if above is None else above
    origin = told(runs(result, name), where, path.name, above, listed)
    _, table = table_named(name)
    body = "\n".join(table(result))
    return f"<!-- figures: {name} -->\n\n{body}\n\n{origin}\n\n<!-- end -->"


def told(
    parts: list[dict[str, str]], where: str, file: str, above: set[str], listed: str | None = None
) -> str:
    """Return where a table's figures are from; several commands fold away under it."""
    told_runs = list(
        dict.fromkeys(
            f"{run['date']}, commit {run['commit']}, by ``{run['command']}``" for run in parts
        )
    )
    raw = f"Raw figures in ``benchmarks/results/{file}``."
    if len(told_runs) == 1 and listed is None:
        return f"Measured on {where}: {told_runs[0]}. {raw}"
    *before, last = sorted({run["date"] for run in parts})
    days = f"{', '.join(before)} and {last}" if before else last
    summary = f"Measured on {where}, in {len(told_runs)} runs on {days}"
    if listed is not None:
        return f"{summary}, by the commands [listed here]({listed}). {raw}"
    lines = "\n".join(f"- {run}" for run in told_runs)
    if lines in above:
        return f"{summary}, those listed above. {raw}"
    above.add(lines)
    return f"{summary}. {raw}\n\n<details><summary>The runs</summary>\n\n{lines}\n\n</details>"


def runs(result: dict[str, Any], table: str) -> list[dict[str, str]]:
    """Return the runs that a table's figures are from; none if no part of it was measured."""
    if not {"workloads", "runs"} <= result.keys():
        whole = results.run_of(result)
        own = PARTS.get(table)
        if models := result.get("models"):
            return [model.get("run", whole) for model in models.values()]
        if rows := result.get("rows"):
            every = rows.values() if isinstance(rows, dict) else rows
            return [row.get("run", whole) for row in every if own is None or row["group"] in own]
        sections = [
            section
            for name, section in result.get("sections", {}).items()
            if own is None or name.partition(" again")[0] in own
        ]
        if not sections:
            return [whole] if own is None else []
        return [
            row.get("run", section.get("run", whole))
            for section in sections
            for row in (section, *section.get("rows", ()))
        ]
    workload = result["workloads"].get(table.removeprefix("baseline "))
    numbers = range(len(result["runs"]))
    used = {method["run"] for method in workload["methods"].values()} if workload else numbers
    return [result["runs"][number] for number in sorted(used)]


def rewritten(text: str) -> str:
    """Return a page with its tables made anew."""
    above: set[str] = set()

    def block(match: re.Match[str]) -> str:
        empty = f"<!-- figures: {match[1]} -->\n<!-- end -->"
        pending = f"<!-- figures: {match[1]} -->\n\n*Not measured yet.*\n\n<!-- end -->"
        return render(match[1], above) or (pending if match[0] == empty else match[0])

    return BLOCK.sub(block, text)


def pages() -> list[Path]:
    """Return the pages that may have tables."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in found if page.exists()]


def wanted() -> dict[Path, str]:
    """Return what every page, and every plot, should be."""
    texts = {page: rewritten(page.read_text()) for page in pages()}
    if (found := source("baseline plot")) is not None:
        texts[PLOT] = plots.baseline(found[1])
    if (found := source("loader timeline")) is not None:
        _, result = found
        if loader_tables.ran(loader_tables.section(result, "timeline")):
            picture = ROOT / "docs" / "_static" / loader_tables.PICTURE
            texts[picture] = loader_timeline_plot.drawn(result)
    return texts


def main() -> None:
    """Rewrite the pages and the plots, or check them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    stale = {
        path: text
        for path, text in wanted().items()
        if not path.exists() or path.read_text() != text
    }
    if not args.check:
        for path, text in stale.items():
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
    names = [str(path.relative_to(ROOT)) for path in stale]
    print("\n".join(names) or "everything is what its figures say")
    sys.exit(1 if args.check and stale else 0)


if __name__ == "__main__":
    main()
