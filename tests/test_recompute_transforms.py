"""Blocks that call their layers under torch's transforms of functions are recomputed as others."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import jvp, vmap

from recomputed import train
from torchfast import Recompute, RecomputeOptions
from torchfast._core.compare import differences

# Torch scripts a few decompositions when forward-mode derivatives are taken for the first time.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated:DeprecationWarning"
)


class Block(nn.Module):
    """Reads a norm by two layers, one of them under ``vmap``."""

    def __init__(self):
        super().__init__()
        self.norm, self.line, self.other = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.is_mapped = True

    def mapped(self, function):
        return vmap(function) if self.is_mapped else function

    def forward(self, x):
        y = self.norm(x)
        return x + self.mapped(lambda v: torch.tanh(self.line(v)))(y) * self.other(y)


class NormInside(Block):
    def forward(self, x):
        return x + self.mapped(lambda v: torch.tanh(self.line(self.norm(v))))(x)


class Directional(Block):
    def forward(self, x):
        return x + jvp(lambda v: torch.tanh(self.line(self.norm(v))), (x,), (x.cos(),))[1]


class Attends(Block):
    def forward(self, x):
        q, k = self.line(x) * 1.5, self.other(x).cos()
        q, k = q.unsqueeze(-3), k.unsqueeze(-3)
        return x + self.mapped(F.scaled_dot_product_attention)(q, k, k * 2).squeeze(-3)


class AttendsInside(Block):
    def forward(self, x):
        def attend(v):
            q, k = self.line(v) * 1.5, self.other(v) * 0.5
            return F.scaled_dot_product_attention(q[None], k[None], k[None])[0]

        return x + self.mapped(attend)(x)


def square(model, batch):
    return model(batch).square().mean()


BLOCKS = pytest.mark.parametrize("block", [Block, NormInside, Directional, Attends, AttendsInside])


@BLOCKS
@pytest.mark.parametrize("what", ["blocks", "selective"])
def test_layers_under_a_transform(block, what):
    torch.manual_seed(0)
    model, batch = nn.Sequential(*(block() for _ in range(3))), torch.randn(4, 6, 8)
    expected = train(copy.deepcopy(model), square, batch)
    with Recompute(model, what):
        assert differences(expected, train(model, square, batch)) == []


@BLOCKS
@pytest.mark.parametrize("size", [1, 4])
def test_only_some_calls_are_under_a_transform(block, size):
    """What is kept was chosen in a call that was not; one of a batch saves what it would alone."""
    torch.manual_seed(0)
    model, batch = nn.Sequential(*(block() for _ in range(3))), torch.randn(size, 6, 8)
    plain = copy.deepcopy(model)
    with Recompute(model, RecomputeOptions(selective=True, share=1.0)):
        for is_mapped in (False, True, False, True):
            for one in (plain, model):
                one.zero_grad()
                for part in one:
                    part.is_mapped = is_mapped
                square(one, batch).backward()
            found = [[p.grad for p in one.parameters()] for one in (plain, model)]
            pairs = [pair for pair in zip(*found, strict=True) if pair[0] is not None]
            assert pairs
            assert all(torch.equal(*pair) for pair in pairs)
