"""What it costs to be watched: the times of `fit`, and a SyncGuard that records.

    PYTHONPATH=. python benchmarks/watching.py [--size smoke] [--device cpu] [--out FILE]

The small GPT of the yardstick in bf16, eager, where the host is the limit and each microsecond of
it shows, and as one graph. "as it is" is `fit` with everything on; "no times" is the same with the
step timer switched off; "guard" adds ``sync_guard="record"``. "again" is as it is once more: what
it differs by is noise. All are steps of one `fit`: two processes of the same code differ by more
than what is looked for here.

Eager, the arms take turns step by step (`watching_steps`), all threads on one core: where the main
thread and autograd's hand over to each other across cores, each waits for the other's core to wake
up, which on a virtual machine is most of the noise. ``--no-pin`` leaves them to the system. Of a
graph the host is no measure of single steps: there a turn has as many steps as lie between two
samples of the timer, so that each has one. The figures for what an arm costs:

- **usual**: of eager steps the median of the differences within a block of one step of each arm,
  each kind of step (sampled, read, neither) by itself, added up by how often it comes, with the
  interval that holds 95 of 100 when runs of blocks are drawn anew. In a graph the
  same of whole turns. A neighbour who stops this process for a moment moves no median. This is
  the figure that counts;
- **within**: of eager steps the share that is spent inside the timer's own methods, or in the
  calls that a guard looks at. No neighbour disturbs it; it is a lower bound, and has what the timer
  tells records, which the others leave out;
- **longer by**: the median of the quotients, run by run or turn by turn, with its quartiles;
- **floor**: the quotient of the mean of the shortest quarter of them.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, Final

import torch

from benchmarks.arms import median_and_quartiles, parser_of, write_rows
from benchmarks.cores import pinned
from benchmarks.paired_steps import Timed, paired_cost, runs_ms, usual_ms
from benchmarks.watching_steps import ARMS, WITHIN_STEPS, Alternation, StepWatchers
from benchmarks.watching_within import guard_within
from benchmarks.workloads import workload
from torchfast import FitEvent, Plan, SyncGuard, Trainer
from torchfast.profiling import StepTimer

# Each with what it is held against.
AGAINST: Final = {"as it is": "no times", "guard": "as it is", "again": "as it is"}
MODES: Final = ("eager", "graph")
# The timer takes the first of a fit apart, each of them.
WARM_UP_STEPS: Final = 32
# What was put in or taken out takes part in some steps that are not measured.
LEAD_STEPS: Final = 4
# One sample of the timer a turn, or more where a turn would be too short for the clock.
EVERY: Final = 16


class Watchers:
    """What watches a trainer's steps, put in and taken out between turns of them."""

    def __init__(self, trainer: Trainer) -> None:
        self._syncs = trainer._step.syncs
        self._begin, self._end = StepTimer.begin_step, StepTimer.end_step

    def be(self, arm: str) -> None:
        """Let the steps to come be watched as this arm is."""
        self.close()
        if arm == "no times":
            nothing: Callable[[StepTimer], None] = lambda _: None  # noqa: E731
            StepTimer.begin_step = StepTimer.end_step = nothing  # type: ignore[method-assign]
        if arm == "guard":
            kind: Any = "cuda" if torch.cuda.is_available() else "cpu"
            self._syncs._guard = SyncGuard("record", device=kind)
            self._syncs._guard.__enter__()  # as `fit` does around its loop

    def close(self) -> None:
        """Watch as `fit` does."""
        StepTimer.begin_step, StepTimer.end_step = self._begin, self._end  # type: ignore[method-assign]
        if (guard := self._syncs._guard) is not None:
            self._syncs._guard = None
            guard.__exit__(None, None, None)
            guard.close()


class Turns:
    """A callback that gives each arm its turns, in random order, and then ends the fit.

    Attributes:
        ms: The times of a step by arm, one for each turn.
        steps: How many steps a turn has.
    """

    def __init__(self, watchers: Watchers, device: str, rounds: int, block_s: float) -> None:
        self.ms: dict[str, list[float]] = {arm: [] for arm in ARMS}
        self.steps = 0
        self._watchers, self._device = watchers, device
        self._rounds, self._block_s = rounds, block_s
        self._script = self._measure()
        self._left = next(self._script)

    def __call__(self, event: FitEvent) -> None:
        """Count a step."""
        if event.kind != "step":
            return
        self._left -= 1
        if self._left:
            return
        try:
            self._left = next(self._script)
        except StopIteration:
            event.stop()
            self._left = -1

    def _measure(self) -> Iterator[int]:
        """Yield how many steps are to run before it goes on."""
        yield WARM_UP_STEPS
        begun = self._now()
        yield EVERY
        whole = max(1, round(self._block_s / (self._now() - begun)))
        self.steps = whole * EVERY
        order = random.Random(0)
        for _ in range(self._rounds):
            for arm in order.sample(ARMS, len(ARMS)):
                self._watchers.be(arm)
                yield LEAD_STEPS
                begun = self._now()
                yield self.steps
                self.ms[arm].append((self._now() - begun) / self.steps * 1e3)
        self._watchers.close()

    def _now(self) -> float:
        if self._device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


