"""What it costs to be watched: the times of `fit`, and a SyncGuard that records.

    PYTHONPATH=. python benchmarks/watching.py [--size smoke] [--device cpu] [--out FILE]

The small GPT of the yardstick in bf16, eager, where the host is the limit and each microsecond of
it shows, and as one graph. "as it is" is `fit` with everything on; "no times" is the same with the
step timer switched off; "guard" adds ``sync_guard="record"``. All take turns of some steps through
`fit`; a cost is the median of the quotients to what it is held against, turn by turn, with its
quartiles. "again" is a second trainer that is as it is: what it differs by is noise.
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import Any

import torch
from typing_extensions import override

from benchmarks.arms import (
    Arm,
    median_and_quartiles,
    parser_of,
    steps_of_a_turn,
    take_turns,
    write_rows,
)
from benchmarks.workloads import Size, workload
from torchfast import Plan, Trainer
from torchfast.profiling import StepTimer

# Each with what it is held against.
AGAINST = {"as it is": "no times", "guard": "as it is", "again": "as it is"}
ARMS = ("no times", *AGAINST)
MODES = ("eager", "graph")


class Watched(Arm):
    """A trainer in `fit`, watched or not."""

    def __init__(self, name: str, mode: str, size: Size, device: str) -> None:
        super().__init__(device)
        work = workload("gpt-small", size)
        torch.manual_seed(0)
        self.name = name
        guard = "record" if name == "guard" else "off"
        precision = "bf16" if device == "cuda" else "as_given"
        plan = Plan(sync_guard=guard, precision=precision, cuda_graph=mode == "graph")
        adamw = partial(torch.optim.AdamW, lr=work.lr, fused=True)
        self.trainer = Trainer(work.build(), adamw, work.loss_fn, plan, device=device)
        self.batches = [tuple(t.to(device) for t in batch) for batch in work.batches()]
        self.turn(8)  # with the capture
        self.times_ms.clear()

    @override
    def turn(self, steps: int) -> None:
        """Time a call of fit."""
        begin, end = StepTimer.begin_step, StepTimer.end_step
        if self.name == "no times":
            StepTimer.begin_step = StepTimer.end_step = lambda *_, **__: None  # type: ignore[method-assign, assignment]
        try:
            self.synchronize()
            start = time.perf_counter()
            self.trainer.fit(_Endless(self.batches), steps=steps, log_every=steps, progress="off")
            self.synchronize()
            self.times_ms.append((time.perf_counter() - start) / steps * 1e3)
        finally:
            StepTimer.begin_step, StepTimer.end_step = begin, end  # type: ignore[method-assign]


class _Endless:
    """The same batches again and again."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Any:
        while True:
            yield from self._batches


def measured(mode: str, args: Any) -> list[dict[str, Any]]:
    """Return a row for each arm."""
    arms = {name: Watched(name, mode, args.size, args.device) for name in ARMS}
    try:
        steps = steps_of_a_turn(arms["no times"], args.block_s, fewest=4, most=2000)
        take_turns(list(arms.values()), args.rounds, steps)
        return [
            row(arm, arms.get(AGAINST.get(name, "")), mode, steps) for name, arm in arms.items()
        ]
    finally:
        for arm in arms.values():
            arm.trainer.close()


def row(arm: Watched, other: Watched | None, mode: str, steps: int) -> dict[str, Any]:
    """Return the figures of an arm."""
    found: dict[str, Any] = {
        "mode": mode,
        "arm": arm.name,
        "steps_of_a_turn": steps,
        "ms": statistics.median(arm.times_ms),
        "turns_ms": arm.times_ms,
    }
    if other is not None:
        pairs = zip(arm.times_ms, other.times_ms, strict=True)
        cost, quartiles = median_and_quartiles([a / b - 1 for a, b in pairs])
        found |= {"against": other.name, "cost": cost, "cost_quartiles": quartiles}
    return found


def main() -> None:
    """Measure, print a table and write the figures."""
    parser = parser_of(__doc__, rounds=21)
    parser.add_argument("--size", choices=["full", "smoke"], default="full")
    parser.add_argument("--block-s", type=float, default=0.4, help="seconds of a turn")
    args = parser.parse_args()
    rows = []
    print(f"{'mode':<6} {'arm':<9} {'ms':>9}  {'cost (quartiles)':<30} against")
    for mode in MODES if args.device == "cuda" else MODES[:1]:
        for found in measured(mode, args):
            rows.append(found)
            told = ""
            if "cost" in found:
                low, high = found["cost_quartiles"]
                told = f"{found['cost']:+.2%} ({low:+.2%} to {high:+.2%})"
            print(
                f"{mode:<6} {found['arm']:<9} {found['ms']:>9.3f}  {told:<30} "
                f"{found.get('against', '')}",
                flush=True,
            )
    write_rows(args, rows)


if __name__ == "__main__":
    main()
