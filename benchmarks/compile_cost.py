"""What compiling costs and what it gives: cold start, a warm cache, the loss, every workload.

    PYTHONPATH=. python benchmarks/compile_cost.py [--out FILE] [--sections cold ...]
    PYTHONPATH=. python benchmarks/compile_cost.py --device cpu --size smoke

Each training runs under the plan ``fast`` in a process of its own, whose compiler finds nothing in
its cache. What it imports, the weights and the data are there before the clock starts. So is what a
machine reads once: a first training, which nobody times, is to find what is on the disk alone,
and where there are no compiled files of torch's Python, as in some images, they are made first.

- **cold**: a GPT of 24 blocks, compiled by blocks, compiled whole and not compiled: the seconds
  until the first step is done, and the milliseconds of a step, taken in turns. By blocks has to
  start in a third of the time and to run within 2 percent.
- **warm**: the workload gpt2 with a folder for what is compiled, in two processes, one after the
  other. The second has to start in a tenth of the time of the first; that this came of the folder
  is proved by what torch counts: graphs that it found, and none that it did not find.
- **curves**: the losses of gpt-small, compiled and not, each from the same seeds, on data that does
  not repeat. The mean of the last ones has to agree within what two seeds differ by.
- **workloads**: for each workload of the yardstick the seconds, graphs, breaks and recompiles.

Figures are printed, and written, as they come. What a file of the same commit holds of other
sections, and of other workloads, stays there, so that it can be measured in parts; with
``--any-commit``, that of another one as well. Each row says which run it is from.
"""

from __future__ import annotations

import argparse
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import results
from benchmarks.compile_work import DEEP, Failed, Row, Training, Work
from benchmarks.python_files import compiled_python
from benchmarks.sweep_processes import start_server
from benchmarks.workloads import NAMES, Size, workload
from torchfast import CompileOptions, Plan

# Each section's part of the time.
SHARES = {"cold": 0.3, "warm": 0.15, "curves": 0.15, "workloads": 0.4}
MOST_OF_COLD_BY_BLOCKS = 1 / 3
MOST_SLOWER_BY_BLOCKS = 0.02
MOST_OF_COLD_WARM = 0.1
LAST_LOSSES = 50
ROUNDS = 10


@dataclass(frozen=True)
class Settings:
    """What is measured, and where.

    Attributes:
        size: ``"full"`` or ``"smoke"``.
        device: ``"cuda"`` or ``"cpu"``.
        steps: Steps of a loss curve.
        seeds: How many seeds there are of each curve.
        round_s: Seconds of each turn.
        backend: What compiles, but for the section warm, which is about the inductor.
    """

    size: Size
    device: str
    steps: int = 500
    seeds: int = 2
    round_s: float = 0.3
    backend: str = "inductor"

    def plan_with_cache(self, folder: Path) -> str:
        """Return the plan of the section warm."""
        if self.size == "full":
            return fast(CompileOptions(cache=str(folder)))
        # Of products of matrices alone the inductor makes no C++, which takes a minute to compile.
        products = CompileOptions(cache=str(folder), regions=("blocks.*.qkv",))
        return fast(products, precision="fp32")


