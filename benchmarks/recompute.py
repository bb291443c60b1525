"""What recompute saves and costs: a GPT and a ResNet, eager or as one graph.

    PYTHONPATH=. python benchmarks/recompute.py [--size smoke] [--device cpu] [--out FILE]

A step is forward, backward and update by a `Trainer`. All ways take turns, and a figure is the
median of its turns; the cost is the median of the quotients to no recompute, turn by turn, with its
quartiles. "planned" and "saved" are what `plan_recompute` said before: the cost, and what a forward
keeps for the backward; "peak" is the device's own figure, of an eager step. "same" says that the
losses are those without recompute, bit for bit.
"""

from __future__ import annotations

import argparse
import statistics
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
from torchfast import Plan, RecomputePlan, Trainer, plan_recompute

WAYS: tuple[bool | str, ...] = (False, "selective", "blocks")
MODES = ("eager", "graph")


class Shape(NamedTuple):
    """A model and its batch."""

    model: str
    layers: int
    width: int
    batch: int
    length: int


SHAPES = {
    "full": {
        "GPT-2 small": Shape("gpt", 12, 768, 16, 1024),
        "GPT-2 medium": Shape("gpt", 24, 1024, 8, 1024),
        "ResNet": Shape("resnet", 16, 256, 64, 56),
    },
    "smoke": {"GPT": Shape("gpt", 2, 32, 2, 16), "ResNet": Shape("resnet", 2, 16, 2, 8)},
}
VOCABULARY = 512


class Block(nn.Module):
    """A block of a GPT."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = max(1, width // 64)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor shaped as ``x``."""
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        down: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + down


class Residual(nn.Module):
    """A bottleneck of a ResNet."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = width // 4
        self.convs = nn.ModuleList(
            nn.Conv2d(a, b, k, padding=k // 2, bias=False)
            for a, b, k in ((width, inner, 1), (inner, inner, 3), (inner, width, 1))
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in (inner, inner, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor shaped as ``x``."""
        y = x
        for number, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            y = norm(conv(y))
            y = F.relu(y, inplace=True) if number < 2 else F.relu(y + x)
        return y


class Model(nn.Module):
    """A stack of blocks between an embedding and a head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        is_gpt = shape.model == "gpt"
        self.embed = (
            nn.Embedding(VOCABULARY, shape.width) if is_gpt else nn.Conv2d(3, shape.width, 1)
        )
        kind = Block if is_gpt else Residual
        self.blocks = nn.ModuleList(kind(shape.width) for _ in range(shape.layers))
        self.head = nn.Linear(shape.width, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x if x.dim() == 3 else x.mean((2, 3)))
        return logits


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the loss."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def batch_of(shape: Shape, device: str) -> tuple[Tensor, Tensor]:
    """Return inputs and targets."""
    generator = torch.Generator().manual_seed(0)
    if shape.model == "gpt":
        tokens = torch.randint(VOCABULARY, (shape.batch, shape.length), generator=generator)
        return tokens.to(device), tokens.to(device)
    pixels = torch.randn(shape.batch, 3, shape.length, shape.length, generator=generator)
    labels = torch.randint(VOCABULARY, (shape.batch,), generator=generator)
    return pixels.to(device), labels.to(device)


class Way(Arm):
    """One way to recompute."""

    def __init__(self, shape: Shape, mode: str, way: bool | str, device: str) -> None:
        super().__init__(device)
        torch.manual_seed(0)
        self.way = way
        model = Model(shape).to(device)
        self.batch = batch_of(shape, device)
        is_cuda = device == "cuda"
        plan = Plan(
            precision="bf16" if is_cuda else "as_given", recompute=way, cuda_graph=mode == "graph"
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self.trainer = Trainer(model, optimizer, loss_fn, plan)
        self.losses = [self.trainer.step(self.batch).clone() for _ in range(6)]
        self.peak_bytes = self._peak() if is_cuda and mode == "eager" else None

    def _peak(self) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.losses.append(self.trainer.step(self.batch).clone())
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def run(self) -> object:
        """Train one step."""
        return self.trainer.step(self.batch)

    def close(self) -> None:
        """Give the model back."""
        self.trainer.close()


def planned(shape: Shape, device: str) -> RecomputePlan:
    """Return what the planner says."""
    torch.manual_seed(0)
    model = Model(shape).to(device)
    autocast = torch.bfloat16 if device == "cuda" else None
    batch = batch_of(shape, device)
    return plan_recompute(model, loss_fn, batch, memory_gb=80.0, autocast=autocast)


def measured(
    shape: Shape, mode: str, plan: RecomputePlan, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return a row for each way."""
    arms = [Way(shape, mode, way, args.device) for way in WAYS]
    try:
        plain = arms[0]
        steps = steps_of_a_turn(plain, args.block_s, fewest=2, most=200)
        take_turns(arms, args.rounds, 1 if args.size == "smoke" else steps)
        return [row(arm, plain, shape, mode, plan) for arm in arms]
    finally:
        for arm in arms:
            arm.close()


def row(arm: Way, plain: Way, shape: Shape, mode: str, plan: RecomputePlan) -> dict[str, Any]:
    """Return the figures of one way."""
    pairs = zip(plain.times_ms, arm.times_ms, strict=True)
    cost, quartiles = median_and_quartiles([after / before for before, after in pairs])
    choices = {choice.recompute: choice for choice in plan.choices}
    return {
        "mode": mode,
        **shape._asdict(),
        "recompute": arm.way,
        "ms": statistics.median(arm.times_ms),
        "cost": cost,
        "cost_quartiles": quartiles,
        "same_bits": all(map(torch.equal, plain.losses, arm.losses)),
        "peak_bytes": arm.peak_bytes,
        "planned_bytes": choices[arm.way].saved_bytes,
        "planned_cost": choices[arm.way].step_ms / choices[False].step_ms,
        "turns_ms": arm.times_ms,
    }


def main() -> None:
    """Measure every shape, print a table and write the figures."""
    parser = parser_of(__doc__, rounds=9)
    parser.add_argument("--size", choices=sorted(SHAPES), default="full")
    parser.add_argument("--block-s", type=float, default=0.5, help="seconds of a turn")
    args = parser.parse_args()
    use_deterministic_algorithms()
    rows = []
    print(
        f"{'model':<14} {'mode':<6} {'recompute':<10} {'ms':>9} {'cost (quartiles)':>24} "
        f"{'planned':>8} {'saved MiB':>10} {'peak MiB':>9}  bits"
    )
    for name, shape in SHAPES[args.size].items():
        plan = planned(shape, args.device)
        for mode in MODES:
            if mode == "graph" and args.device != "cuda":
                continue
            for found in measured(shape, mode, plan, args):
                rows.append({"name": name, **found})
                low, high = found["cost_quartiles"]
                cost = f"{found['cost']:.3f} ({low:.3f} to {high:.3f})"
                peak = f"{found['peak_bytes'] / 2**20:,.0f}" if found["peak_bytes"] else "-"
                print(
                    f"{name:<14} {mode:<6} {found['recompute'] or 'none':<10} {found['ms']:>9.3f} "
                    f"{cost:>24} {found['planned_cost']:>8.3f} "
                    f"{found['planned_bytes'] / 2**20:>10,.1f} {peak:>9}  "
                    f"{'same' if found['same_bits'] else 'OTHER'}",
                    flush=True,
                )
                write_rows(args, rows)  # after each: whoever interrupts keeps what there is


if __name__ == "__main__":
    main()
