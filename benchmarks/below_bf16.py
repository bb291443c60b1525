"""What float8 and low-bit state give the Llama of the yardstick: tokens a second, memory, loss.

    PYTHONPATH=. python benchmarks/below_bf16.py [--smoke] [--device cpu] [--groups ...]
        [--methods ...] [--out FILE]

"float8": the step by hand (torchao's layers in the blocks, tensorwise, blocks compiled, all in one
CUDA graph, batches on the device), ours in bf16, in float8 with measured recipes, and as by hand;
"vocabulary": by hand again, and ours with the loss in chunks. "kernels": ours in float8 by hand's
recipe, and with inductor's searches for kernels other than products. "state": fused AdamW beside
AdamW with moments in 8 and 4 bits and in float8. The first of a group stays, and each other one
takes turns with it, since three such models do not fit; a figure is the median of its turns.
"curves": each plan trains on its own for --steps on Python's standard library, the same batches in
the same order, and losses are compared with bf16's from the same weights; what bf16 does from other
ones is the noise. "warm-up": the same, with a learning rate that grows over the first fifth of the
steps: without that the first updates throw the loss up and down, and what rounding differs by,
grows. "decay": it also falls, over the other steps to a tenth. On a CPU float8 is emulated, nothing
is compiled or captured, and only the numbers mean anything.

Each row is written as it comes, beside those of earlier runs (`benchmarks.result_rows`), and a
curve's ten times on its way: one that is cut off is compared as far as it goes. A group, or a curve
(``--groups curves --methods "8 bit"``), is meant to take less than 250 s on an H200.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._inductor.config as inductor_config
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.below_bf16_tables import CURVE_GROUPS
from benchmarks.result_rows import ResultRows
from benchmarks.taking_turns import ByHand, Ours, free, is_wanted, measured
from benchmarks.workloads import llama
from benchmarks.workloads.definition import Batch, Workload
from torchfast import CompileOptions, Float8Options, Plan
from torchfast.losses import linear_cross_entropy

BLOCKS = CompileOptions(regions="blocks", dynamic=False)


def chunked_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss without the logits of all tokens at once."""
    tokens, targets = batch
    net: Any = model
    return linear_cross_entropy(net.hidden(tokens), net.output_weight, targets)


class Searched(Ours):
    """A trainer whose code is compiled under options of inductor's."""

    def __init__(self, *args: Any, **options: bool) -> None:
        super().__init__(*args)
        self._options = options

    def step(self, batch: Batch) -> Tensor:
        """Train on a batch."""
        with inductor_config.patch(self._options):
            return super().step(batch)


def plans(args: argparse.Namespace) -> dict[str, Plan]:
    """Return the plans that are compared, by name."""
    on_gpu = args.device == "cuda"
    float8 = Float8Options(watch_at=()) if on_gpu else emulated()
    base = Plan(precision="bf16", optimizer="fused")
    if on_gpu:
        base = base.replace(compile=BLOCKS, cuda_graph=True)
    return {
        "bf16": base,
        "float8": base.replace(precision=float8),
        "float8 tensorwise": base.replace(
            precision=dataclasses.replace(float8, recipe="tensorwise", smallest=16)
        ),
        "8 bit": base.replace(optimizer="adamw8bit"),
        "4 bit": base.replace(optimizer="adamw4bit"),
        "float8 moments": base.replace(optimizer="adamwfp8"),
        "float8, 8 bit": base.replace(precision=float8, optimizer="adamw8bit"),
    }


def emulated() -> Float8Options:
    """Return float8 as a CPU computes it."""
    return Float8Options(recipe="tensorwise", smallest=16, emulate=True, watch_at=())


def groups(args: argparse.Namespace, work: Workload) -> dict[str, dict[str, Any]]:
    """Return what takes turns, by group and name."""
    known = plans(args)

    def ours(plan: str, loss_fn: Any = work.loss_fn) -> Ours:
        return Ours(work, args, known[plan], loss_fn)

    def searched(**options: bool) -> Searched:
        return Searched(work, args, known["float8 tensorwise"], work.loss_fn, **options)

    return {
        "float8": {
            "by hand, float8": ByHand(work, args),
            "torchfast bf16": ours("bf16"),
            "torchfast float8": ours("float8"),
            "torchfast float8, all layers": ours("float8 tensorwise"),
        },
        "vocabulary": {
            "by hand, float8": ByHand(work, args),
            "torchfast float8, loss in chunks": ours("float8", chunked_loss),
        },
        "kernels": {
            "torchfast float8, all layers": ours("float8 tensorwise"),
            "pointwise kernels searched": searched(max_autotune_pointwise=True),
            "kernels by coordinate descent": searched(coordinate_descent_tuning=True),
        },
        "state": {
            "fused AdamW": ours("bf16"),
            "8 bit": ours("8 bit"),
            "4 bit": ours("4 bit"),
            "float8 moments": ours("float8 moments"),
        },
    }


