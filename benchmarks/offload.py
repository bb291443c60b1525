"""What offloading saves and costs: blocks of a transformer plain, offloaded, recomputed, and both.

    PYTHONPATH=. python benchmarks/offload.py [--shapes short long] [--modes eager graph]
        [--limit-s 500] [--size smoke] [--device cpu] [--out FILE]

A step is a forward and backward. All arms take turns, and a time is the median of its turns; the
ratio is the median of the quotients turn by turn. Peak memory is above what lives between steps.
The share of the bus is what one step sends and fetches, by its time and by what pinned copies in
one direction reach: up to two. "same" says that loss and gradients are those of the plain arm, bit
for bit.

Each row is written as it comes, beside those of earlier runs (`benchmarks.result_rows`). What the
limit leaves no time for is named in the file.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.arms import (
    Arm,
    parser_of,
    settings_of,
    steps_of_a_turn,
    take_turns,
    use_deterministic_algorithms,
)
from benchmarks.result_rows import ResultRows
from torchfast import ActivationOffload, CUDAGraphStep

MODES = ("eager", "graph")
ARMS = ("plain", "offload", "offload half", "offload auto", "recompute", "recompute, offload")


class Shape(NamedTuple):
    """A stack of blocks and its batch."""

    blocks: int
    width: int
    batch: int
    length: int


SHAPES = {
    "full": {
        "short": Shape(16, 2048, 8, 2048),
        "long": Shape(16, 2048, 1, 16384),
        "wide": Shape(8, 4096, 4, 4096),
    },
    "smoke": {"small": Shape(4, 16, 2, 8)},
}


class Block(nn.Module):
    """Attention and a feed-forward layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 128)
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor shaped as ``x``."""
        split = (*x.shape[:2], self.heads, -1)
        q, k, v = (t.reshape(split).transpose(1, 2) for t in self.qkv(self.before(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Way(Arm):
    """One way to hold what the forward saves, eager or in a graph."""

    def __init__(self, name: str, shape: Shape, mode: str, device: str, half: int | None) -> None:
        super().__init__(device)
        torch.manual_seed(0)
        self.name = name
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.blocks = nn.ModuleList(Block(shape.width) for _ in range(shape.blocks))
        self.blocks.to(device, dtype)
        size = (shape.batch, shape.length, shape.width)
        self.x = torch.randn(size, device=device, dtype=dtype)
        self.offload: Any = None
        if "offload" in name:
            limit = half if "half" in name else None
            small = 1 << 20 if device == "cuda" else 1
            self.offload = ActivationOffload(
                self.blocks, min_bytes=small, max_bytes=limit, auto="auto" in name
            )
        self.call: Any = self.step
        self.graph: Any = None
        for _ in range(8 if "auto" in name else 3):  # until the choice is settled
            self.result = self.step(self.x)
        self.peak_bytes = self.measured_peak()
        self.sent_bytes = self.measured_sent()
        if mode == "graph":
            self.call = self.graph = CUDAGraphStep(
                self.step, state=[self.blocks], on_failure="raise", check=False
            )
            for _ in range(5):
                self.result = self.call(self.x)

    def step(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the loss and two gradients, small ones."""
        self.blocks.zero_grad(set_to_none=True)
        with self.offload or nullcontext():
            for block in self.blocks:
                recomputes = "recompute" in self.name
                run = partial(checkpoint, block, use_reentrant=False) if recomputes else block
                x = run(x)
            loss = x.float().square().mean()
        loss.backward()
        found = self.blocks[0].qkv.bias.grad, self.blocks[-1].down.bias.grad
        return loss.detach(), *(gradient.clone() for gradient in found)

    def run(self) -> object:
        """Step, as it is or by its graph."""
        return self.call(self.x)

    def measured_peak(self) -> int:
        """Return by how much memory rises in a step."""
        if self.device != "cuda":
            return 0
        self.blocks.zero_grad(set_to_none=True)
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.step(self.x)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def measured_sent(self) -> int:
        """Return what a step sends to the host; it fetches as much."""
        if self.offload is None:
            return 0
        before = self.offload.counters()["offload_sent_bytes"]
        self.step(self.x)
        return self.offload.counters()["offload_sent_bytes"] - before

    def close(self) -> None:
        """Let go of graph and host memory."""
        if self.graph is not None:
            self.graph.close()
        if self.offload is not None:
            self.offload.close()


