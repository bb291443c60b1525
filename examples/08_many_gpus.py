"""Train a small Llama on one GPU or on many, with checkpoints that go over from one to the other.

    python examples/08_many_gpus.py [--steps N] [--shard ddp|fsdp|hsdp] [--device cpu|cuda]
    torchrun --nproc-per-node 2 examples/08_many_gpus.py [the same]

The text is Python's standard library, byte by byte. Under torchrun each rank has its share of the
model and reads its part of the data; by itself the script trains as ever. Stop it with Ctrl-C or
``kill``, start either command again, and it goes on where it was. On a CPU, with two ranks:

    step 20/60  loss 3.680  ...
    step 40/60  loss 2.761  ...
    step 60/60  loss 2.494  ...
    step 60  evaluation: loss 2.9214
"""

import argparse
import sys
import sysconfig
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.utils.data import DataLoader, TensorDataset

from torchfast import Plan, Trainer, Watchdog, start_ranks

Batch = tuple[Tensor]


class Block(nn.Module):
    """Attention with rotated positions, and a gated layer; as a Llama's, but for its size."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = (nn.Linear(width, n * width, bias=False) for n in (3, 1))
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
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
    blocks = (Block(width, width // 32) for _ in range(depth))
    head = nn.Linear(width, 256, bias=False)
    return nn.Sequential(nn.Embedding(256, width), *blocks, nn.RMSNorm(width), head)


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    tokens, targets = batch[0][:, :-1].long(), batch[0][:, 1:].long()
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small Llama on one GPU or on many.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--shard", default="fsdp", choices=["ddp", "fsdp", "hsdp"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("runs/many_gpus"))
    args = parser.parse_args()
    ranks = start_ranks()  # from here on "cuda" is this rank's GPU
    torch.manual_seed(0)
    on_gpu = torch.device(args.device).type == "cuda"
    width, depth, batch_size, length = (2048, 16, 4, 2048) if on_gpu else (64, 2, 8, 64)

    root = Path(sysconfig.get_paths()["stdlib"])
    source = b"".join(path.read_bytes() for path in sorted(root.glob("[a-m]*.py")))
    text = torch.frombuffer(bytearray(source), dtype=torch.uint8)
    windows = text[: len(text) // (length + 1) * (length + 1)].view(-1, length + 1)
    held_out, train = windows[:batch_size], windows[batch_size:]
    # A generator of its own: the order is then the same one on any number of ranks.
    order = torch.Generator().manual_seed(0)
    loader = DataLoader(TensorDataset(train), batch_size, shuffle=True, generator=order)

    model = llama(width, depth)
    build_optimizer = partial(torch.optim.AdamW, lr=3e-4 if on_gpu else 3e-3)
    plan = Plan.preset("fast" if on_gpu else "exact").replace(shard=args.shard)
    with Trainer(model, build_optimizer, loss_fn, plan, device=args.device) as trainer, Watchdog():
        result = trainer.fit(
            loader,
            steps=args.steps,
            evaluate=[(held_out,)],
            evaluate_every=args.steps,
            log_every=max(1, args.steps // 3),
            checkpoint=args.out,
        )
        # Every rank takes part in putting the shards together, and the first one has the result.
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(model, options=whole)
        if ranks.is_first:
            print(trainer.report())
            torch.save(weights, args.out / "model.pt")
    sys.exit(result.exit_code)  # 0, or what says to the scheduler that a signal ended it


if __name__ == "__main__":
    main()
