"""Where branches on side streams help: the experts of a mixture in a Python loop, 1 to 8 streams.

    PYTHONPATH=. python benchmarks/branches.py [--size smoke] [--device cpu] [--out FILE]

A step is the forward and backward of experts that all read the same tokens, eager or as one graph.
All numbers of streams take turns, and a figure is the median of its turns; the gain is the median
of the quotients turn by turn, with its quartiles. One stream is the plain loop. "same" says that
loss and gradients are those of one stream, bit for bit; of a graph some gradients are looked at.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import results
from benchmarks.workloads.transformer import FeedForward
from torchfast import CUDAGraphStep, ParallelBranches

STREAMS = (1, 2, 4, 8)
MODES = ("eager", "graph")


class Shape(NamedTuple):
    """Experts of a mixture, and the tokens that each of them reads."""

    experts: int
    tokens: int
    width: int


SHAPES = {
    "full": {
        "many small": Shape(32, 256, 512),  # as in the workload "moe"
        "small": Shape(8, 256, 512),
        "middle": Shape(8, 1024, 1024),
        "large": Shape(8, 8192, 2048),
    },
    "smoke": {"small": Shape(4, 8, 16)},
}


class Mixture(nn.Module):
    """Experts whose outputs are weighted and added up."""

    def __init__(self, shape: Shape, branches: ParallelBranches) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            FeedForward(shape.width, bias=True) for _ in range(shape.experts)
        )
        self.router = nn.Linear(shape.width, shape.experts)
        self.branches = branches

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor shaped as ``x``."""
        gates = self.router(x).softmax(-1).split(1, dim=-1)
        mixed = torch.zeros_like(x)
        for gate, output in zip(gates, self.branches(self.experts, x), strict=True):
            mixed = mixed + gate * output
        return mixed


class Arm:
    """One number of streams, eager or in a graph."""

    def __init__(self, shape: Shape, mode: str, streams: int, device: str) -> None:
        torch.manual_seed(0)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.model = Mixture(shape, ParallelBranches(streams)).to(device, dtype)
        self.x = torch.randn(shape.tokens, shape.width, device=device, dtype=dtype)
        self.device, self.streams, self.times_ms = device, streams, list[float]()
        self.result = self.step(self.x)
        self._graph: Any = None
        self.call: Callable[[Tensor], Any] = self.step
        if mode == "graph":
            self._graph = CUDAGraphStep(
                self.step, state=[self.model], on_failure="raise", check=False
            )
            self.call = self._graph
        for _ in range(5):
            self.result = self.call(self.x)

    def step(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the loss and two gradients, small ones."""
        self.model.zero_grad(set_to_none=True)
        loss = F.mse_loss(self.model(x), x)
        loss.backward()
        found = self.model.router.bias.grad, self.model.experts[0].up.bias.grad
        return loss.detach(), *(gradient.clone() for gradient in found if gradient is not None)

    def looked_at(self) -> list[Tensor]:
        """Return what must not depend on the number of streams."""
        if self._graph is not None:  # after a replay nothing else is to be relied on
            return [*self.result]
        return [*self.result, *(p.grad for p in self.model.parameters() if p.grad is not None)]

    def turn(self, steps: int) -> None:
        """Time some steps."""
        self.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            self.call(self.x)
        self.synchronize()
        self.times_ms.append((time.perf_counter() - start) / steps * 1e3)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def pool_bytes(self) -> int | None:
        """Return what the graph holds; None without one."""
        return None if self._graph is None else self._graph.report().counters["pool_bytes"]

    def close(self) -> None:
        """Let go of the graph."""
        if self._graph is not None:
            self._graph.close()


def measured(shape: Shape, mode: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each number of streams."""
    arms = [Arm(shape, mode, streams, args.device) for streams in STREAMS]
    try:
        plain = arms[0]
        plain.turn(3)
        steps = max(3, round(args.block_s * 1e3 / plain.times_ms.pop()))
        steps = 2 if args.size == "smoke" else min(steps, 500)
        for number in range(args.rounds + 1):
            # Whoever is first in a round is another one each time; the first round only warms up.
            for position in range(len(arms)):
                arms[(position + number) % len(arms)].turn(steps)
        for arm in arms:
            del arm.times_ms[0]
        return [row(arm, plain, shape, mode) for arm in arms]
    finally:
        for arm in arms:
            arm.close()


def row(arm: Arm, plain: Arm, shape: Shape, mode: str) -> dict[str, Any]:
    """Return the figures of one number of streams."""
    pairs = zip(plain.times_ms, arm.times_ms, strict=True)
    gains = sorted(before / after for before, after in pairs)
    low, _, high = statistics.quantiles(gains, n=4) if len(gains) > 1 else gains * 3
    return {
        "mode": mode,
        **shape._asdict(),
        "streams": arm.streams,
        "ms": statistics.median(arm.times_ms),
        "gain": statistics.median(gains),
        "gain_quartiles": [low, high],
        "same_bits": all(map(torch.equal, plain.looked_at(), arm.looked_at())),
        "pool_bytes": arm.pool_bytes(),
        "turns_ms": arm.times_ms,
    }


def main() -> None:
    """Measure every shape, print a table and write the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=sorted(SHAPES), default="full")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, choices=["cuda", "cpu"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--block-s", type=float, default=0.03, help="seconds of a turn")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    rows = []
    print(f"{'experts':<12} {'mode':<6} {'streams':>7} {'ms':>9} {'gain (quartiles)':>24}  bits")
    for name, shape in SHAPES[args.size].items():
        for mode in MODES:
            if mode == "graph" and args.device != "cuda":
                continue
            for found in measured(shape, mode, args):
                rows.append({"name": name, **found})
                low, high = found["gain_quartiles"]
                gain = f"{found['gain']:.3f} ({low:.3f} to {high:.3f})"
                pool = f"  {found['pool_bytes'] / 2**20:,.0f} MiB" if found["pool_bytes"] else ""
                print(
                    f"{name:<12} {mode:<6} {found['streams']:>7} {found['ms']:>9.4f} {gain:>24}  "
                    f"{'same' if found['same_bits'] else 'OTHER'}{pool}",
                    flush=True,
                )
    if args.out is not None:
        settings = {"size": args.size, "rounds": args.rounds, "block_s": args.block_s}
        results.write(args.out, {"settings": settings, "rows": rows})


if __name__ == "__main__":
    main()
