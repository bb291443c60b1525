"""Buffers that not every call of a block writes to, and parts that come behind its first call."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from recomputed import train
from torchfast import Recompute
from torchfast._core.compare import differences

BOTH = pytest.mark.parametrize("what", ["blocks", "selective"])


def square(model, batch):
    return model(batch).square().mean()


def three(make):
    torch.manual_seed(1)
    return nn.Sequential(*(make() for _ in range(3)))


class Sometimes(nn.Module):
    """Writes to a buffer, and reads it, in every second call of its own."""

    def __init__(self, first, width=8):
        super().__init__()
        self.line, self.writes = nn.Linear(8, 8), first
        self.register_buffer("scale", torch.ones(width))

    def forward(self, x):
        if self.writes:
            with torch.no_grad():
                self.scale.mul_(0.5).add_(0.5 * x.abs().mean())
        return x + torch.tanh(self.line(x)) * self.scale[:8].clone()


def gradients(model, num=4):
    found = []
    for _ in range(num):
        model.zero_grad()
        square(model, torch.linspace(-1, 1, 32).view(4, 8)).backward()
        found.append([p.grad.clone() for p in model.parameters()])
        for block in model:
            block.writes = not block.writes
    return found


def assert_as_without(model, what, caplog):
    """Compare the gradients with those of a copy without recompute; nothing is warned of."""
    expected = gradients(copy.deepcopy(model))
    with Recompute(model, what):
        assert differences(expected, gradients(model)) == []
    assert caplog.records == []


@BOTH
@pytest.mark.parametrize("first", [True, False])
def test_a_buffer_that_some_calls_write_to(first, what, caplog):
    assert_as_without(three(partial(Sometimes, first)), what, caplog)


@BOTH
def test_a_large_one_that_a_later_call_is_the_first_to_write_to_is_warned_of(what, caplog):
    model = three(partial(Sometimes, False, width=2**15))
    expected = gradients(copy.deepcopy(model), num=5)
    with Recompute(model, what):
        found = gradients(model, num=5)
    off = [bool(differences(a, b)) for a, b in zip(expected, found, strict=True)]
    assert off == [False, True, False, False, False]
    assert [record.message.partition(",")[0] for record in caplog.records] == [
        "scale of Sometimes"
    ] * 3


@BOTH
def test_a_large_one_that_a_later_call_replaces_is_what_it_was(what, caplog):
    class Replaces(Sometimes):
        def forward(self, x):
            if self.writes:
                self.scale = self.scale * 0.5
            return x + torch.tanh(self.line(x)) * self.scale[:8]

    assert_as_without(three(partial(Replaces, False, width=2**15)), what, caplog)


@BOTH
def test_a_large_one_that_a_later_call_takes_away_is_what_it_was(what, caplog):
    class TakesAway(Sometimes):
        def forward(self, x):
            scale = 1.0 if self.scale is None else self.scale[:8] * 3
            if self.writes:
                self.scale = None
            return x + torch.tanh(self.line(x)) * scale

    assert_as_without(three(partial(TakesAway, False, width=2**15)), what, caplog)


@BOTH
def test_a_large_one_whose_memory_a_later_call_writes_to_is_warned_of(what, caplog):
    class ThroughData(Sometimes):
        def forward(self, x):
            if self.writes:
                self.scale = self.scale.data
                self.scale.mul_(0.5)
            return x + torch.tanh(self.line(x)) * self.scale[:8].clone()

    model = three(partial(ThroughData, False, width=2**15))
    with Recompute(model, what):
        gradients(model, num=2)
    assert len(caplog.records) == 3


@BOTH
@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.uint8, torch.complex64], ids=str)
def test_a_small_one_of_any_dtype_is_what_it_was(dtype, what, caplog):
    class Flags(Sometimes):
        def __init__(self):
            super().__init__(False)
            self.register_buffer("flags", torch.ones(8, dtype=dtype))

        def forward(self, x):
            on = self.flags.abs() if dtype.is_complex else self.flags.clone()
            if self.writes:
                self.flags.zero_()
            return x + torch.tanh(self.line(x)) * on

    assert_as_without(three(Flags), what, caplog)


@BOTH
def test_buffers_of_any_form_may_stand_in_a_block(what):
    class Holds(nn.Module):
        def __init__(self):
            super().__init__()
            self.line = nn.Linear(8, 8)
            self.register_buffer("edges", torch.eye(8).to_sparse())
            self.register_buffer("mask", torch.ones(8, dtype=torch.bool))
            self.register_buffer("none", torch.ones(0))

        def forward(self, x):
            return x + torch.sparse.mm(self.edges, torch.tanh(self.line(x)).T).T * self.mask

    model, batch = three(Holds), torch.randn(4, 8)
    expected = train(copy.deepcopy(model), square, batch)
    with Recompute(model, what):
        assert differences(expected, train(model, square, batch)) == []


@BOTH
def test_a_part_that_comes_behind_the_first_call_alone(what):
    """Which under "selective" is the one that is measured."""

    def trained(model, what=None):
        found = []
        with Recompute(model, what) if what else nullcontext():
            for step in range(4):
                if step == 1:
                    for block in model:
                        block.part = Sometimes(True)
                model.zero_grad()
                square(model, torch.linspace(-1, 1, 32).view(4, 8)).backward()
                found.append([p.grad.clone() for p in model.parameters()])
                found.append([b.clone() for b in model.buffers()])
        return found

    class Observed(nn.Module):
        def __init__(self):
            super().__init__()
            self.line, self.part = nn.Linear(8, 8), nn.Identity()

        def forward(self, x):
            return x + torch.tanh(self.line(self.part(x)))

    expected = trained(three(Observed))
    assert differences(expected, trained(three(Observed), what)) == []


@BOTH
def test_torchs_checkpoint_around_the_model(what):
    """Its second run saves what its first did, also where a block is called for the first time."""

    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x):
            return x + self.second(torch.tanh(self.first(x)))

    model = nn.Sequential(nn.Linear(8, 8), *three(Branch))
    plain, batch = copy.deepcopy(model), torch.randn(4, 8)
    with Recompute(model, what):
        for _ in range(3):
            for one in (plain, model):
                one.zero_grad()
                checkpoint(one, batch, use_reentrant=False).square().mean().backward()
            pairs = zip(plain.parameters(), model.parameters(), strict=True)
            assert all(torch.equal(a.grad, b.grad) for a, b in pairs)
