"""What a plan does for models that nobody here wrote: does it run, hold parity, and gain.

    PYTHONPATH=. python benchmarks/sweep.py [--plan fast] [--models REGEX] [--device cuda]
                                            [--jobs 2] [--limit-s 60] [--out FILE] [--fresh]

Each model of ``benchmarks/outside_models.py`` runs in a process of its own, so that one that hangs
or crashes costs only itself. Against the plain eager step, under the same autocast:

- parity: nine updates with accumulation, clipping and a schedule; to the bit under ``eager`` and
  ``exact``, within a tolerance of fp32 under any other plan; and how many of them were replays of a
  graph. Where a plan in bf16 is not held, its control is measured as well: the plain loop in bf16;
- gain: blocks of steps of both, in random order within a pair, the device drained around each;
  the figure is the median over pairs of the ratio of their times;
- how often a step makes the host wait, as torch's sync debug mode counts it (CUDA only);
- what was compiled: graphs, graph breaks, recompiles and the seconds that it took, each process
  with an empty cache. Parity's own compilation stands with parity.

With ``--jobs`` some models run at a time. They import, build, compile and are compared side by
side, and whoever times is alone: it waits until the others are between two parts, and they wait for
it. What a model waits does not count against its limit.

``--out`` is rewritten after each model, with the seconds that all runs into it took. A second run
skips what the file already holds for the same plan, device, torch and commit; ``--fresh`` measures
it again. A file of another commit, machine or settings is an error, or with ``--replace`` begun
anew. Uncommitted changes are not told apart.
"""

from __future__ import annotations

import argparse
import re
import signal
import statistics
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

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
    jobs: int = 1,
) -> dict[str, Record]:
    """Measure every model, print a line for each, and keep the result file up to date.

    Returns:
        The records of ``models``; the file may hold those of other models as well.

    Raises:
        SystemExit: The file was measured by another commit, elsewhere or under other settings.
    """
    settings = {"plan": plan, "device": device, "limit_s": limit_s, "num_pairs": NUM_PAIRS}
    expected = {"settings": settings}
    earlier = results.resumed(out, expected, replace=replace) if out else None
    held: dict[str, Record] = earlier["models"] if earlier else {}
    started = time.monotonic() - (earlier.get("elapsed_s", 0.0) if earlier and held else 0.0)
    missing = {name: model for name, model in models.items() if fresh or name not in held}
    if missing:
        order = Order(plan, device, limit_s)
        with closing(run_all(start_server(device), missing, order, jobs)) as records:
            for name, record in records:
                held[name] = record
                print(line(name, record), flush=True)
                if out:
                    in_order = {n: held[n] for n in (*MODELS, *held) if n in held}
                    elapsed_s = round(time.monotonic() - started, 1)
                    took = {"jobs": jobs, "elapsed_s": elapsed_s}
                    results.write(out, {"settings": settings, **took, "models": in_order})
    return {name: held[name] for name in models}


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
            jobs=args.jobs or (2 if args.device.startswith("cuda") else 1),
        )
    except KeyboardInterrupt:
        sys.exit("interrupted; what was measured is kept")
    print(summary(records))


if __name__ == "__main__":
    main()