class Endless:
    """The same batches again and again."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return itertools.cycle(self._batches)


def trainer_of(mode: str, args: Any) -> tuple[Trainer, Endless]:
    """Return the small GPT's trainer, and its batches."""
    work = workload("gpt-small", args.size)
    torch.manual_seed(0)
    plan = Plan(
        precision="bf16" if args.device == "cuda" else "as_given", cuda_graph=mode == "graph"
    )
    adamw = partial(torch.optim.AdamW, lr=work.lr, fused=True)
    batches = [tuple(t.to(args.device) for t in batch) for batch in work.batches()]
    trainer = Trainer(work.build(), adamw, work.loss_fn, plan, device=args.device)
    return trainer, Endless(batches)


def graph_rows(args: Any) -> list[dict[str, Any]]:
    """Return a row for each arm, of steps that are a graph."""
    trainer, batches = trainer_of("graph", args)
    with trainer:
        watchers = Watchers(trainer)
        turns = Turns(watchers, args.device, args.rounds, args.block_s)
        try:
            result = trainer.fit(batches, steps=1 << 40, callbacks=[turns], progress="off")
        finally:
            watchers.close()
        replays = int(trainer.report().counters.get("replays", 0))
    samples = {phase.name: phase.num_samples for phase in result.step_times.phases}
    about = {"steps_of_a_turn": turns.steps, "replays": replays, "samples": samples}
    rows = []
    for arm, turns_ms in turns.ms.items():
        other = AGAINST.get(arm)
        row = {"mode": "graph", "arm": arm, **about, "steps": result.num_steps}
        rows.append(row | figures(turns_ms, turns.ms[other] if other else None))
        if other:
            # Of a graph the host only waits for room in the queue: whole turns are measured.
            ours, others = ([Timed(ms) for ms in turns.ms[name]] for name in (arm, other))
            usual, interval = paired_cost(ours, others, run=1)
            rows[-1] |= {"against": other, "usual": usual, "usual_interval": interval}
    return rows


def eager_rows(args: Any) -> list[dict[str, Any]]:
    """Return a row for each arm, of eager steps."""
    with pinned() if args.pin else nullcontext():
        trainer, batches = trainer_of("eager", args)
        with trainer:
            watchers = StepWatchers(trainer, args.device)
            watchers.open()
            steps = Alternation(watchers, args.eager_s)
            try:
                result = trainer.fit(batches, steps=1 << 40, callbacks=[steps], progress="off")
            finally:
                watchers.close()
        guard = guard_within(watchers.passed, args.device)
    about = {"steps": result.num_steps, "samples": watchers.num_samples()}
    about |= {"blocks": len(steps.steps["as it is"])}
    rows = []
    for arm, timed in steps.steps.items():
        row = {"mode": "eager", "arm": arm, **about}
        if (other := AGAINST.get(arm)) is None:
            rows.append(row | figures(runs_ms(timed), None) | {"ms": usual_ms(timed)})
            continue
        row |= figures(runs_ms(timed), runs_ms(steps.steps[other])) | {"ms": usual_ms(timed)}
        usual, interval = paired_cost(timed, steps.steps[other])
        held = 0.0
        if arm == "as it is":
            row |= {"within": usual_ms(steps.within) / row["ms"], "within_steps": WITHIN_STEPS}
        if arm == "guard":
            held = guard.held_ms / row["ms"]  # which both have
            row |= {"within": guard.watched_ms / row["ms"], "held": held, "calls": guard.calls}
        row |= {"usual": usual + held, "usual_interval": [end + held for end in interval]}
        rows.append(row | {"against": other})
    return rows


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


def told(row: dict[str, Any]) -> str:
    """Return a row as it is printed."""
    cells = ""
    if "cost" in row:
        for name, ends in (("usual", "usual_interval"), ("cost", "cost_quartiles")):
            low, high = row[ends]
            cells += f"{f'{row[name]:+.2%} ({low:+.2%} to {high:+.2%})':<30} "
        cells += f"{row['floor']:<+8.2%} "
    cells += f"{row['within']:.3%}" if "within" in row else ""
    return f"{row['mode']:<6} {row['arm']:<9} {row['ms']:>9.3f}  {cells}"


def main() -> None:
    """Measure, print a table and write the figures."""
    parser = parser_of(__doc__, rounds=100)
    parser.add_argument("--size", choices=["full", "smoke"], default="full")
    parser.add_argument("--block-s", type=float, default=0.1, help="seconds of a turn of a graph")
    parser.add_argument("--eager-s", type=float, default=80.0, help="seconds of eager blocks")
    parser.add_argument(
        "--no-pin", dest="pin", action="store_false", help="leave eager threads to the system"
    )
    args = parser.parse_args()
    rows = []
    print(
        f"{'mode':<6} {'arm':<9} {'ms':>9}  {'usual':<30} {'longer by (quartiles)':<30} "
        f"{'floor':<8} within"
    )
    for mode in MODES if args.device == "cuda" else MODES[:1]:
        for row in eager_rows(args) if mode == "eager" else graph_rows(args):
            rows.append(row)
            print(told(row), flush=True)
        write_rows(args, rows, settings={"eager_s": args.eager_s, "pinned": args.pin})


if __name__ == "__main__":
    main()