def text_batches(work: Workload, steps: int, device: str) -> Iterator[Batch]:
    """Yield batches of the bytes of Python's standard library, the same in every run."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [*sorted(root.glob("*.py")), *sorted(root.glob("[a-s]*/*.py"))]
    text = torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)
    tokens, _ = work.batches()[0]
    most = int(torch.stack([t.max() for t, _ in work.batches()]).max()) + 1
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(
            len(text) - tokens.shape[1] - 1, (len(tokens), 1), generator=generator
        )
        drawn = text[starts + torch.arange(tokens.shape[1] + 1)].long().remainder(max(most, 64))
        yield drawn[:, :-1].to(device), drawn[:, 1:].to(device)


class Run(NamedTuple):
    """What a curve is of."""

    plan: str
    seed: int = 0  # of the weights


CURVES = {
    "bf16": Run("bf16"),
    "bf16, weights 1": Run("bf16", seed=1),
    "bf16, weights 2": Run("bf16", seed=2),
    "float8": Run("float8"),
    "float8, weights 1": Run("float8", seed=1),
    "float8, weights 2": Run("float8", seed=2),
    "float8 tensorwise": Run("float8 tensorwise"),
    "float8 tensorwise, weights 1": Run("float8 tensorwise", seed=1),
    "8 bit": Run("8 bit"),
    "8 bit, weights 1": Run("8 bit", seed=1),
    "8 bit, weights 2": Run("8 bit", seed=2),
    "4 bit": Run("4 bit"),
    "float8 moments": Run("float8 moments"),
    "float8, 8 bit": Run("float8, 8 bit"),
}


def rate_of(group: str, steps: int) -> Callable[[int], float]:
    """Return what the learning rate is multiplied by, by the number of the step from 0 on."""
    growing = max(1, steps // 5)

    def factor(step: int) -> float:
        if group == "curves":
            return 1.0
        if step < growing:
            return 1 / growing + (1 - 1 / growing) * step / growing
        fallen = (step - growing) / (steps - growing) if group == "decay" else 0.0
        return 1 - 0.9 * fallen

    return factor


def curve(
    group: str, name: str, work: Workload, args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Yield the losses so far of a plan on real text, at each tenth of the steps."""
    run = CURVES[name]
    torch.manual_seed(run.seed)
    ours = Ours(work, args, plans(args)[run.plan], work.loss_fn)(work.build())
    assert ours.trainer is not None
    rate = LambdaLR(ours.trainer.optimizer, rate_of(group, args.steps))
    losses: list[Tensor] = []
    tenth = max(1, args.steps // 10)
    try:
        for step, batch in enumerate(text_batches(work, args.steps, args.device), start=1):
            losses.append(ours.step(batch))
            rate.step()
            if step % tenth == 0 or step == args.steps:
                so_far = torch.stack(losses).tolist()
                yield {"group": group, "method": name, "losses": so_far, **ours.notes()}
    finally:
        ours.close()
        free()


def main() -> None:
    """Measure the groups asked for, print a table and write the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    names = ["float8", "vocabulary", "kernels", "state", *CURVE_GROUPS]
    parser.add_argument("--device", default=default, choices=["cuda", "cpu"])
    parser.add_argument("--smoke", action="store_true", help="the tiny model")
    parser.add_argument("--groups", nargs="*", default=names, choices=names)
    parser.add_argument("--methods", nargs="*", help="of these names only; all, if left out")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--turn-steps", type=int, default=10)
    parser.add_argument("--steps", type=int, default=500, help="of each curve")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    work = llama.workload("llama", "smoke" if args.smoke else "full")
    known = {name: list(every) for name, every in groups(args, work).items()}
    known |= {group: list(CURVES) for group in CURVE_GROUPS}
    there = {name for group in args.groups for name in known[group]}
    if unknown := [name for name in args.methods or () if name not in there]:
        parser.error(f"no method {unknown[0]!r} in these groups; there are {sorted(there)}")
    print(work.title)
    settings = {"smoke": args.smoke, "rounds": args.rounds, "steps": args.steps}
    rows = ResultRows(args.out, ("group", "method"), settings)
    for group, every in groups(args, work).items():
        if group not in args.groups or not any(is_wanted(name, args) for name in every):
            continue
        for row in measured(group, every, work, args):
            rows.add(row)
            print(
                f"{group:<12}{row['method']:<34}{row['ms']:>9.2f} ms "
                f"{row['items_per_s']:>10,.0f} tokens/s {row['held_bytes'] / 2**30:>7.1f} GiB "
                f"{row['ratio']:>7.3f}",
                flush=True,
            )
    for group, name in itertools.product(CURVE_GROUPS, CURVES):
        if group not in args.groups or not is_wanted(name, args):
            continue
        for row in curve(group, name, work, args):
            rows.add(row)
        end = statistics.fmean(row["losses"][-max(1, args.steps // 10) :])
        print(f"{group:<12}{name:<34}{end:>9.4f}", flush=True)


if __name__ == "__main__":
    main()
