"""Train a language model over a large vocabulary, without ever making its logits whole.

    python examples/06_large_vocabulary.py [--steps N] [--loss chunks|plain] [--device cpu|cuda]

The tokens are words and signs of Python's standard library, each of them a class. With --loss plain
the step makes logits of batch x length x vocabulary, their softmax and its gradient; with --loss
chunks, the default, those of some tokens at a time. The losses are the same up to rounding; the
memory is not. Figures vary with the version of Python, whose text it is:

    20,000 words; logits of a step: 78 MiB, of a chunk: 20 MiB
    step 20  loss 5.334
    step 40  loss 4.969
    step 60  loss 5.146
"""

import argparse
import re
import sysconfig
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchfast import Trainer
from torchfast.losses import linear_cross_entropy

VOCABULARY, WIDTH = 20_000, 128
Batch = tuple[Tensor, Tensor]


def read_words(most: int) -> Tensor:
    """Return the standard library as numbers of words; rare words are all number 0."""
    root = Path(sysconfig.get_paths()["stdlib"])
    words: list[str] = []
    for path in sorted(root.glob("*.py")) + sorted(root.glob("[a-s]*/*.py")):
        words += re.findall(r"\w+|[^\w\s]|\n", path.read_text(encoding="utf-8", errors="ignore"))
        if len(words) > most:
            break
    common = Counter(words).most_common(VOCABULARY - 1)
    numbers = {word: number for number, (word, _) in enumerate(common, start=1)}
    return torch.tensor([numbers.get(word, 0) for word in words])


class Model(nn.Module):
    """A recurrent network whose output layer is its embedding; it returns what goes into that."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        nn.init.normal_(self.embedding.weight, std=0.05)
        self.layers = nn.GRU(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, words: Tensor) -> Tensor:
        hidden: Tensor = self.norm(self.layers(self.embedding(words))[0])
        return hidden


def plain_loss(model: Model, batch: Batch) -> Tensor:
    words, targets = batch
    logits = F.linear(model(words), model.embedding.weight)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description="Train over a large vocabulary.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--loss", default="chunks", choices=["chunks", "plain"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    on_gpu = torch.device(args.device).type == "cuda"
    # "auto" would take all of the CPU's few tokens for one chunk.
    batch_size, length, chunk = (256, 128, 4096) if on_gpu else (16, 64, 256)

    def chunked_loss(model: Model, batch: Batch) -> Tensor:
        words, targets = batch
        # The same, but for the logits: hidden vectors and the layer's weight instead.
        return linear_cross_entropy(model(words), model.embedding.weight, targets, chunk_size=chunk)

    words = read_words(most=2_000_000 if on_gpu else 500_000)
    model = Model().to(args.device)
    trainer = Trainer(
        model,
        torch.optim.AdamW(model.parameters(), lr=4e-3),
        plain_loss if args.loss == "plain" else chunked_loss,
        plan="exact",
        max_grad_norm=1.0,
    )
    whole, part = (rows * VOCABULARY * 4 / 2**20 for rows in (batch_size * length, chunk))
    print(f"{VOCABULARY:,} words; logits of a step: {whole:,.0f} MiB, of a chunk: {part:,.0f} MiB")
    for number in range(1, args.steps + 1):
        starts = torch.randint(len(words) - length - 1, (batch_size, 1))
        places = starts + torch.arange(length + 1)
        drawn = words[places].to(args.device)
        loss = trainer.step((drawn[:, :-1], drawn[:, 1:]))
        if number % max(1, args.steps // 3) == 0:
            print(f"step {number}  loss {loss.item():.3f}")
    if on_gpu:
        print(f"peak memory: {torch.cuda.max_memory_allocated() / 2**20:,.0f} MiB")
    trainer.close()


if __name__ == "__main__":
    main()
