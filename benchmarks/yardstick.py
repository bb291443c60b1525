"""Every workload by every method: torchfast, its peers, and the best loop written by hand.

    PYTHONPATH=. python benchmarks/yardstick.py [--workloads W ...] [--methods M ...] [--out FILE]

Each method of a workload trains in a process of its own, so that no switch, cache or allocator of
one reaches another. All live on one GPU and take turns: a round is one block of steps from each, in
random order, the device drained before and after, the others standing still. So a drift of the
machine hits all alike, and a method is compared with the reference, the tuned loop, round by round.
What does not fit into the GPU's memory together is measured in groups, the reference in each.

Before the first round each method trains the same steps from the same weights on the same batches;
compilation, capture and the choice of kernels happen there and are not in the times. The losses of
these steps say whether it trains.

With ``--out`` the file is written after each workload; where a run is ended within one, by
Ctrl-C or SIGTERM, with the methods that have had some rounds. What stands there already, from the
same commit, machine and settings, is not run again: neither a workload nor, of a workload, a
method. So a table can be measured in parts, each of which has the reference in it, also by several
runs at a time, each on a GPU and cores of its own. ``--any-commit`` takes up what another commit
began; each method says which run it is from. ``--again`` measures what stands there anew.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import figures, results, yardstick_file
from benchmarks.methods import METHODS, TUNED, Method
from benchmarks.process import MethodFailed, Process, steady_layout
from benchmarks.result_file import MIN_ROUNDS
from benchmarks.worker import Block, Order, Trace
from benchmarks.workloads import NAMES, Workload, workload

ANSWER_LIMIT_S = 120.0
# What an allocator may take beyond the peak of a method that is alike.
MEMORY_MARGIN = 1.15
# The pieces of a block, of which the best is kept too.
BURSTS = 10
# A loader at work has batches ready after standing still, which are not the steady state; and it
# delivers in bursts of as many batches as it has workers, of which a block holds whole ones.
LOADING_BLOCK = Block(lead=8, bursts=1, burst_steps=8)


@dataclass(frozen=True)
class Settings:
    """How a run measures. Two results compare only where these agree.

    Attributes:
        device: ``"cuda"`` or ``"cpu"``.
        size: ``"full"`` or ``"smoke"``.
        rounds: Blocks of each method.
        block_s: Seconds that a block should take.
        lead_s: Seconds at the start of a turn that are not measured: caches and clocks warm up.
        train_steps: Steps before the first round, whose losses are compared.
        cold_start_limit_s: When a method's first steps are given up.
        cores: On how many cores, the same for all, each method's process stays; 0: on any. Of use
            to compare two results; a loader at work or a thread of one's own may need more.
    """

    device: str = "cuda"
    size: str = "full"
    rounds: int = 10
    block_s: float = 0.2
    lead_s: float = 0.05
    train_steps: int = 24
    cold_start_limit_s: float = 90.0
    cores: int = 0


class Measurement:
    """One workload by some methods.

    Args:
        workload: What is trained.
        settings: How it is measured.
        slowdowns: Planted slowdowns by method, to try the comparison of results.
    """

    def __init__(
        self,
        workload: Workload,
        settings: Settings,
        slowdowns: dict[str, float],
    ) -> None:
        self.workload = workload
        self.settings = settings
        self.figures: dict[str, dict[str, Any]] = {}
        self._slowdowns = slowdowns
        self._random = random.Random(0)
        self._caches = Path(tempfile.mkdtemp(prefix="yardstick-"))
        self._processes: list[Process] = []
        self._warm_ups: dict[str, dict[str, Any]] = {}
        self._num_parameters = 0
        self.seconds: collections.Counter[str] = collections.Counter()
        # Device memory: what one method needs at its peak, and what is free between turns.
        self._peak_bytes, self._free_bytes = 0, math.inf

    def run(self, methods: Sequence[Method]) -> dict[str, Any]:
        """Return the figures of the workload."""
        others = [method for method in methods if method is not TUNED and self._fits(method)]
        try:
            reference, *waiting = self.spawn([TUNED, *others])
            group = self.warm_up([reference])
            while waiting:
                room = self._room()
                if room < 1 and len(group) > 1:
                    self.measure(group)
                    self.stop(group[1:])
                    group = group[:1]
                else:
                    chunk = min(len(waiting), max(room, 1))
                    group += self.warm_up(waiting[:chunk])
                    waiting = waiting[chunk:]
                self._turn(group[0], Block(1, 1, 1))  # which tells how much is free now
            self.measure(group)
        finally:
            self.close()
        return self.result()

    @contextlib.contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        started_at = time.monotonic()
        yield
        self.seconds[what] += round(time.monotonic() - started_at, 1)

    def close(self) -> None:
        """End all processes, those included that were just starting."""
        self.stop(self._processes)
        shutil.rmtree(self._caches, ignore_errors=True)

    def _fits(self, method: Method) -> bool:
        obstacle = method.obstacle(self.workload, on_cuda=self.settings.device == "cuda")
        if obstacle is not None:
            self.figures[method.name] = {"status": "left out", "reason": obstacle}
        return obstacle is None

    def _room(self) -> int:
        """Return how many more methods the device's memory holds, each at its peak.

        One peak is kept free, for the turns of those that hold little between them.
        """
        if math.isinf(self._free_bytes) or not self._peak_bytes:
            return len(METHODS)
        return int(self._free_bytes / (MEMORY_MARGIN * self._peak_bytes)) - 1

    # -- Starting ----------------------------------------------------------------------------------

    def spawn(self, methods: Sequence[Method]) -> list[Process]:
        """Give each method a process, which imports what it needs and takes no device memory."""
        spawned = [Process(self._order(method)) for method in methods]
        self._processes += spawned
        return spawned

    def warm_up(self, processes: Sequence[Process]) -> list[Process]:
        """Take processes through the first steps; return those that came through.

        A method starts alone, so that its cold start is its own, but for those that compile: they
        wait for the host mostly, and start side by side. One that is given another's cache comes
        after it, and one that measures ways of compiling is alone.
        """
        with self._timed("imports and build"):
            for process in processes:
                process.send("build")
            ready = [process for process in processes if self._answer(process, ANSWER_LIMIT_S)]
        with self._timed("first steps"):
            for process in ready:
                if not process.method.compiles:
                    self._first_steps([process])
        with self._timed("first steps that compile"):
            together = [p for p in ready if p.method.compiles and not p.method.search_s]
            self._first_steps([p for p in together if not p.method.cache_of])
            for process in together:
                if process.method.cache_of:
                    self._after(process)
            for process in ready:
                if process.method.search_s:
                    self._first_steps([process])
        return [process for process in processes if process.alive]

    def _after(self, process: Process) -> None:
        """Start what is given another method's cache, if that method was done in time."""
        first = process.method.cache_of or ""
        if self.figures.get(first, {}).get("status") == "failed":
            self._fail(process, f"not tried, since {first} was not done")
        else:
            self._first_steps([process])

    def _first_steps(self, processes: Sequence[Process]) -> None:
        started_at = time.monotonic()
        for process in processes:
            process.send("start")
        for process in processes:
            limit_s = self.settings.cold_start_limit_s + process.method.search_s
            answer = self._answer(process, limit_s, started_at)
            if answer is not None:
                self._warm_ups[process.method.name] = answer
                self._peak_bytes = max(self._peak_bytes, answer["reserved_bytes"] or 0)

    def _order(self, method: Method) -> Order:
        return Order(
            workload=self.workload.name,
            method=method,
            size=self.settings.size,
            device=self.settings.device,
            train_steps=self.settings.train_steps,
            cache=self._caches / (method.cache_of or method.name).replace(" ", "-"),
            cores=self.settings.cores,
            slowdown=self._slowdowns.get(method.name, 0.0),
        )

    def _answer(
        self, process: Process, limit_s: float, asked_at: float | None = None
    ) -> dict[str, Any] | None:
        """Return an answer; a failure is a figure too, and there is no answer."""
        try:
            answer = process.answer(limit_s, asked_at)
        except MethodFailed as failure:
            if process.method is TUNED:
                raise
            self._fail(process, str(failure))
            return None
        self._free_bytes = answer.get("free_bytes", self._free_bytes)
        self._num_parameters = answer.get("num_parameters", self._num_parameters)
        return answer

    def _fail(self, process: Process, reason: str) -> None:
        self.figures[process.method.name] = {"status": "failed", "reason": reason}
        process.stop()

    def stop(self, processes: Sequence[Process]) -> None:
        """End processes, whatever they do."""
        for process in processes:
            process.stop()

    # -- Measuring ---------------------------------------------------------------------------------

    def _turn(self, process: Process, block: Block) -> dict[str, Any] | None:
        """Return what a block of steps took."""
        process.send(block)
        return self._answer(process, ANSWER_LIMIT_S)

    def _block(self, step_ms: float, at_once: int) -> Block:
        """Return the block of a method whose steps take so long, so many being launched at once."""
        if self.workload.loader is not None:
            return LOADING_BLOCK
        lead = max(1, round(self.settings.lead_s * 1e3 / step_ms))
        steps = max(2, round(self.settings.block_s * 1e3 / step_ms))
        bursts = min(steps, BURSTS)
        return Block(lead, bursts, at_once * max(1, round(steps / bursts / at_once)))

    def measure(self, group: Sequence[Process]) -> None:
        """Give each its turns, then a look at its trace; write the figures of all."""
        probes = {p: self._turn(p, Block(2, 1, 2 * p.method.steps_at_once)) for p in group}
        turns = {
            process: self._block(probe["ms"], process.method.steps_at_once)
            for process, probe in probes.items()
            if probe is not None
        }
        blocks: dict[Process, list[dict[str, Any]]] = {process: [] for process in turns}
        try:
            with self._timed("rounds"):
                for _ in range(self.settings.rounds):
                    for process in self._random.sample(list(turns), len(turns)):
                        block = self._turn(process, turns[process]) if process.alive else None
                        if block is not None:
                            blocks[process].append(block)
        except (KeyboardInterrupt, SystemExit):
            self._summarize(blocks, group[0], MIN_ROUNDS)
            raise
        self._summarize(blocks, group[0], 1)
        with self._timed("traces"):
            for process in filter(lambda p: p.alive, turns):
                found = self._trace(process, min(turns[process].bursts, 5))
                self.figures[process.method.name].update(
                    (key, found[key]) for key in figures.TRACED
                )

    def _summarize(
        self, blocks: dict[Process, list[dict[str, Any]]], reference: Process, fewest: int
    ) -> None:
        """Write the figures of those that took their turns in the rounds that are whole."""
        alive = [process for process in blocks if process.alive]
        rounds = min((len(blocks[process]) for process in alive), default=0)
        if rounds < fewest:
            return
        for process in alive:
            name = process.method.name
            self.figures[name] = figures.summary(
                self._warm_ups[name], blocks[process][:rounds], blocks[reference][:rounds]
            )

    def _trace(self, process: Process, steps: int) -> dict[str, Any]:
        """Return what a trace counts; nothing if it fails, for the times stand without it."""
        at_once = process.method.steps_at_once
        process.send(Trace(math.ceil(steps / at_once) * at_once))
        try:
            return process.answer(ANSWER_LIMIT_S)
        except MethodFailed:
            process.stop()
            return dict.fromkeys(figures.TRACED)

    def result(self) -> dict[str, Any]:
        """Return the figures of all methods, in the order of tables."""
        ordered = {name: self.figures[name] for name in METHODS if name in self.figures}
        figures.judge(ordered, TUNED.name)
        return {
            "title": self.workload.title,
            "unit": self.workload.unit,
            "items_per_step": self.workload.items_per_step,
            "num_parameters": self._num_parameters,
            "precision": "bf16" if self.settings.device == "cuda" else "fp32",
            "reference": TUNED.name,
            "seconds": dict(self.seconds),
            "methods": ordered,
        }