def bus_bytes_per_s(device: str) -> float | None:
    """Return what a pinned copy to the host reaches."""
    if device != "cuda":
        return None
    there = torch.empty(1 << 28, dtype=torch.uint8, device=device)
    here = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        here.copy_(there, non_blocking=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return here.numel() / min(times)


def measured(shape: Shape, mode: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each arm."""
    probe = Way("offload", shape, "eager", args.device, None)
    half = probe.sent_bytes // 2
    probe.close()
    del probe
    for name in ARMS:
        found = measured_arm(name, shape, mode, args, half)
        gc.collect()
        yield found


def measured_arm(
    name: str, shape: Shape, mode: str, args: argparse.Namespace, half: int
) -> dict[str, Any]:
    """Return the row of an arm, which takes turns with the plain one."""
    # Two at a time: all at once would not fit where offloading is worth it.
    pair = [Way(n, shape, mode, args.device, half) for n in dict.fromkeys(("plain", name))]
    try:
        steps = steps_of_a_turn(pair[0], args.block_s, fewest=3, most=50)
        take_turns(pair, args.rounds, 2 if args.size == "smoke" else steps)
        return row(pair[-1], pair[0], shape, mode, args.bus)
    finally:
        for arm in pair:
            arm.close()


def row(arm: Way, plain: Way, shape: Shape, mode: str, bus: float | None) -> dict[str, Any]:
    """Return the figures of one arm."""
    ratios = [after / before for before, after in zip(plain.times_ms, arm.times_ms, strict=True)]
    ms = statistics.median(arm.times_ms)
    return {
        "mode": mode,
        **shape._asdict(),
        "arm": arm.name,
        "ms": ms,
        "time_ratio": statistics.median(ratios),
        "peak_bytes": arm.peak_bytes,
        "saved_bytes": plain.peak_bytes - arm.peak_bytes,
        "sent_bytes": arm.sent_bytes,
        "bus_share": None if bus is None else 2 * arm.sent_bytes / (ms * 1e-3) / bus,
        "same_bits": all(map(torch.equal, plain.result, arm.result)),
        "turns_ms": arm.times_ms,
    }


def main() -> None:
    """Measure every shape, print a table and write the figures."""
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("--size", choices=sorted(SHAPES), default="full")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES["full"])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["eager"])
    parser.add_argument("--block-s", type=float, default=0.5, help="seconds of a turn")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="begin nothing later")
    args = parser.parse_args()
    deadline = time.monotonic() + args.limit_s
    use_deterministic_algorithms()
    args.bus = bus_bytes_per_s(args.device)
    if args.bus is not None:
        print(f"the bus reaches {args.bus / 1e9:.1f} GB/s to the host")
    rows = ResultRows(args.out, ("name", "mode", "arm"), settings_of(args))
    print(f"{'shape':<6} {'mode':<6} {'arm':<20} {'ms':>9} {'ratio':>7} {'peak GB':>8} {'bus':>5}")
    for name in args.shapes or SHAPES[args.size]:
        for mode in args.modes if args.device == "cuda" else ("eager",):
            if time.monotonic() > deadline:
                rows.leave_out(name, mode, "no time was left", bus_bytes_per_s=args.bus)
                print(f"{name:<6} {mode:<6} left out: no time was left")
                continue
            for found in measured(SHAPES[args.size][name], mode, args):
                # After each: whoever interrupts keeps what there is.
                rows.add({"name": name, **found}, bus_bytes_per_s=args.bus)
                share = "" if found["bus_share"] is None else f"{found['bus_share']:.0%}"
                print(
                    f"{name:<6} {mode:<6} {found['arm']:<20} {found['ms']:>9.2f} "
                    f"{found['time_ratio']:>7.3f} {found['peak_bytes'] / 1e9:>8.2f} {share:>5}  "
                    f"{'same' if found['same_bits'] else 'OTHER'}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
