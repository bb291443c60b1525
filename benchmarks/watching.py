"""What it costs to be watched: the times of `fit`, and a SyncGuard that records.

    PYTHONPATH=. python benchmarks/watching.py [--size smoke] [--device cpu] [--out FILE]

The small GPT of the yardstick in bf16, eager, where the host is the limit and each microsecond of
it shows, and as one graph. "as it is" is `fit` with everything on; "no times" is the same with the
step timer switched off; "guard" adds ``sync_guard="record"``. Each is one long `fit` in a process
of its own, which stands still after some steps until it is its turn again, so that nothing that a
`fit` does at its beginning is in the times. Two figures for what an arm costs:

- **longer by**: the median of the quotients to what it is held against, turn by turn, with its
  quartiles;
- **floor**: the quotient of the mean of the shortest quarter of the turns. Neighbours on a shared
  machine only ever add time, and to a host far more than what is looked for here.

"again" is a second trainer that is as it is: what it differs by is noise.
"""

from __future__ import annotations

import multiprocessing
import random
import statistics
import time
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Final, NamedTuple

import torch

from benchmarks.arms import median_and_quartiles, parser_of, write_rows
from benchmarks.process import steady_layout
from benchmarks.workloads import Size, workload
from torchfast import FitEvent, Plan, Trainer
from torchfast.profiling import StepTimer

# Each with what it is held against.
AGAINST: Final = {"as it is": "no times", "guard": "as it is", "again": "as it is"}
ARMS: Final = ("no times", *AGAINST)
MODES: Final = ("eager", "graph")
# The timer takes the first of a fit apart, each of them.
WARM_UP_STEPS: Final = 32
LIMIT_S: Final = 120.0


class Watched(NamedTuple):
    """A trainer in `fit`, watched or not."""

    arm: str
    mode: str
    size: Size
    device: str

    def train(self, pipe: Connection) -> None:
        """Run a fit that makes as many steps at a time as it is asked for, and tells their time."""
        work = workload("gpt-small", self.size)
        torch.manual_seed(0)
        plan = Plan(
            sync_guard="record" if self.arm == "guard" else "off",
            precision="bf16" if self.device == "cuda" else "as_given",
            cuda_graph=self.mode == "graph",
        )
        if self.arm == "no times":
            StepTimer.begin_step = StepTimer.end_step = lambda *_: None  # type: ignore[method-assign, assignment]
        adamw = partial(torch.optim.AdamW, lr=work.lr, fused=True)
        trainer = Trainer(work.build(), adamw, work.loss_fn, plan, device=self.device)
        batches = [tuple(t.to(self.device) for t in batch) for batch in work.batches()]
        turns = _Turns(pipe, self.device)
        with trainer:
            result = trainer.fit(
                _Endless(batches), steps=1 << 40, callbacks=[turns], progress="off"
            )
        replays = int(trainer.report().counters.get("replays", 0))
        samples = {phase.name: phase.num_samples for phase in result.step_times.phases}
        pipe.send({"samples": samples, "replays": replays, "steps": result.num_steps})


class _Turns:
    """A callback that stands still between turns."""

    def __init__(self, pipe: Connection, device: str) -> None:
        self._pipe, self._device = pipe, device
        self._left = WARM_UP_STEPS
        self._steps = 0
        self._begun = time.perf_counter()

    def __call__(self, event: FitEvent) -> None:
        if event.kind != "step":
            return
        self._left -= 1
        if self._left:
            return
        if self._device == "cuda":
            torch.cuda.synchronize()
        self._pipe.send((time.perf_counter() - self._begun) / max(1, self._steps) * 1e3)
        self._left = self._steps = self._pipe.recv()
        if not self._steps:
            event.stop()
        self._begun = time.perf_counter()


