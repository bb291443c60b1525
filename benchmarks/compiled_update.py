"""What compiling the optimizer's update gives to whole training steps.

    PYTHONPATH=. python benchmarks/compiled_update.py [--workloads W ...] [--optimizers O ...]
        [--size smoke] [--device cpu] [--out FILE]

A workload is trained with optimizers of which torch has no fused form, by three trainers that take
turns: with ``CompileOptions(update=False)``, ``True`` and ``"auto"``, all under the plan ``fast``
with the blocks of the model compiled, and captured on a GPU. So they differ by the update alone.
Told are the milliseconds of a step, what the trainer says of its update, and how far the weights
end from those of the first, in parts of the way that the first has gone.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final, Literal

import torch
from torch import Tensor

from benchmarks.arms import (
    Arm,
    median_and_quartiles,
    parser_of,
    settings_of,
    steps_of_a_turn,
    take_turns,
)
from benchmarks.result_rows import ResultRows
from benchmarks.workloads import NAMES, Workload, workload
from torchfast import CompileOptions, Plan, Trainer

WORKLOADS: Final = ("gpt2", "resnet50")
OPTIMIZERS: Final = ("RMSprop", "NAdam", "Adadelta")
UPDATES: Final[tuple[bool | Literal["auto"], ...]] = (False, True, "auto")
# Warm-up, compiling, capture and its check; then the weights are compared.
FIRST_STEPS: Final = 12


class Training(Arm):
    """Steps of a trainer whose update runs by one way.

    Args:
        work: What is trained.
        optimizer: A class of torch.optim.
        update: How its update runs.
        device: Where.
    """

    def __init__(self, work: Workload, optimizer: str, update: Any, device: str) -> None:
        super().__init__(device)
        self.update = update
        torch.manual_seed(0)
        model = work.build()
        before = [p.detach().clone() for p in model.parameters()]
        plan = Plan.preset("fast").replace(
            compile=CompileOptions(regions="blocks", update=update),
            cuda_graph=device == "cuda",
        )
        make = partial(getattr(torch.optim, optimizer), lr=work.lr)
        self._trainer = Trainer(model, make, work.loss_fn, plan, device=device)
        self._batches = [tuple(t.to(device) for t in batch) for batch in work.batches()]
        self._number = 0
        for _ in range(FIRST_STEPS):
            self.run()
        self.moved = [p.detach().cpu() - b for p, b in zip(model.parameters(), before, strict=True)]

    def run(self) -> object:
        """Do one step."""
        self._number += 1
        return self._trainer.step(self._batches[self._number % len(self._batches)])

    def row(self, first: Training) -> dict[str, Any]:
        """Return the figures; those of the weights against those of another arm."""
        ms, quartiles = median_and_quartiles(self.times_ms)
        report = self._trainer.report()
        return {
            "update": str(self.update),
            "ms": ms,
            "quartiles_ms": quartiles,
            "apart": norm_of(self.minus(first)) / norm_of(first.moved),
            "told": [d.detail for d in report.decisions if d.detail.startswith("the update of")],
            "update_graphs": report.counters.get("update_graphs", 0),
            "is_captured": report.counters.get("replays", 0) > 0,
            "turns_ms": self.times_ms,
        }

    def minus(self, other: Training) -> list[Tensor]:
        """Return by how much weights have moved otherwise than another arm's."""
        return [own - its for own, its in zip(self.moved, other.moved, strict=True)]

    def close(self) -> None:
        """Let go of what was compiled and captured."""
        self._trainer.close()


def norm_of(tensors: list[Tensor]) -> float:
    """Return the norm of all of them as one vector."""
    return float(torch.stack([t.double().norm() for t in tensors]).norm())


def measured(name: str, optimizer: str, args: Any) -> list[dict[str, Any]]:
    """Return a row for each way."""
    arms: list[Training] = []
    try:
        work = workload(name, args.size)
        # One by one, so that those there are get closed, though a later one be not made.
        arms.extend(Training(work, optimizer, update, args.device) for update in UPDATES)
        steps = steps_of_a_turn(arms[0], args.block_s, 1, 1000)
        take_turns(arms, args.rounds, steps)
        both = {"workload": name, "optimizer": optimizer}
        return [both | arm.row(arms[0]) for arm in arms]
    finally:
        for arm in arms:
            arm.close()
        torch.compiler.reset()


def main() -> None:
    """Measure each workload with each optimizer, print a table and write the figures."""
    parser = parser_of(__doc__, rounds=7)
    parser.add_argument("--size", choices=["full", "smoke"], default="full")
    parser.add_argument("--block-s", type=float, default=0.5, help="of a turn")
    parser.add_argument("--workloads", nargs="*", choices=NAMES, default=WORKLOADS)
    parser.add_argument("--optimizers", nargs="*", default=OPTIMIZERS)
    args = parser.parse_args()
    rows = ResultRows(args.out, ("workload", "optimizer", "update"), settings_of(args))
    for name in args.workloads:
        for optimizer in args.optimizers:
            for row in measured(name, optimizer, args):
                rows.add(row)
                print(
                    f"{name:<10} {optimizer:<9} {row['update']:<6} {row['ms']:9.3f} ms "
                    f"apart {row['apart']:.1e} {'; '.join(row['told'])}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