def main() -> None:
    """Measure, print, and write the raw figures."""
    args = arguments()
    # Processes are killed in the middle of a loop, and their loaders' semaphores stay behind.
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker")
    steady_layout()
    settings = Settings(**{name: getattr(args, name) for name in Settings.__dataclass_fields__})
    about = {"settings": asdict(settings), "slow_down": dict(args.slow_down)}
    this_run = results.this_run()
    found = yardstick_file.taken_up(args.out, about, any_commit=args.any_commit)["workloads"]
    # As Ctrl-C does: unwind, and end what runs.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    failed = False
    for name in args.workloads:
        earlier = found.get(name, {}).get("methods", {})
        asked = [METHODS[m] for m in args.methods if args.again or m not in earlier]
        if not asked:
            print(f"\n{name}: measured already")
            continue
        measurement = Measurement(workload(name, args.size), settings, dict(args.slow_down))
        interrupt: BaseException | None = None
        try:
            measured = measurement.run(asked)
        except MethodFailed as failure:
            failed = True
            print(f"\n{name}: not measured, since the reference failed: {failure}")
            continue
        except (KeyboardInterrupt, SystemExit) as error:
            if TUNED.name not in measurement.figures:
                raise
            measured, interrupt = measurement.result(), error
        print_workload(measured)
        if args.out:
            names = {method.name for method in asked}
            yardstick_file.write(
                args.out, about, name, measured, names, this_run, any_commit=args.any_commit
            )
        if interrupt is not None:
            raise interrupt
    sys.exit(1 if failed else 0)


