"""Train a byte-level GPT on Python's standard library, with a plain PyTorch loop.

    python examples/00_plain_loop.py [--steps N] [--size tiny|small|base] [--device cpu|cuda]

About every 20th file is held out. The model has 86 million parameters on a GPU and 0.4 million on a
CPU, where two cores take two minutes. Figures vary with the version of Python, whose text it is:

    held-out: 1.896 bits per byte; 45,000 tokens/s

    def __splite__(self, func, formation):
        \"""Add the class an for than bytes to struct.

            The suffer a system object callable are topen
            Text 0 and to dirname defined and with Note if bytes:
                            try:
                                  arenv_self._filength.get()
"""

import argparse
import json
import math
import statistics
import sysconfig
import time
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, RandomSampler, Subset, TensorDataset

Batch = tuple[Tensor, ...]  # tokens and targets, both int64, of shape (batch, context)


class Size(NamedTuple):
    layers: int
    width: int  # in attention heads of width 64
    context: int
    batch: int
    steps: int
    lr: float


SIZES = {
    "tiny": Size(layers=2, width=128, context=128, batch=12, steps=3000, lr=4e-3),
    "small": Size(layers=6, width=384, context=256, batch=64, steps=2000, lr=1e-3),
    "base": Size(layers=12, width=768, context=1024, batch=32, steps=1500, lr=6e-4),
}
HELD_OUT_BYTES = 2**17  # what one evaluation reads, spread evenly over the held-out files


def read_standard_library() -> tuple[Tensor, Tensor]:
    """Return the training bytes and the held-out bytes, which are about every 20th file."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    train, held_out = bytearray(), bytearray()
    for name in sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py")):
        if skipped.isdisjoint(name.split("/")):
            split = held_out if zlib.crc32(name.encode()) % 20 == 0 else train
            split += (root / name).read_bytes()
    return torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(held_out, dtype=torch.uint8)


def windows(data: Tensor, context: int) -> TensorDataset:
    """Return every window of ``context`` bytes with, as targets, the bytes one further on."""
    rows = data.long().unfold(0, context + 1, 1)  # views that overlap: a window costs no memory
    return TensorDataset(rows[:, :-1], rows[:, 1:])


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, -1, 64)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        mixed: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + mixed


class GPT(nn.Module):
    """A pre-norm causal transformer over bytes; the output layer is the embedding again."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, size.width)
        self.position = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size.width) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:  # what ends a residual branch is added up 2 * layers times
                terms = 2 * size.layers if name.endswith(("proj.weight", "down.weight")) else 1
                nn.init.normal_(weight, std=0.5 / math.sqrt(size.width * terms))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embed.weight)


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader[Batch], device: str) -> float:
    model.eval()
    losses = [loss_fn(model, (x.to(device), y.to(device))) for x, y in loader]
    model.train()
    return torch.stack(losses).mean().item()


@torch.no_grad()
def sample(model: GPT, prompt: str, num_bytes: int, temperature: float = 0.8) -> str:
    model.eval()
    text = torch.tensor([list(prompt.encode())], device=model.embed.weight.device)
    for _ in range(num_bytes):
        logits = model(text[:, -model.position.num_embeddings :])[:, -1] / temperature
        text = torch.cat([text, torch.multinomial(logits.softmax(-1), num_samples=1)], dim=1)
    return bytes(text[0].tolist()).decode("ascii", errors="backslashreplace")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a byte-level GPT.")
    parser.add_argument("--steps", type=int, help="optimizer updates; by default the size's own")
    parser.add_argument("--size", choices=SIZES, help="by default base on a GPU, tiny on a CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/plain"))
    args = parser.parse_args()
    size = SIZES[args.size or ("tiny" if args.device == "cpu" else "base")]
    steps = args.steps or size.steps
    log_every, evaluate_every = max(1, steps // 25), max(1, steps // 5)
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)

    train, held_out = (windows(data, size.context) for data in read_standard_library())
    order = torch.Generator().manual_seed(args.seed)
    sampler = RandomSampler(train, True, num_samples=steps * size.batch, generator=order)
    train_loader = DataLoader(train, size.batch, sampler=sampler)
    starts = range(0, len(held_out), len(held_out) * size.context // HELD_OUT_BYTES)
    held_out_loader = DataLoader(Subset(held_out, starts), size.batch, drop_last=True)

    model = GPT(size).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), size.lr, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,  # a linear warm-up over the first 5 %, then a cosine from 1 down to 0.1
        lambda step: min(20 * (step + 1) / steps, 0.55 + 0.45 * math.cos(math.pi * step / steps)),
    )

    history: list[dict[str, Any]] = []
    losses: list[Tensor] = []
    started = time.perf_counter()
    for step, (tokens, targets) in enumerate(train_loader, start=1):
        optimizer.zero_grad(set_to_none=True)
        loss = loss_fn(model, (tokens.to(args.device), targets.to(args.device)))
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.detach())
        if step % log_every == 0:
            mean_loss = torch.stack(losses).mean().item()
            items_per_s = len(losses) * tokens.numel() / (time.perf_counter() - started)
            print(f"step {step}/{steps}  loss {mean_loss:.4f}  {items_per_s:,.0f} tokens/s")
            history.append({"step": step, "loss": mean_loss, "items_per_s": items_per_s})
            losses, started = [], time.perf_counter()
        if step % evaluate_every == 0 or step == steps:
            held_out_loss = evaluate(model, held_out_loader, args.device)
            print(f"step {step}  held-out loss {held_out_loss:.4f}")
            history.append({"step": step, "evaluation": {"loss": held_out_loss}})
            started = time.perf_counter()

    torch.save(model.state_dict(), args.out / "model.pt")
    evaluations = [(r["step"], r["evaluation"]["loss"]) for r in history if "evaluation" in r]
    curves = {
        "train": [(r["step"], r["loss"] / math.log(2)) for r in history if "loss" in r],
        "held-out": [(step, loss / math.log(2)) for step, loss in evaluations],
    }
    (args.out / "curves.json").write_text(json.dumps(curves))
    speed = statistics.median(r["items_per_s"] for r in history if "loss" in r)
    print(f"held-out: {curves['held-out'][-1][1]:.3f} bits per byte; {speed:,.0f} tokens/s")
    torch.manual_seed(args.seed)
    print(sample(model, "\n\ndef ", num_bytes=400))


if __name__ == "__main__":
    main()
