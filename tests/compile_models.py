"""A small model with equal blocks, to be compiled where it stands."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from torchfast.compiler import CompiledModule


class Block(nn.Module):
    def __init__(self, width=8, layer_idx=0, reads_idx=False):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.layer_idx = layer_idx
        self.reads_idx = reads_idx

    def forward(self, x):
        y = x + self.down(F.gelu(self.up(self.norm(x))))
        return y * (1 + self.layer_idx) if self.reads_idx else y


class Net(nn.Module):
    def __init__(self, depth=4, reads_idx=False):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Block(8, i, reads_idx) for i in range(depth))
        self.head = nn.Linear(8, 16)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tokens(rows=2):
    return torch.arange(rows * 48).reshape(rows, 48) % 16


def compiled(model, **kwargs):
    return CompiledModule(model, **{"backend": "aot_eager", "regions": "blocks"} | kwargs)