def print_workload(result: dict[str, Any]) -> None:
    """Print a table of one workload."""
    print(f"\n{result['title']}: {result['num_parameters']:,} parameters, {result['precision']}")
    for name, method in result["methods"].items():
        if method["status"] != "ran":
            print(f"  {name:36} {method['status']}: {method['reason']}")
            continue
        verdict = "" if method["trains"] else "  BROKEN: does not train"
        device = "" if method["device_ms"] is None else f" device {method['device_ms']:8.3f}"
        print(
            f"  {name:36} {method['median_ms']:9.3f} ms ±{method['spread']:5.1%}"
            f"  host {method['host_ms']:8.3f}{device}  cold {method['cold_start_s']:6.1f} s"
            f"  loss {method['losses'][0]:.3f} -> {method['losses'][-1]:.3f}{verdict}",
            flush=True,
        )
    spent = ", ".join(f"{what} {seconds:.0f} s" for what, seconds in result["seconds"].items())
    print(f"  measured in: {spent}", flush=True)


def arguments() -> argparse.Namespace:
    """Return the command line."""
    default = Settings()
    on_cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if on_cuda else "cpu")
    parser.add_argument("--size", choices=["full", "smoke"], default="full" if on_cuda else "smoke")
    parser.add_argument("--rounds", type=int, default=default.rounds)
    parser.add_argument("--block-s", type=float, default=default.block_s)
    parser.add_argument("--lead-s", type=float, default=default.lead_s)
    parser.add_argument("--train-steps", type=int, default=default.train_steps)
    parser.add_argument("--cold-start-limit-s", type=float, default=default.cold_start_limit_s)
    parser.add_argument("--cores", type=int, default=default.cores)
    parser.add_argument("--slow-down", nargs="+", type=slowdown, default=[], metavar="METHOD=PART")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--any-commit", action="store_true", help="go on with another's --out")
    parser.add_argument("--again", action="store_true", help="replace what stands in --out")
    return parser.parse_args()


def slowdown(text: str) -> tuple[str, float]:
    """Return a method and by which part of a step it is to be slowed down."""
    method, _, part = text.rpartition("=")
    if method not in METHODS:
        raise argparse.ArgumentTypeError(f"{text!r} names no method; as in 'torchfast fast=0.03'")
    return method, float(part)


if __name__ == "__main__":
    main()
