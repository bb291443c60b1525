"""What the host's look behind a launch gives to loops that wait for the device, and to others.

    PYTHONPATH=. python benchmarks/look_ahead.py [--workloads W ...] [--size smoke] [--out FILE]

A workload is trained by the plan ``fast`` without a compiler. Its loop reads the loss at each step,
or behind every sixth, as the blocks of the yardstick do, or never; where it waits, a device that
has nothing to do waits for all that the host does before a launch. Turns alternate between steps
behind each of whose launches the host looks once more at all that the graph was captured from, and
steps without that look. They are those of one trainer.

Told are the milliseconds of a step, how many things a look reads, and which of the two the trainer
chooses for such a loop by itself.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final
from unittest import mock

import torch

from benchmarks.arms import (
    Arm,
    check_has_graphs,
    median_and_quartiles,
    parser_of,
    settings_of,
    steps_of_a_turn,
    take_turns,
)
from benchmarks.result_rows import ResultRows
from benchmarks.workloads import NAMES, Workload, workload
from torchfast import Plan, Trainer
from torchfast.graphs.look_ahead import BLOCK, PAIRS, LookAhead

WORKLOADS: Final = ("moe", "resnet50")
# Steps between two waits, by what the rows call them.
WAITS: Final = {"each": 1, "every sixth": 6, "no": None}
WARM_UP_STEPS: Final = 12


class Loop(Arm):
    """Steps of a trainer in a loop that waits, or does not.

    Args:
        trainer: Whose step is replayed by now.
        batches: On the device.
        every: Steps between two waits; None if there is none.
        looks: Whether the host looks behind each launch.
    """

    def __init__(
        self, trainer: Trainer, batches: list[Any], every: int | None, *, looks: bool
    ) -> None:
        super().__init__(trainer.device.type)
        self.looks, self._every, self._number = looks, every, 0
        self._trainer, self._batches = trainer, batches

    def run(self) -> None:
        """Do one step, and wait if it is time."""
        self._number += 1
        loss = self._trainer.step(self._batches[self._number % len(self._batches)])
        if self._every is not None and self._number % self._every == 0:
            loss.item()

    def turn(self, steps: int) -> None:
        """Time so many steps, or some more that end with a wait."""
        every = self._every or 1
        with mock.patch.object(LookAhead, "is_wanted", return_value=self.looks):
            super().turn(-(-steps // every) * every)

    def chosen(self) -> bool | None:
        """Return whether the trainer finds that the look pays in this loop; None if it asks not."""
        graph = self._trainer._step._graph
        assert graph is not None
        ahead = graph._graph._steady.ahead = LookAhead()
        for _ in range(2 * BLOCK * PAIRS + 1):
            self.run()
        self.synchronize()
        return ahead.pays


def measured(name: str, args: Any) -> list[dict[str, Any]]:
    """Return a row for each way to wait."""
    work: Workload = workload(name, args.size)
    torch.manual_seed(0)
    plan = Plan.preset("fast").replace(compile=False)
    adamw = partial(torch.optim.AdamW, lr=work.lr)
    rows = []
    with Trainer(
        work.build(), adamw, work.loss_fn, plan, max_grad_norm=1.0, device=args.device
    ) as trainer:
        batches = [tuple(t.to(args.device) for t in batch) for batch in work.batches()]
        for number in range(WARM_UP_STEPS):
            trainer.step(batches[number % len(batches)])
        for waits, every in WAITS.items():
            arms = [Loop(trainer, batches, every, looks=looks) for looks in (True, False)]
            steps = steps_of_a_turn(arms[0], args.block_s, every or 1, 1000)
            take_turns(arms, args.rounds, steps)
            row = {"workload": name, "waits": waits, "chosen": arms[0].chosen()}
            rows.append({**row, **row_of(arms, trainer)})
    return rows


def row_of(arms: list[Loop], trainer: Trainer) -> dict[str, Any]:
    """Return the figures of the two ways."""
    row: dict[str, Any] = {"num_read": None}
    for arm in arms:
        name = "looks" if arm.looks else "does not"
        ms, quartiles = median_and_quartiles(arm.times_ms)
        row[name] = {"ms": ms, "quartiles_ms": quartiles, "turns_ms": arm.times_ms}
    graph = trainer._step._graph
    assert graph is not None
    glance = graph._graph._steady._glance
    if glance is not None:  # or something changes from step to step
        row["num_read"] = glance.num_read
    return row


def main() -> None:
    """Measure, print a table and write the figures."""
    parser = parser_of(__doc__, rounds=15)
    parser.add_argument("--size", choices=["full", "smoke"], default="full")
    parser.add_argument("--block-s", type=float, default=0.3, help="of a turn")
    parser.add_argument("--workloads", nargs="*", choices=NAMES, default=WORKLOADS)
    args = parser.parse_args()
    check_has_graphs(parser, args)
    rows = ResultRows(args.out, ("workload", "waits"), settings_of(args))
    for name in args.workloads:
        for row in measured(name, args):
            rows.add(row)
            looks, not_ = row["looks"], row["does not"]
            print(
                f"{name:<10} waits behind {row['waits']:<12} looks {looks['ms']:8.3f} ms, does not "
                f"{not_['ms']:8.3f} ms: {looks['ms'] / not_['ms']:.3f}; reads {row['num_read']}, "
                f"found to pay: {row['chosen']}",
                flush=True,
            )


if __name__ == "__main__":
    main()
