"""Blocks that are drawn at random train the same with recompute, whatever they are made of."""

from __future__ import annotations

import copy
import random
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from recomputed import as_if_compiled, with_and_without
from torchfast import RecomputeOptions
from torchfast._core.compare import differences

WIDTH = 8
WAYS = ["blocks", *(RecomputeOptions(selective=True, share=share) for share in (0.5, 0.75, 1.0))]
# What makes a new tensor, which a later operation may write to: nothing has saved it.
FRESH = {
    "conv": lambda on, x: on.layer(x),
    "norm": lambda on, x: on.layer(x),
    "shared norm": lambda on, x: on.block.norm(x),
    "double": lambda on, x: x * 2.0,
    "flip": lambda on, x: x.flip(0),
    "pool": lambda on, x: F.avg_pool2d(x, 3, 1, 1),
    "centre": lambda on, x: x - x.mean((2, 3), keepdim=True),
    "add input": lambda on, x: x + on.input,
    "add another": lambda on, x: x + on.another,
}
SAVED = {
    "relu": lambda on, x: on.block.relu(x),
    "F.relu": lambda on, x: F.relu(x),
    "torch.relu": lambda on, x: torch.relu(x),
    "Tensor.relu": lambda on, x: x.relu(),
    "sigmoid": lambda on, x: torch.sigmoid(x),
    "tanh": lambda on, x: torch.tanh(x),
    "silu": lambda on, x: F.silu(x),
    "dropout": lambda on, x: F.dropout(x, 0.2),
    "another": lambda on, x: on.keep(x),
}
IN_PLACE = {
    "relu_": lambda on, x: x.relu_(),
    "F.relu_": lambda on, x: F.relu(x, inplace=True),
    "under its old name": lambda on, x: (F.relu(x, inplace=True), x)[1],
    "module under its old name": lambda on, x: (on.block.relu_in_place(x), x)[1],
    "mul_": lambda on, x: x.mul_(0.7),
    "iadd input": lambda on, x: x.add_(on.input),
    "iadd another": lambda on, x: x.add_(on.another),
}
KINDS = FRESH | SAVED | IN_PLACE
RELUS = [kind for kind in KINDS if "relu" in kind or "old name" in kind]


class Call:
    """What the operations of one call know."""

    def __init__(self, block, x):
        self.block, self.layer = block, None
        self.input = self.another = x

    def keep(self, x):
        self.another = x
        return x


class Drawn(nn.Module):
    """A block of operations that a generator has chosen.

    Args:
        draw: The generator.
    """

    def __init__(self, draw):
        super().__init__()
        self.kinds = []
        for _ in range(draw.randint(2, 5)):
            self.kinds += draw.choice([["norm", draw.choice(RELUS)], [draw.choice([*KINDS])]])
        self.layers = nn.ModuleList(self._layer(kind, draw) for kind in self.kinds)
        self.norm, self.relu = nn.BatchNorm2d(WIDTH), nn.ReLU(inplace=False)
        self.relu_in_place = nn.ReLU(inplace=True)
        # Some do in each second or third call what they do not in the others.
        self.every = draw.choice([0, 0, 2, 3])
        self.num_calls = 0

    @staticmethod
    def _layer(kind, draw):
        if kind == "conv":
            size = draw.choice([1, 3])
            return nn.Conv2d(WIDTH, WIDTH, size, padding=size // 2, bias=draw.random() < 0.5)
        if kind != "norm":
            return None
        return nn.BatchNorm2d(
            WIDTH,
            affine=draw.random() < 0.8,
            track_running_stats=draw.random() < 0.85,
            momentum=draw.choice([0.1, None]),
        )

    def forward(self, x):
        if torch._C._current_graph_task_id() == -1:
            self.num_calls += 1
        leaves_out = self.every and self.num_calls % self.every == 0
        on, is_fresh = Call(self, x), False
        for number, kind in enumerate(self.kinds):
            if leaves_out and number % 2 and kind not in FRESH:
                continue
            if kind in IN_PLACE and not is_fresh:
                x = x + 0.0
            on.layer = self.layers[number] if kind in ("conv", "norm") else None
            x = KINDS[kind](on, x)
            is_fresh = kind in FRESH or kind in ("mul_", "iadd input", "iadd another")
        return x


class Net(nn.Module):
    def __init__(self, seed):
        super().__init__()
        draw = random.Random(seed)
        self.stem, self.head = nn.Conv2d(3, WIDTH, 3, padding=1), nn.Linear(WIDTH, 4)
        block = Drawn(draw)
        self.blocks = nn.ModuleList(copy.deepcopy(block) for _ in range(3))
        self.between = draw.choice([nn.Identity(), nn.Identity(), nn.Sigmoid(), nn.Dropout(0.1)])

    def forward(self, x):
        x = self.stem(x)
        for number, block in enumerate(self.blocks):
            x = block(x)
            x = self.between(x) if number == 0 else x
        return self.head(x.mean((2, 3)))


def loss_fn(model, batch, is_cast):
    with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
        return model(batch).float().square().mean()


def batch():
    return torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("first", range(0, 80, 10))
def test_bits(first, monkeypatch):
    as_if_compiled(monkeypatch)
    for seed in range(first, first + 10):
        loss = partial(loss_fn, is_cast=seed % 2 == 1)
        for what in WAYS:
            results = with_and_without(partial(Net, seed), what, loss, batch, seed=seed, steps=4)
            assert differences(*results) == [], (seed, what, Net(seed).blocks[0].kinds)
