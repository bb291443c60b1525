"""What it costs to be watched: the times of `fit`, and a SyncGuard that records.

    PYTHONPATH=. python benchmarks/watching.py [--size smoke] [--device cpu] [--out FILE]

The small GPT of the yardstick in bf16, eager, where the host is the limit and each microsecond of
it shows, and as one graph. "as it is" is `fit` with everything on; "no times" is the same with the
step timer switched off; "guard" adds ``sync_guard="record"``. All are turns of one `fit`, between
whose steps a callback puts in what watches or takes it out: two processes of the same code differ
by more than what is looked for here. A turn has as many steps as lie between two samples of the
timer, so that each has one. Three figures for what an arm costs:

- **usual**: of the steps that stand first in their turns the median, of the second ones, and so on,
  added up, and the quotient of that to what it is held against, with the interval that holds 95 of
  100 when the turns are drawn anew. A neighbour who stops this process for a moment moves no
  median, and the step that is sampled has its place as all others. This is the figure that counts;
  in a graph the host is no measure of single steps, and there it is of whole turns;
- **longer by**: the median of the quotients, turn by turn, with its quartiles;
- **floor**: the quotient of the mean of the shortest quarter of the turns.

"again" is as it is once more: what it differs by is noise.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Final

import torch

from benchmarks.arms import median_and_quartiles, parser_of, write_rows
from benchmarks.workloads import workload
from torchfast import FitEvent, Plan, SyncGuard, Trainer
from torchfast.profiling import StepTimer

# Each with what it is held against.
AGAINST: Final = {"as it is": "no times", "guard": "as it is", "again": "as it is"}
ARMS: Final = ("no times", *AGAINST)
MODES: Final = ("eager", "graph")
# The timer takes the first of a fit apart, each of them.
WARM_UP_STEPS: Final = 32
# What was put in or taken out takes part in some steps that are not measured.
LEAD_STEPS: Final = 4
# One sample of the timer a turn, or more where a turn would be too short for the clock.
EVERY: Final = 16
# How often the turns are drawn anew.
RESAMPLED: Final = 400


class Watchers:
    """What watches a trainer's steps, put in and taken out between them."""

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
        single_ms: By arm the time of each step for each turn, as the host saw it.
        steps: How many steps a turn has.
    """

    def __init__(self, watchers: Watchers, device: str, rounds: int, block_s: float) -> None:
        self.ms: dict[str, list[float]] = {arm: [] for arm in ARMS}
        self.single_ms: dict[str, list[list[float]]] = {arm: [] for arm in ARMS}
        self._ended: list[float] = []
        self.steps = 0
        self._watchers, self._device = watchers, device
        self._rounds, self._block_s = rounds, block_s
        self._script = self._measure()
        self._left = next(self._script)

    def __call__(self, event: FitEvent) -> None:
        """Count a step."""
        if event.kind != "step":
            return
        self._ended.append(time.perf_counter())
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
                self._ended.clear()
                yield self.steps
                ends = [begun, *self._ended]
                self.ms[arm].append((self._now() - begun) / self.steps * 1e3)
                self.single_ms[arm].append([(b - a) * 1e3 for a, b in pairwise(ends)])
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


def measured(mode: str, args: Any) -> list[dict[str, Any]]:
    """Return a row for each arm."""
    work = workload("gpt-small", args.size)
    torch.manual_seed(0)
    plan = Plan(
        precision="bf16" if args.device == "cuda" else "as_given", cuda_graph=mode == "graph"
    )
    adamw = partial(torch.optim.AdamW, lr=work.lr, fused=True)
    with Trainer(work.build(), adamw, work.loss_fn, plan, device=args.device) as trainer:
        batches = [tuple(t.to(args.device) for t in batch) for batch in work.batches()]
        watchers = Watchers(trainer)
        turns = Turns(watchers, args.device, args.rounds, args.block_s)
        try:
            result = trainer.fit(Endless(batches), steps=1 << 40, callbacks=[turns], progress="off")
        finally:
            watchers.close()
        replays = int(trainer.report().counters.get("replays", 0))
    samples = {phase.name: phase.num_samples for phase in result.step_times.phases}
    about = {"steps_of_a_turn": turns.steps, "replays": replays, "samples": samples}
    # Of a graph the host only waits for room in the queue: whole turns are what is measured.
    single = turns.single_ms
    if mode == "graph":
        single = {arm: [[ms] for ms in turns_ms] for arm, turns_ms in turns.ms.items()}
    rows = []
    for arm, turns_ms in turns.ms.items():
        other = AGAINST.get(arm)
        row = {"mode": mode, "arm": arm, **about, "steps": result.num_steps}
        rows.append(row | figures(turns_ms, turns.ms[other] if other else None))
        if other:
            usual, interval = usual_cost(single[arm], single[other])
            rows[-1] |= {"against": other, "usual": usual, "usual_interval": interval}
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


def usual_cost(
    turns_ms: Sequence[Sequence[float]], other_ms: Sequence[Sequence[float]]
) -> tuple[float, list[float]]:
    """Return what the usual step costs beside another arm's, and the interval of 95 in 100.

    Args:
        turns_ms: For each turn the times of its steps.
        other_ms: Those of what it is held against, of as many turns.
    """
    found = _usual(turns_ms) / _usual(other_ms) - 1
    draws, costs = random.Random(0), []
    for _ in range(RESAMPLED):
        drawn = draws.choices(range(len(turns_ms)), k=len(turns_ms))
        ours, others = [turns_ms[i] for i in drawn], [other_ms[i] for i in drawn]
        costs.append(_usual(ours) / _usual(others) - 1)
    costs.sort()
    aside = len(costs) // 40
    return found, [costs[aside], costs[-1 - aside]]


def _usual(turns_ms: Sequence[Sequence[float]]) -> float:
    return sum(statistics.median(of_place) for of_place in zip(*turns_ms, strict=True))


def _floor(turns_ms: list[float]) -> float:
    return statistics.mean(sorted(turns_ms)[: max(1, len(turns_ms) // 4)])


def main() -> None:
    """Measure, print a table and write the figures."""
    parser = parser_of(__doc__, rounds=100)
    parser.add_argument("--size", choices=["full", "smoke"], default="full")
    parser.add_argument("--block-s", type=float, default=0.1, help="seconds of a turn")
    args = parser.parse_args()
    rows = []
    print(f"{'mode':<6} {'arm':<9} {'ms':>9}  {'usual':<30} {'longer by (quartiles)':<30} floor")
    for mode in MODES if args.device == "cuda" else MODES[:1]:
        for found in measured(mode, args):
            rows.append(found)
            told = ""
            if "cost" in found:
                told = "".join(
                    f"{f'{cost:+.2%} ({low:+.2%} to {high:+.2%})':<30} "
                    for cost, (low, high) in (
                        (found["usual"], found["usual_interval"]),
                        (found["cost"], found["cost_quartiles"]),
                    )
                )
                told += f"{found['floor']:<+8.2%}"
            print(f"{mode:<6} {found['arm']:<9} {found['ms']:>9.3f}  {told}", flush=True)
        write_rows(args, rows)


if __name__ == "__main__":
    main()
