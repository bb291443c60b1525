"""What a plan does for models that nobody here wrote: does it run, hold parity, and gain.

    PYTHONPATH=. python benchmarks/sweep.py [--plan fast] [--models REGEX] [--device cuda]
                                            [--jobs 2] [--limit-s 60] [--out FILE] [--fresh]
                                            [--any-commit]

Each model of ``benchmarks/outside_models.py`` runs in a process of its own, so that one that hangs
or crashes costs only itself. Against the plain eager step, under the same autocast:

- parity: nine updates with accumulation, clipping and a schedule; to the bit under ``eager`` and
  ``exact``, within a tolerance of fp32 under any other plan; and how many of them were replays of a
  graph. Where a plan in bf16 is not held, its control is measured as well: the plain loop in bf16;
- gain: blocks of steps of both, in random order within a pair, the device drained around each;
  the figure is the median over pairs of the ratio of their times. There are ten, and fifty where
  the ten say that the two are within a tenth of each other;
- how often a step makes the host wait, as torch's sync debug mode counts it (CUDA only);
- what was compiled: graphs, graph breaks, recompiles and the seconds that it took, each process
  with an empty cache. Parity's own compilation stands with parity.

With ``--jobs`` some models run at a time. They import, build, compile and are compared side by
side, each with its share of the cores, and whoever times is alone: it waits until the others are
between two parts, and they wait for it. What a model waits does not count against its limit.

``--out`` is rewritten after each model, which says of which run it is. The file has the seconds
that all runs into it took, also for what was measured again since; it has none where they took
different ``--jobs``. A second run skips what the file already holds for the same plan, device,
torch and commit; ``--fresh`` measures it again. ``--any-commit`` takes up a file with models of
other commits; with ``--models REGEX --fresh`` only those are measured again. Otherwise a file of
another commit, machine or settings is an error, or with ``--replace`` begun anew. Uncommitted
changes are not told apart.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from benchmarks import results
from benchmarks.outside_models import MODELS, OutsideModel
from benchmarks.sweep_model import NUM_PAIRS, Record, parse_plan
from benchmarks.sweep_processes import Order, run_all, start_server
from benchmarks.sweep_tables import apart, rounded


def sweep(
    models: Mapping[str, OutsideModel],
    plan: str = "fast",
    device: str = "cpu",
    *,
    limit_s: float = 60.0,
    out: Path | None = None,
    fresh: bool = False,
    replace: bool = False,
    any_commit: bool = False,
    jobs: int = 1,
) -> dict[str, Record]:
    """Measure every model, print a line for each, and keep the result file up to date.

    Returns:
        The records of ``models``; the file may hold those of other models as well.

    Raises:
        SystemExit: The file was measured by another commit, elsewhere or under other settings.
    """
    # Not the limit, by which no figure is another: who ran into it says so, and the command.
    settings = {"plan": plan, "device": device, "num_pairs": NUM_PAIRS}
    earlier = taken_up(out, settings, replace=replace, any_commit=any_commit) if out else None
    held: dict[str, Record] = earlier["models"] if earlier else {}
    run = results.this_run()
    started = time.monotonic()
    missing = {name: model for name, model in models.items() if fresh or name not in held}
    if missing:
        # Each model's compiler would otherwise start as many processes as there are cores.
        threads = max(1, len(os.sched_getaffinity(0)) // jobs) if jobs > 1 else None
        order = Order(plan, device, limit_s, threads)
        with closing(run_all(start_server(device), missing, order, jobs)) as records:
            for name, record in records:
                held[name] = {**record, "run": run}
                print(line(name, record), flush=True)
                if out:
                    in_order = {n: held[n] for n in (*MODELS, *held) if n in held}
                    took = duration(earlier, time.monotonic() - started, jobs)
                    results.write(out, {"settings": settings, **took, "models": in_order})
    return {name: held[name] for name in models}


def taken_up(
    out: Path, settings: Record, *, replace: bool, any_commit: bool
) -> dict[str, Any] | None:
    """Return what earlier runs left in a file, each model with its run; None to begin anew."""
    ignored = ["commit"] * any_commit
    earlier = results.resumed(out, {"settings": settings}, ignoring=ignored, replace=replace)
    if earlier is None:
        return None
    run = results.run_of(earlier)
    models = {name: {"run": run, **record} for name, record in earlier["models"].items()}
    others = {record["run"]["commit"] for record in models.values()} - {run["commit"]}
    if others and not any_commit:
        if replace:
            return None
        raise SystemExit(
            f"{out} has models of other commits too, {', '.join(sorted(others))}; go on with "
            "--any-commit, remove the file or write to another"
        )
    return {**earlier, "models": models}


def duration(earlier: Mapping[str, Any] | None, own_s: float, jobs: int) -> dict[str, float]:
    """Return the seconds that all runs into a file took, and the models at a time.

    Empty where an earlier run does not say, or had another number of models at a time: the sum
    would be the duration of nothing that can be run.
    """
    earlier = earlier or {"jobs": jobs, "elapsed_s": 0.0}
    if "elapsed_s" not in earlier or earlier["jobs"] != jobs:
        return {}
    return {"jobs": jobs, "elapsed_s": round(earlier["elapsed_s"] + own_s, 1)}


def line(name: str, record: Record) -> str:
    """Return a model's line of the printed table."""
    if record["status"] == "failed":
        return f"{name:28} failed: {record['reason']}"
    held = "held" if record["parity"]["held"] else "NOT held"
    low, high = record["gain_quartiles"]
    waits = record.get("host_waits")
    return (
        f"{name:28} parity {held}{apart(record['parity'])}  {record['form']:18}  "
        f"{record['eager_ms']:8.2f} -> {record['plan_ms']:8.2f} ms  "
        f"gain {record['gain']:.2f} [{low:.2f}, {high:.2f}]"
        + (f"  host waits {waits['eager']:g} -> {waits['plan']:g}" if waits else "")
        + compiled_part(record)
    )


