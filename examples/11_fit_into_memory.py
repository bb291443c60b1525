"""Train a GPT within so many gigabytes: measure what recompute saves, and take what fits.

    python examples/11_fit_into_memory.py [--steps N] [--memory-gb GB] [--device cpu|cuda]

The planner runs the model as it would train, in each way to recompute, and says what a step keeps
and takes. The cheapest that fits becomes the plan. Where the odd batch is too large all the same,
its step runs in parts. On a CPU, where the choice and the loss vary with the machine and with the
version of Python, whose text it is:

    none                         0.0086     1.00    458.77     1.00  too large
    blocks, one of 4             0.0068     0.79    458.77     1.00  <- chosen
    ...
    step 20  loss 2.486
    step 40  loss 2.514
    step 60  loss 2.237

and a report, with the blocks that are recomputed and the attention that ran.
"""

import argparse
import sysconfig
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchfast import Plan, Trainer, plan_recompute

Batch = tuple[Tensor, Tensor]


class Block(nn.Module):
    """Attention and a feed-forward layer, each added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, -1, 32)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        fed: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return fed


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a GPT within so many gigabytes.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--memory-gb", type=float, help="for a step, with model and optimizer")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    on_gpu = torch.device(args.device).type == "cuda"
    width, depth, batch_size, length = (1024, 24, 16, 1024) if on_gpu else (64, 4, 8, 64)
    memory_gb = (24.0 if on_gpu else 0.012) if args.memory_gb is None else args.memory_gb
    model = nn.Sequential(
        nn.Embedding(256, width),
        *(Block(width) for _ in range(depth)),
        nn.LayerNorm(width),
        nn.Linear(width, 256),
    ).to(args.device)
    optimizer = partial(torch.optim.AdamW, lr=3e-4 if on_gpu else 3e-3)

    root = Path(sysconfig.get_paths()["stdlib"])
    text = torch.tensor(list(b"".join(p.read_bytes() for p in sorted(root.glob("[a-d]*.py")))))

    def draw() -> Batch:
        starts = torch.randint(len(text) - length - 1, (batch_size, 1))
        drawn = text[starts + torch.arange(length + 1)].to(args.device)
        return drawn[:, :-1], drawn[:, 1:]

    autocast = torch.bfloat16 if on_gpu else None
    plan = plan_recompute(
        model,
        loss_fn,
        draw(),
        memory_gb=memory_gb,
        optimizer=optimizer(model.parameters()),  # whose state takes memory, too
        autocast=autocast,
        cuda_graph=on_gpu,  # as the plan below has it, so its times are those of replays
    )
    print(plan)
    if plan.choice is None:
        raise SystemExit(f"nothing fits into {memory_gb} GB")
    print(f"takes recompute={plan.choice.recompute!r}")
    trainer = Trainer(
        model,
        optimizer,
        loss_fn,
        plan=Plan(
            precision="bf16" if on_gpu else "as_given",
            recompute=plan.choice.recompute,
            cuda_graph=on_gpu,
            out_of_memory="split",
        ),
        max_grad_norm=1.0,
    )
    for number in range(1, args.steps + 1):
        loss = trainer.step(draw())
        if number % max(1, args.steps // 3) == 0:
            print(f"step {number}  loss {loss.item():.3f}")
    if on_gpu:
        print(f"at the peak: {torch.cuda.max_memory_allocated() / 1e9:.2f} GB")
    print(trainer.report())
    trainer.close()


if __name__ == "__main__":
    main()
