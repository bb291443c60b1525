"""Train a small Llama with float8 products and an optimizer of 8 bits.

    python examples/09_below_bf16.py [--steps N] [--format bf16|fp8] [--state 32|8] [--device ...]

The text is Python's standard library, byte by byte. On a GPU with float8 units each shape of a
linear layer is timed in float8 and in bf16, and takes what is faster; elsewhere float8 is emulated,
which shows the numbers and not the speed. On a CPU (figures vary with the version of Python):

    step 20  loss 2.996
    step 40  loss 2.503
    step 60  loss 2.465

and a report of what became of each layer, and how far loss and gradient are from bf16.
"""

import argparse
import sysconfig
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchfast import Float8Options, Plan, Trainer

Batch = tuple[Tensor, Tensor]


class Block(nn.Module):
    """Attention with rotated positions, and a gated layer; as a Llama's, but for its size."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (
            layer(h).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(
            rotated(q), rotated(k), v.to(q.dtype), is_causal=True
        )
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        h = self.norm2(x)
        gated: Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return gated


def rotated(x: Tensor) -> Tensor:
    """Turn pairs of values by an angle that grows with the position."""
    length, half = x.shape[-2], x.shape[-1] // 2
    rates = 10_000.0 ** -(torch.arange(half, device=x.device) / half)
    angles = torch.outer(torch.arange(length, device=x.device), rates)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def llama(width: int, depth: int) -> nn.Module:
    return nn.Sequential(
        nn.Embedding(256, width),
        *(Block(width, width // 32) for _ in range(depth)),
        nn.RMSNorm(width),
        nn.Linear(width, 256, bias=False),
    )


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small Llama below bf16.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--format", default="fp8", choices=["bf16", "fp8"])
    parser.add_argument("--state", default="8", choices=["32", "8"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    on_gpu = torch.device(args.device).type == "cuda"
    width, depth, batch_size, length = (2048, 8, 8, 2048) if on_gpu else (64, 2, 8, 64)
    emulated = Float8Options(recipe="tensorwise", smallest=16, emulate=True)
    plan = Plan.preset("fast").replace(
        precision="bf16" if args.format == "bf16" else "fp8" if on_gpu else emulated,
        optimizer="adamw8bit" if args.state == "8" else "fused",
    )
    trainer = Trainer(
        llama(width, depth).to(args.device),
        partial(torch.optim.AdamW, lr=3e-4 if on_gpu else 3e-3),
        loss_fn,
        plan=plan,
        max_grad_norm=1.0,
    )
    root = Path(sysconfig.get_paths()["stdlib"])
    text = torch.tensor(list(b"".join(p.read_bytes() for p in sorted(root.glob("[a-d]*.py")))))
    for number in range(1, args.steps + 1):
        starts = torch.randint(len(text) - length - 1, (batch_size, 1))
        drawn = text[starts + torch.arange(length + 1)].to(args.device)
        loss = trainer.step((drawn[:, :-1], drawn[:, 1:]))
        if number % max(1, args.steps // 3) == 0:
            print(f"step {number}  loss {loss.item():.3f}")
    print(trainer.report())
    trainer.close()


if __name__ == "__main__":
    main()
