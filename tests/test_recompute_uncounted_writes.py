"""Writes that autograd does not count, to what selective recompute would have kept."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from recomputed import train
from torchfast import Recompute, RecomputeOptions
from torchfast._core.compare import differences


class Recurrent(nn.Module):
    """Torch's own layers write to the gates that they make by one product."""

    def __init__(self, make):
        super().__init__()
        self.layer = make(8, 8)

    def forward(self, x):
        if isinstance(self.layer, nn.RNNCellBase):
            made = self.layer(x.flatten(0, 1))
            made = made[0] if isinstance(made, tuple) else made
            return x + made.view_as(x)
        return x + self.layer(x)[0]


class Gated(nn.Module):
    def __init__(self, write):
        super().__init__()
        self.first, self.second, self.write = nn.Linear(8, 16), nn.Linear(16, 8), write

    def forward(self, x):
        return x + self.second(self.write(self.first(x)).sin())


def through_data(y):
    y.data.mul_(2)
    return y


def through_chunks(y):
    return torch.cat([part.mul_(2) for part in y.unsafe_chunk(2, -1)], -1)


def through_splits(y):
    first, second = torch.unsafe_split(y, 8, -1)
    return torch.cat([first.sigmoid_(), second.tanh_()], -1)


def counted(y):
    return y.mul_(2)


def counted_in_a_list(y):
    torch._foreach_mul_([y], 2.0)
    return y


MODELS = {
    **{
        kind.__name__: lambda kind=kind: Recurrent(kind)
        for kind in (nn.GRU, nn.LSTM, nn.RNN, nn.GRUCell, nn.LSTMCell, nn.RNNCell)
    },
    **{
        write.__name__: lambda write=write: Gated(write)
        for write in (through_data, through_chunks, through_splits, counted, counted_in_a_list)
    },
}


@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("name", MODELS)
def test_what_was_written_to_is_computed_again(name, share):
    torch.manual_seed(1)
    model = nn.Sequential(MODELS[name](), MODELS[name]())
    # Of two dimensions: a dispatch mode by itself makes torch's lists of views another thing.
    batch = torch.randn(4, 8) if name == "counted_in_a_list" else torch.randn(3, 5, 8)
    expected = train(copy.deepcopy(model), square, batch)
    with Recompute(model, RecomputeOptions(selective=True, share=share)):
        assert differences(expected, train(model, square, batch)) == []


class Between(nn.Module):
    """Its first product is no layer's, so a dispatch mode keeps it."""

    def __init__(self, write):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(16, 8) / 3), nn.Parameter(torch.zeros(16))
        self.second, self.write = nn.Linear(16, 8), write

    def forward(self, x):
        y = nn.functional.linear(x, self.weight, self.bias)
        return x + self.second(self.write(y).sin())


def counted_then_chunks(y):
    return torch.cat(torch.unsafe_chunk(y.mul_(2), 2, -1), -1)


def counted_then_splits(y):
    y += 1
    return torch.cat(torch.unsafe_split(y, 8, -1), -1)


def counted_then_sizes(y):
    return torch.cat(torch.unsafe_split_with_sizes(y.mul_(2), [8, 8], -1), -1)


def counted_then_view(y):
    return torch.ops.aten._unsafe_view(y.mul_(2), list(y.shape))


@pytest.mark.parametrize(
    "write", [counted_then_chunks, counted_then_splits, counted_then_sizes, counted_then_view]
)
def test_a_counted_write_in_front_of_a_view_that_counts_for_itself_is_not_forgotten(write):
    torch.manual_seed(1)
    model = nn.Sequential(Between(write), Between(write))
    batch = torch.randn(4, 8)
    expected = train(copy.deepcopy(model), square, batch)
    with Recompute(model, RecomputeOptions(selective=True, share=1.0)):
        assert differences(expected, train(model, square, batch)) == []


def square(model, batch):
    return model(batch).square().mean()


@pytest.mark.parametrize(("write", "kept"), [(torch.clone, 1), (counted, 1), (through_data, 0)])
def test_only_what_was_written_to_uncounted_is_not_kept(write, kept):
    """Others are kept as ever: whether a write that is counted has come is seen in each call."""
    model = nn.Sequential(Gated(write))
    options = RecomputeOptions(regions=("0",), selective=True, share=1.0)
    with Recompute(model, options) as recompute:
        model(torch.randn(4, 8)).sum().backward()
        assert f"keeps {kept} of 2 products" in recompute.decisions()[0].detail