class Bench:
    """The sections.

    Args:
        settings: What is measured.
        scratch: A folder of our own.
        workloads: Those of the section of that name.
    """

    def __init__(self, settings: Settings, scratch: Path, workloads: list[str]) -> None:
        self.settings = settings
        self.deadline = float("inf")
        self.workloads = workloads
        self._scratch = scratch
        self._context = start_server(settings.device)
        self._trainings: list[Training] = []

    def seconds_left(self) -> float:
        """Return what is left for this section."""
        return self.deadline - time.monotonic()

    def rows(self, section: str) -> Iterator[Row]:
        """Yield the rows of a section."""
        made: dict[str, Callable[[], Iterator[Row]]] = {
            "cold": self.cold,
            "warm": self.warm,
            "curves": self.curves,
            "workloads": self.each_workload,
        }
        return made[section]()

    def close(self) -> None:
        """End all trainings."""
        for training in self._trainings:
            training.stop()
        self._trainings.clear()

    def read_disk(self, limit_s: float) -> None:
        """Train a little, so that no section waits for libraries that are on the disk alone."""
        self.deadline = time.monotonic() + limit_s
        for name, plan in ((DEEP, fast(None)), ("mlp", self._plan())):
            row, _ = self._started({"disk": name}, name, plan)
            if row["status"] != "ran":
                print(f"slow: {name} did not read the disk beforehand: {row['reason'][:300]}")
            self.close()

    def cold(self) -> Iterator[Row]:
        """Yield what by blocks, whole and not compiled take."""
        plans = {
            "by blocks": self._plan(regions="blocks"),
            "not compiled": fast(None),
            "whole": self._plan(regions="whole"),
        }
        rows, trainings = {}, {}
        for name, plan in plans.items():
            rows[name], training = self._started({"compiled": name}, DEEP, plan)
            if training is None:
                yield rows[name]
            else:
                trainings[name] = training
        times = self._in_turns(trainings)
        for name, found in times.items():
            yield {**rows[name], **found}
        self.close()

    def warm(self) -> Iterator[Row]:
        """Yield what a first and a second process take that share a folder."""
        folder = self._scratch / "cache"
        plan = self.settings.plan_with_cache(folder)
        for name in ("cold", "warm"):
            row, _ = self._started({"cache": name}, "gpt2", plan)
            self.close()
            files = [file.stat().st_size for file in folder.glob("*.cache")]
            yield {**row, "cache_files": len(files), "cache_bytes": sum(files)}

    def curves(self) -> Iterator[Row]:
        """Yield the losses, compiled and not, of each seed."""
        for seed in range(self.settings.seeds):
            for is_compiled in (True, False):
                plan = self._plan() if is_compiled else fast(None)
                row, _ = self._started(
                    {"compiled": is_compiled, "seed": seed},
                    "gpt-small",
                    plan,
                    seed=seed,
                    num_losses=self.settings.steps,
                )
                self.close()
                yield row

    def each_workload(self) -> Iterator[Row]:
        """Yield what each workload takes."""
        for name in self.workloads:
            row, training = self._started({"workload": name}, name, self._plan())
            if training is not None:
                row |= self._in_turns({name: training})[name]
            self.close()
            yield row

    def _plan(self, **options: Any) -> str:
        return fast(CompileOptions(backend=self.settings.backend, **options))

    def _started(
        self, about: Row, name: str, plan: str, **details: int
    ) -> tuple[Row, Training | None]:
        """Return the row of a training's first steps, and the training if it is there."""
        left_s = self.seconds_left()
        if left_s <= 0:
            return {**about, "status": "left out", "reason": "no time was left"}, None
        size, device = self.settings.size, self.settings.device
        work = Work(workload=name, plan=plan, size=size, device=device, **details)
        training = Training(self._context, work, self._scratch)
        self._trainings.append(training)
        try:
            return {**about, "status": "ran", **training.first_steps(left_s)}, training
        except Failed as failure:
            training.stop()
            self._trainings.remove(training)
            return {**about, "status": "failed", "reason": str(failure)}, None

    def _in_turns(self, trainings: dict[str, Training]) -> dict[str, Row]:
        """Return the milliseconds of a step of each, taken in random order, round by round."""
        counts = {
            name: max(2, round(self.settings.round_s * 1e3 / training.step_ms(4)))
            for name, training in trainings.items()
        }
        rounds: dict[str, list[float]] = {name: [] for name in trainings}
        order = random.Random(0)
        for _ in range(ROUNDS):
            for name in order.sample(list(trainings), len(trainings)):
                rounds[name].append(trainings[name].step_ms(counts[name]))
        return {
            name: {"step_ms": statistics.median(found), "rounds_ms": found}
            for name, found in rounds.items()
        }