class _Endless:
    """The same batches again and again."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Any:
        while True:
            yield from self._batches


class Process:
    """An arm's process, which is given its turns."""

    def __init__(self, watched: Watched) -> None:
        self.watched = watched
        context = multiprocessing.get_context("spawn")
        self.pipe, far_end = context.Pipe()
        self.process = context.Process(target=watched.train, args=(far_end,), daemon=True)
        self.process.start()
        far_end.close()
        self.turns_ms: list[float] = []

    def answer(self) -> Any:
        """Return what the process says next.

        Raises:
            TimeoutError: It says nothing.
            RuntimeError: It has ended.
        """
        try:
            if not self.pipe.poll(LIMIT_S):
                raise TimeoutError(f"{self.watched} said nothing for {LIMIT_S:.0f} s")
            return self.pipe.recv()
        except EOFError:
            self.process.join(LIMIT_S)
            raise RuntimeError(
                f"{self.watched} ended before its turns did, with exit code "
                f"{self.process.exitcode}; what it printed says why"
            ) from None

    def turn(self, steps: int) -> float:
        """Return the time of a step, over so many."""
        self._ask_for(steps)
        ms: float = self.answer()
        return ms

    def end(self) -> dict[str, Any]:
        """End the fit; return what was counted in it."""
        self._ask_for(0)
        counted: dict[str, Any] = self.answer()
        self.process.join(LIMIT_S)
        return counted

    def kill(self) -> None:
        """End the process, whatever it does, and wait until it is gone."""
        self.process.kill()
        self.process.join()

    def _ask_for(self, steps: int) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # of one that has ended: `answer`
            self.pipe.send(steps)


def measured(mode: str, args: Any) -> list[dict[str, Any]]:
    """Return a row for each arm."""
    processes: dict[str, Process] = {}
    try:
        for arm in ARMS:
            processes[arm] = Process(Watched(arm, mode, args.size, args.device))
        for process in processes.values():
            process.answer()  # of the warm-up
        steps = max(4, round(args.block_s * 1e3 / processes["no times"].turn(8)))
        for process in processes.values():
            process.turn(steps)
        order = random.Random(0)
        for _ in range(args.rounds):
            for process in order.sample(list(processes.values()), len(processes)):
                process.turns_ms.append(process.turn(steps))
        rows = []
        for arm, process in processes.items():
            other = processes.get(AGAINST.get(arm, ""))
            row = {"mode": mode, "arm": arm, "steps_of_a_turn": steps, **process.end()}
            rows.append(row | figures(process.turns_ms, other and other.turns_ms))
            if other is not None:
                rows[-1]["against"] = AGAINST[arm]
        return rows
    finally:
        for process in processes.values():
            process.kill()


def figures(turns_ms: list[float], other_ms: list[float] | None) -> dict[str, Any]:
    """Return what an arm takes, and what it costs beside another."""
    found: dict[str, Any] = {"ms": statistics.median(turns_ms), "turns_ms": turns_ms}
    if other_ms is not None:
        pairs = zip(turns_ms, other_ms, strict=True)
        cost, quartiles = median_and_quartiles([a / b - 1 for a, b in pairs])
        floor = _floor(turns_ms) / _floor(other_ms) - 1
        found |= {"cost": cost, "cost_quartiles": quartiles, "floor": floor}
    return found


def _floor(turns_ms: list[float]) -> float:
    return statistics.mean(sorted(turns_ms)[: max(1, len(turns_ms) // 4)])


def main() -> None:
    """Measure, print a table and write the figures."""
    parser = parser_of(__doc__, rounds=40)
    parser.add_argument("--size", choices=["full", "smoke"], default="full")
    parser.add_argument("--block-s", type=float, default=0.15, help="seconds of a turn")
    args = parser.parse_args()
    steady_layout()
    rows = []
    print(f"{'mode':<6} {'arm':<9} {'ms':>9}  {'longer by (quartiles)':<30} {'floor':<8} against")
    for mode in MODES if args.device == "cuda" else MODES[:1]:
        for found in measured(mode, args):
            rows.append(found)
            told = ""
            if "cost" in found:
                low, high = found["cost_quartiles"]
                told = f"{found['cost']:+.2%} ({low:+.2%} to {high:+.2%})"
                told = f"{told:<30} {found['floor']:<+8.2%} {found['against']}"
            print(f"{mode:<6} {found['arm']:<9} {found['ms']:>9.3f}  {told}", flush=True)
        write_rows(args, rows)


if __name__ == "__main__":
    main()
