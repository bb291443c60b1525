"""What recompute saves and costs: GPTs, a Llama, a ViT and ResNets, eager or as one graph.

    PYTHONPATH=. python benchmarks/recompute.py [--models Llama ViT] [--limit-s 600]
        [--size smoke] [--device cpu] [--out FILE]

A step is forward, backward and update by a `TrainStep`. All ways take turns, and a figure is the
median of its turns; the cost is the median of the quotients to no recompute, turn by turn, with its
quartiles. "stages" recomputes each stage of a ResNet as one; "early stages" does so with the first
half of them, which hold most of the memory, and recomputes the others by blocks. "planned" is what
`plan_recompute` said before, which chooses among blocks: the cost, and what a forward keeps for the
backward. "kept" is what the allocator holds more after such a forward, "peak" by how much it rises
in an eager step. "same" says that the losses are those without recompute, bit for bit.

Each row is written as it comes, beside those of earlier runs (`benchmarks.result_rows`). What the
limit leaves no time for is named in the file.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from typing import Any

import torch

from benchmarks.arms import (
    Arm,
    median_and_quartiles,
    parser_of,
    settings_of,
    steps_of_a_turn,
    take_turns,
    use_deterministic_algorithms,
)
from benchmarks.recompute_models import CASES, Case, device_batch
from benchmarks.result_rows import ResultRows
from torchfast import Plan, RecomputeOptions, RecomputePlan, TrainStep, plan_recompute

WAYS: tuple[bool | str, ...] = (False, "selective", "blocks")
MODES = ("eager", "graph")


def ways_of(case: Case) -> dict[bool | str, bool | str | RecomputeOptions]:
    """Return the ways to recompute, by what they are called."""
    ways: dict[bool | str, bool | str | RecomputeOptions] = dict(zip(WAYS, WAYS, strict=True))
    return ways | {name: RecomputeOptions(regions=paths) for name, paths in case.groups.items()}


class Way(Arm):
    """One way to recompute."""

    def __init__(self, case: Case, mode: str, way: bool | str, device: str) -> None:
        super().__init__(device)
        torch.manual_seed(0)
        self.way = way
        model = case.build().to(device)
        self.batch = device_batch(case, device)
        is_cuda = device == "cuda"
        plan = Plan(
            precision="bf16" if is_cuda else "as_given",
            recompute=ways_of(case)[way],
            cuda_graph=mode == "graph",
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self.step = TrainStep(model, optimizer, case.loss_fn, plan)
        self.losses = [self.step(self.batch).clone() for _ in range(6)]
        looks = is_cuda and mode == "eager"
        self.kept_bytes = self._kept() if looks else None
        self.peak_bytes = self._peak() if looks else None

    def _kept(self) -> int:
        """Return what a forward leaves in memory for its backward; nothing that a CPU tells."""
        self.step.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        before = torch.cuda.memory_allocated()
        parts = self.step.compute_loss(self.batch)
        kept = torch.cuda.memory_allocated() - before
        del parts  # with the loss, which holds all of it
        return kept

    def _peak(self) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.losses.append(self.step(self.batch).clone())
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def run(self) -> object:
        """Train one step."""
        return self.step(self.batch)

    def close(self) -> None:
        """Give the model back."""
        self.step.close()


def planned(case: Case, mode: str, device: str) -> RecomputePlan:
    """Return what the planner says of steps that run so."""
    torch.manual_seed(0)
    model = case.build().to(device)
    autocast = torch.bfloat16 if device == "cuda" else None
    batch = device_batch(case, device)
    return plan_recompute(
        model,
        case.loss_fn,
        batch,
        memory_gb=80.0,
        autocast=autocast,
        cuda_graph=mode == "graph",
    )


def measured(
    case: Case, mode: str, plan: RecomputePlan, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return a row for each way."""
    arms: list[Way] = []
    try:
        arms.extend(Way(case, mode, way, args.device) for way in ways_of(case))
        plain = arms[0]
        steps = steps_of_a_turn(plain, args.block_s, fewest=2, most=200)
        take_turns(arms, args.rounds, 1 if args.size == "smoke" else steps)
        return [row(arm, plain, case, mode, plan) for arm in arms]
    finally:
        for arm in arms:
            arm.close()
        arms.clear()
        gc.collect()


def row(arm: Way, plain: Way, case: Case, mode: str, plan: RecomputePlan) -> dict[str, Any]:
    """Return the figures of one way."""
    pairs = zip(plain.times_ms, arm.times_ms, strict=True)
    cost, quartiles = median_and_quartiles([after / before for before, after in pairs])
    choices = {choice.recompute: choice for choice in plan.choices}
    choice = choices.get(arm.way)  # it knows of blocks only
    return {
        "mode": mode,
        "shape": case.title,
        "recompute": arm.way,
        "ms": statistics.median(arm.times_ms),
        "cost": cost,
        "cost_quartiles": quartiles,
        "same_bits": all(map(torch.equal, plain.losses, arm.losses)),
        "kept_bytes": arm.kept_bytes,
        "peak_bytes": arm.peak_bytes,
        "planned_bytes": choice and choice.saved_bytes,
        "planned_cost": choice and choice.step_ms / choices[False].step_ms,
        "turns_ms": arm.times_ms,
    }


def mib(num_bytes: int | None) -> str:
    """Return bytes for a column, or a dash where nobody tells."""
    return "-" if num_bytes is None else f"{num_bytes / 2**20:,.1f}"


def main() -> None:
    """Measure every model, print a table and write the figures."""
    parser = parser_of(__doc__, rounds=9)
    parser.add_argument("--size", choices=sorted(CASES), default="full")
    parser.add_argument("--models", nargs="+", choices=CASES["full"], default=list(CASES["full"]))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--block-s", type=float, default=0.5, help="seconds of a turn")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="begin nothing later")
    args = parser.parse_args()
    use_deterministic_algorithms()
    started_at = time.monotonic()
    rows = ResultRows(args.out, ("name", "mode", "recompute"), settings_of(args))
    print(
        f"{'model':<14} {'mode':<6} {'recompute':<12} {'ms':>9} {'cost (quartiles)':>24} "
        f"{'planned':>8} {'planned MiB':>11} {'kept MiB':>10} {'peak MiB':>10}  bits"
    )
    modes = [mode for mode in args.modes if mode == "eager" or args.device == "cuda"]
    for name in args.models:
        case = CASES[args.size][name]
        for mode in modes:
            if time.monotonic() - started_at > args.limit_s:
                rows.leave_out(name, mode, "no time was left")
                print(f"{name:<14} {mode:<6} left out: no time was left")
                continue
            plan = planned(case, mode, args.device)
            for found in measured(case, mode, plan, args):
                # After each: whoever interrupts keeps what there is.
                rows.add({"name": name, **found})
                low, high = found["cost_quartiles"]
                cost = f"{found['cost']:.3f} ({low:.3f} to {high:.3f})"
                planned_cost = found["planned_cost"]
                foretold = "-" if planned_cost is None else f"{planned_cost:.3f}"
                print(
                    f"{name:<14} {mode:<6} {found['recompute'] or 'none':<12} {found['ms']:>9.3f} "
                    f"{cost:>24} {foretold:>8} {mib(found['planned_bytes']):>11} "
                    f"{mib(found['kept_bytes']):>10} {mib(found['peak_bytes']):>10}  "
                    f"{'same' if found['same_bits'] else 'OTHER'}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
