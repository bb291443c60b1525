"""A small model of blocks for compiled steps, and what a trainer reports of them."""

from __future__ import annotations

from torch import nn

from models import make_batches

BATCHES = make_batches(4)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        return x + self.linear(self.norm(x)).relu()


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def compiled_in(trainer):
    return [d for d in trainer.report().decisions if d.lever == "compile"]


def counter(trainer, name):
    return trainer.report().counters.get(f"compile_{name}", 0)