def fast(options: CompileOptions | None, **changes: Any) -> str:
    """Return the plan ``fast`` as JSON, compiled so or not at all."""
    return Plan.preset("fast").replace(compile=options or False, **changes).to_json()


# -- What the rows say -----------------------------------------------------------------------------


def summary(section: str, rows: list[Row]) -> Row:
    """Return the figures of a section that count."""
    ran = [row for row in rows if row["status"] == "ran"]
    made = {"cold": of_cold, "warm": of_warm, "curves": of_curves, "workloads": of_workloads}
    return {**made[section](ran), "missing": len(rows) - len(ran)}


def of_cold(rows: list[Row]) -> Row:
    """Return by blocks against whole."""
    by = {row["compiled"]: row for row in rows}
    if not {"by blocks", "whole"} <= set(by):
        return {}
    blocks, whole = by["by blocks"], by["whole"]
    pairs = zip(blocks["rounds_ms"], whole["rounds_ms"], strict=True)
    found = {
        "start": blocks["first_step_s"] / whole["first_step_s"],
        "slower": statistics.median(own / other for own, other in pairs) - 1,
    }
    return found | {
        "held": found["start"] <= MOST_OF_COLD_BY_BLOCKS
        and found["slower"] <= MOST_SLOWER_BY_BLOCKS
    }


def of_warm(rows: list[Row]) -> Row:
    """Return the second process against the first, and what it took from the folder."""
    by = {row["cache"]: row for row in rows}
    if set(by) != {"cold", "warm"}:
        return {}
    counted = by["warm"].get("compile", {})
    found = {
        "start": by["warm"]["first_step_s"] / by["cold"]["first_step_s"],
        "hits": counted.get("cache_autograd_hits", 0) + counted.get("cache_graph_hits", 0),
        "misses": counted.get("cache_autograd_misses", 0) + counted.get("cache_graph_misses", 0),
        "cache_bytes": by["cold"]["cache_bytes"],
    }
    proved = found["hits"] > 0 and found["misses"] == 0
    return found | {"proved": proved, "held": proved and found["start"] <= MOST_OF_COLD_WARM}


def of_curves(rows: list[Row]) -> Row:
    """Return how far the ends of the curves are apart, and how far those of two seeds are."""
    ends: dict[bool, dict[int, float]] = {True: {}, False: {}}
    for row in rows:
        ends[row["compiled"]][row["seed"]] = statistics.mean(row["losses"][-LAST_LOSSES:])
    seeds = sorted(set(ends[True]) & set(ends[False]))
    if len(seeds) < 2:
        return {}
    plain = [ends[False][seed] for seed in seeds]
    found: Row = {
        "compiled": [ends[True][seed] for seed in seeds],
        "not_compiled": plain,
        "difference": statistics.mean(ends[True][seed] - ends[False][seed] for seed in seeds),
        "noise": max(plain) - min(plain),
    }
    return found | {"held": abs(found["difference"]) <= found["noise"]}


def of_workloads(rows: list[Row]) -> Row:
    """Return the sums."""
    counts = [row.get("compile", {}) for row in rows]
    return {
        "ran": len(rows),
        "compile_s": sum(count.get("s", 0) for count in counts),
        **{
            name: sum(count.get(name, 0) for count in counts)
            for name in ("graphs", "graph_breaks", "recompiles")
        },
    }


def line(row: Row) -> str:
    """Return a row in words."""
    words = [v if k == "workload" else f"{k} {v}" for k, v in row.items() if k in ABOUT]
    what = ", ".join(words)
    if row["status"] != "ran":
        return f"{what}: {row['status']}: {row['reason'][:300]}"
    text = f"{what}: first step {row['first_step_s']:.2f} s, first steps {row['first_steps_s']:.2f}"
    if "step_ms" in row:
        text += f", then {row['step_ms']:.3f} ms"
    text += f"; {row['form']}"
    if row.get("losses"):
        text += f"; last losses {statistics.mean(row['losses'][-LAST_LOSSES:]):.4f}"
    if counts := row.get("compile"):
        text += "; " + ", ".join(f"{name} {value:g}" for name, value in counts.items() if value)
    return text


