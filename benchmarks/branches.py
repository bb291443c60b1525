"""Where branches on side streams help: the experts of a mixture in a Python loop, 1 to 8 streams.

    PYTHONPATH=. python benchmarks/branches.py [--size smoke] [--device cpu] [--out FILE]

A step is the forward and backward of experts that all read the same tokens, eager or as one graph.
All numbers of streams take turns, and a figure is the median of its turns; the gain is the median
of the quotients turn by turn, with its quartiles. One stream is the plain loop. "same" says that
loss and gradients are those of one stream, bit for bit; of a graph some gradients are looked at.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.arms import (
    Arm,
    median_and_quartiles,
    parser_of,
    steps_of_a_turn,
    take_turns,
    use_deterministic_algorithms,
    write_rows,
)
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


class Streams(Arm):
    """One number of streams, eager or in a graph."""

    def __init__(self, shape: Shape, mode: str, streams: int, device: str) -> None:
        super().__init__(device)
        torch.manual_seed(0)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.model = Mixture(shape, ParallelBranches(streams)).to(device, dtype)
        self.x = torch.randn(shape.tokens, shape.width, device=device, dtype=dtype)
        self.streams = streams
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

    def run(self) -> object:
        """Step, as it is or by its graph."""
        return self.call(self.x)

    def looked_at(self) -> list[Tensor]:
        """Return what must not depend on the number of streams."""
        if self._graph is not None:  # after a replay nothing else is to be relied on
            return [*self.result]
        return [*self.result, *(p.grad for p in self.model.parameters() if p.grad is not None)]

    def pool_bytes(self) -> int | None:
        """Return what the graph holds; None without one."""
        return None if self._graph is None else self._graph.report().counters["pool_bytes"]

    def close(self) -> None:
        """Let go of the graph."""
        if self._graph is not None:
            self._graph.close()


def measured(shape: Shape, mode: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each number of streams."""
    arms = [Streams(shape, mode, streams, args.device) for streams in STREAMS]
    try:
        plain = arms[0]
        steps = steps_of_a_turn(plain, args.block_s, fewest=3, most=500)
        take_turns(arms, args.rounds, 2 if args.size == "smoke" else steps)
        return [row(arm, plain, shape, mode) for arm in arms]
    finally:
        for arm in arms:
            arm.close()


def row(arm: Streams, plain: Streams, shape: Shape, mode: str) -> dict[str, Any]:
    """Return the figures of one number of streams."""
    pairs = zip(plain.times_ms, arm.times_ms, strict=True)
    gain, quartiles = median_and_quartiles([before / after for before, after in pairs])
    return {
        "mode": mode,
        **shape._asdict(),
        "streams": arm.streams,
        "ms": statistics.median(arm.times_ms),
        "gain": gain,
        "gain_quartiles": quartiles,
        "same_bits": all(map(torch.equal, plain.looked_at(), arm.looked_at())),
        "pool_bytes": arm.pool_bytes(),
        "turns_ms": arm.times_ms,
    }


def main() -> None:
    """Measure every shape, print a table and write the figures."""
    parser = parser_of(__doc__, rounds=9)
    parser.add_argument("--size", choices=sorted(SHAPES), default="full")
    parser.add_argument("--block-s", type=float, default=0.03, help="seconds of a turn")
    args = parser.parse_args()
    use_deterministic_algorithms()
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
    write_rows(args, rows)


if __name__ == "__main__":
    main()
