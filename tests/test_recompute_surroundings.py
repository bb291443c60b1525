"""The second run of a block finds what the first one found around it, or says what changed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from recomputed import train
from torchfast import Recompute
from torchfast._core.compare import differences


def square(model, batch):
    return model(batch).square().mean()


def assert_same_bits(model, what, loss_fn=square, width=8):
    """Train a copy as it is, and the model with recompute, and compare all they are."""
    torch.manual_seed(0)
    batch = torch.randn(4, 6, width, requires_grad=True)
    expected = train(copy.deepcopy(model), loss_fn, batch)
    with Recompute(model, what):
        assert differences(expected, train(model, loss_fn, batch)) == []


# --- arguments -----------------------------------------------------------------------------------


class SelfOrCross(nn.Module):
    """Asks whether two of its arguments are the same tensor, as attention does."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(8, 8)

    def forward(self, query, others):
        key = others["key"]
        return torch.tanh(self.line(query if query is key else query + key))


class OfBlocks(nn.Module):
    def __init__(self, make, call):
        super().__init__()
        self.blocks, self.call = nn.ModuleList(make() for _ in range(3)), call

    def forward(self, x):
        for block in self.blocks:
            x = self.call(block, x)
        return x


def attend_to_itself(block, x):
    return block(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("what", ["blocks", "selective"])
@pytest.mark.parametrize("kind", ["containers", "attention"])
def test_an_argument_that_stands_in_two_places_is_one_tensor(kind, what):
    torch.manual_seed(1)
    if kind == "containers":
        model = OfBlocks(SelfOrCross, lambda block, x: block(x, {"key": x}))
    else:
        model = OfBlocks(lambda: nn.MultiheadAttention(8, 2, batch_first=True), attend_to_itself)
    assert_same_bits(model, what)


def test_such_an_argument_is_given_to_hooks_once():
    packed = []

    def pack(tensor):
        packed.append(tensor)
        return tensor

    model = OfBlocks(SelfOrCross, lambda block, x: block(x, {"key": x}))
    with Recompute(model), torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
        model(torch.ones(2, 8, requires_grad=True)).sum().backward()
    assert len(packed) == 3