# What a row is about.
ABOUT = ("workload", "compiled", "cache", "seed")


# -- The run ---------------------------------------------------------------------------------------


def measured(bench: Bench, name: str, limit_s: float, earlier: Row, note: Any) -> None:
    """Run a section; what it has found is printed and noted row by row."""
    print(f"\n== {name}, at most some {limit_s:.0f} s", flush=True)
    start = time.monotonic()
    bench.deadline = start + limit_s
    again = set(bench.workloads) if name == "workloads" else set()
    kept = [
        {"run": earlier["run"], **row}
        for row in earlier.get("rows", [])
        if again and row["workload"] not in again
    ]
    run = results.this_run()
    section: Row = {"status": "ran", "rows": kept, "run": run}
    try:
        for row in bench.rows(name):
            section["rows"].append({**row, "run": run})
            section["summary"] = summary(name, section["rows"])
            print(line(row), flush=True)
            note(section)
    except Exception as error:
        section |= {"status": "failed", "reason": f"{type(error).__name__}: {error}"[:2000]}
        print(f"FAILED: {section['reason']}", flush=True)
    finally:
        bench.close()
    section["seconds"] = round(time.monotonic() - start, 1)
    told = {k: v for k, v in section.get("summary", {}).items() if not isinstance(v, list)}
    print(f"{name}: {section['status']}, {told}, {section['seconds']} s", flush=True)
    note(section)


def arguments(command_line: Iterable[str] | None = None) -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    # Those with a loader of their own train the model of another one.
    names = [name for name in NAMES if workload(name, "smoke").loader is None]
    parser.add_argument("--size", choices=["full", "smoke"], default="full")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sections", nargs="+", choices=list(SHARES), default=list(SHARES))
    parser.add_argument("--workloads", nargs="+", choices=names)
    parser.add_argument("--steps", type=int, help="of a loss curve")
    parser.add_argument("--seeds", type=int, default=2, help="of each curve, two or more")
    parser.add_argument("--limit-s", type=float, default=540.0, help="of all sections together")
    parser.add_argument("--any-commit", action="store_true", help="go on with another's --out")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(None if command_line is None else list(command_line))
    if args.workloads is None:
        args.workloads = names if args.size == "full" else ["mlp"]
    return args


def settings_of(args: argparse.Namespace) -> Settings:
    """Return what is measured."""
    if args.size == "full":
        return Settings(args.size, args.device, args.steps or 500, args.seeds)
    return Settings(args.size, args.device, args.steps or 12, args.seeds, 0.01, "aot_eager")


def main(command_line: Iterable[str] | None = None) -> Row:
    """Measure, print and write the figures; return them."""
    args = arguments(command_line)
    start = time.monotonic()
    settings = settings_of(args)
    about = {"settings": vars(settings)}
    sections = results.earlier_sections(args.out, about, any_commit=args.any_commit)
    figures: Row = {**about, "sections": sections}

    def note(name: str, section: Row) -> None:
        figures["sections"][name] = section
        if args.out:
            results.write(args.out, figures)

    names = [name for name in SHARES if name in args.sections]
    with (
        tempfile.TemporaryDirectory(prefix="compile-cost-", ignore_cleanup_errors=True) as folder,
        compiled_python(Path(folder, "python"), args.device) as were_none,
    ):
        if were_none:
            print("torch's Python was not compiled; it is for this run", flush=True)
        bench = Bench(settings, Path(folder), args.workloads)
        try:
            bench.read_disk(0.2 * args.limit_s)
            for number, name in enumerate(names):
                left = args.limit_s - (time.monotonic() - start)
                share = SHARES[name] / sum(SHARES[other] for other in names[number:])
                found = figures["sections"].get(name, {})
                measured(bench, name, left * share, found, partial(note, name))
        finally:
            bench.close()
    return figures


if __name__ == "__main__":
    # So that a time-out ends what runs.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    main()
