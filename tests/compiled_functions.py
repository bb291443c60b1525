"""What the tests of the record compile."""

from __future__ import annotations

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.5)

    def forward(self, batch):
        return self.dropout(self.linear(batch["ids"]))


def double(x):
    return x * 2


def compiled(function, **options):
    return torch.compile(function, **{"backend": "eager", **options})
