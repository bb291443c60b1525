"""What ``Trainer.step`` costs over the same loop written by hand.

    PYTHONPATH=. python benchmarks/step_overhead.py [--pairs N] [--out FILE]

Two copies of a model train side by side, one by a plain loop, one by ``Trainer(plan="exact")``
under the same arithmetic. Blocks of steps alternate in random order within a pair, the device is
drained around each block, and the figure is the median over pairs of the ratio of block times.
Between two copies of the plain loop the same procedure gives the noise.
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib.util
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from benchmarks import results
from torchfast import Trainer

LossFn = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class Workload:
    """A model, a resident batch, and how many steps make a block."""

    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    bf16: bool
    block: int


def example() -> ModuleType:
    """Return the plain example as a module: its GPT is the one that is measured."""
    path = results.ROOT / "examples" / "00_plain_loop.py"
    spec = importlib.util.spec_from_file_location("plain_loop_example", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def mlp() -> nn.Module:
    """Return the MLP 784-512-512-10."""
    return nn.Sequential(
        nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )


def workloads(device: str) -> dict[str, Workload]:
    """Return the workloads of this machine, from launch-bound to device-bound."""
    gpt = example()

    def tokens(batch: int, context: int) -> Callable[[], tuple[Tensor, Tensor]]:
        return lambda: (
            torch.randint(256, (batch, context), device=device),
            torch.randint(256, (batch, context), device=device),
        )

    def images() -> tuple[Tensor, Tensor]:
        return torch.randn(256, 784, device=device), torch.randint(10, (256,), device=device)

    def build(size: str) -> Callable[[], nn.Module]:
        return lambda: gpt.GPT(gpt.SIZES[size])

    found = {"MLP 784-512-512-10, batch 256": Workload(mlp, images, False, 100)}
    if device == "cuda":
        small, base = gpt.SIZES["small"], gpt.SIZES["base"]
        found[f"GPT {small.layers}x{small.width}, 16x256 tokens, bf16"] = Workload(
            build("small"), tokens(16, 256), True, 30
        )
        found[f"GPT {base.layers}x{base.width}, 32x1024 tokens, bf16"] = Workload(
            build("base"), tokens(32, 1024), True, 6
        )
    else:
        found["GPT tiny, 4x64 tokens"] = Workload(build("tiny"), tokens(4, 64), False, 10)
    return found


def make_loss(bf16: bool, device: str) -> LossFn:
    """Return the loss function that both loops call."""

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        inputs, targets = batch
        with torch.autocast(device, torch.bfloat16, enabled=bf16):
            logits = model(inputs)
        return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())

    return loss_fn


def plain(model: nn.Module, loss_fn: LossFn) -> Callable[[Any], Tensor]:
    """Return a step written by hand."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(batch: Any) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_fn(model, batch)
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return step


def wrapped(model: nn.Module, loss_fn: LossFn) -> Callable[[Any], Tensor]:
    """Return the same step as a Trainer runs it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return Trainer(model, optimizer, loss_fn, "exact", max_grad_norm=1.0).step


def block_ms(
    step: Callable[[Any], Tensor], batch: Any, count: int, drain: Callable[[], None]
) -> float:
    """Return milliseconds a step over a block."""
    drain()
    start = time.perf_counter()
    for _ in range(count):
        step(batch)
    drain()
    return (time.perf_counter() - start) / count * 1e3


def compare(
    first: Callable[[Any], Tensor],
    second: Callable[[Any], Tensor],
    batch: Any,
    block: int,
    pairs: int,
    drain: Callable[[], None],
) -> dict[str, Any]:
    """Return the paired ratio of second to first, with its spread and the raw times."""
    for step in (first, second):
        block_ms(step, batch, block, drain)
    times: list[tuple[float, float]] = []
    for _ in range(pairs):
        order = [0, 1]
        random.shuffle(order)
        pair = [0.0, 0.0]
        for which in order:
            pair[which] = block_ms((first, second)[which], batch, block, drain)
        times.append((pair[0], pair[1]))
    ratios = sorted(b / a for a, b in times)
    quartiles = statistics.quantiles(ratios, n=4)
    return {
        "median_ratio": statistics.median(ratios),
        "quartiles": [quartiles[0], quartiles[2]],
        "median_ms": [
            statistics.median(a for a, _ in times),
            statistics.median(b for _, b in times),
        ],
        "pairs_ms": times,
    }


def measure(workload: Workload, device: str, pairs: int) -> dict[str, Any]:
    """Return the cost of Trainer.step, and the noise, on one workload."""
    drain: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    loss_fn = make_loss(workload.bf16, device)
    model = workload.build().to(device)
    batch = workload.batch()
    reference = plain(copy.deepcopy(model), loss_fn)
    arms = {
        "trainer / plain": wrapped(copy.deepcopy(model), loss_fn),
        "plain / plain": plain(copy.deepcopy(model), loss_fn),
    }
    gc.disable()  # a collection in one arm of a pair is no property of that arm
    try:
        return {
            name: compare(reference, step, batch, workload.block, pairs, drain)
            for name, step in arms.items()
        }
    finally:
        gc.enable()


def main() -> None:
    """Measure, print a table, and write the raw figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    random.seed(0)
    torch.manual_seed(0)
    figures = {}
    for name, workload in workloads(args.device).items():
        figures[name] = measure(workload, args.device, args.pairs)
        for arm, figure in figures[name].items():
            low, high = figure["quartiles"]
            first, second = figure["median_ms"]
            print(
                f"{name:40} {arm:16} {figure['median_ratio']:.4f} "
                f"[{low:.4f}, {high:.4f}]  {first:.3f} -> {second:.3f} ms"
            )
    if args.out:
        results.write(args.out, {"figures": figures})


if __name__ == "__main__":
    main()