def compiled_part(record: Record) -> str:
    """Return the end of a model's line: what was compiled."""
    found = record.get("compile")
    if not found:
        return ""
    counts = [f"{found['graphs']:g} graphs in {found['s']:.1f} s"]
    counts += [
        f"{found[name]:g} {name.replace('_', ' ')}"
        for name in ("graph_breaks", "recompiles")
        if found[name]
    ]
    return f"  {', '.join(counts)}"


def summary(records: Mapping[str, Record]) -> str:
    """Return the last line of the printed table."""
    ran = [record for record in records.values() if record["status"] == "ran"]
    text = f"ran {len(ran)} of {len(records)}"
    if ran:
        forms = [record["form"] for record in ran]
        text += (
            f"; parity held {sum(record['parity']['held'] for record in ran)}"
            f"{rounded(record['parity'] for record in ran)}"
            f"; median gain {statistics.median(record['gain'] for record in ran):.2f}; "
        )
        text += ", ".join(
            f"{kind} {sum(form.removesuffix(', update after') == kind for form in forms)}"
            for kind in ("captured, compiled", "captured", "compiled", "eager")
        )
    return text


def main() -> None:
    """Sweep, and print a summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", default="fast", help="a preset's name, or a plan as JSON")
    parser.add_argument("--models", default="", metavar="REGEX")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--jobs", type=int, help="models at a time; 2 on CUDA, else 1")
    parser.add_argument("--limit-s", type=float, default=60.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--replace", action="store_true", help="begin another commit's --out anew")
    parser.add_argument("--any-commit", action="store_true", help="go on with another's --out")
    args = parser.parse_args()
    parse_plan(args.plan)  # refuses an unknown one before anything starts
    chosen = {name: model for name, model in MODELS.items() if re.search(args.models, name)}
    # As Ctrl-C does: unwind, and kill the model that runs.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        records = sweep(
            chosen,
            args.plan,
            args.device,
            limit_s=args.limit_s,
            out=args.out,
            fresh=args.fresh,
            replace=args.replace,
            any_commit=args.any_commit,
            jobs=args.jobs or (2 if args.device.startswith("cuda") else 1),
        )
    except KeyboardInterrupt:
        sys.exit("interrupted; what was measured is kept")
    print(summary(records))


if __name__ == "__main__":
    main()
