"""Objects that a block is called with, and changes, are as they were when it runs again."""

from __future__ import annotations

import gc
import logging
import weakref
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from recomputed import with_and_without
from torchfast import Recompute
from torchfast._core.compare import differences
from torchfast.memory.held_arguments import HeldArgument


@dataclass
class State:
    x: Tensor
    seen: list = field(default_factory=list)
    last: Tensor | None = None


@dataclass(slots=True)
class Slotted:
    x: Tensor
    seen: list = field(default_factory=list)
    last: Tensor | None = None


class Attributes(dict):
    """A dictionary whose keys are attributes."""

    def __init__(self, x):
        super().__init__(x=x, seen=[], last=None)

    def __getattr__(self, name):
        return self[name]

    def __setattr__(self, name, value):
        self[name] = value


class Graph:
    """Keeps its features in a store, and says how both are copied."""

    def __init__(self, x):
        vars(self)["store"] = {"x": x, "seen": [], "last": None}

    def __getattr__(self, name):
        return vars(self)["store"][name]

    def __setattr__(self, name, value):
        self.store[name] = value

    def __copy__(self):
        other = Graph(None)
        other.store.update(self.store, seen=list(self.store["seen"]))
        return other


class NoCopy(State):
    def __reduce_ex__(self, protocol):
        raise TypeError("not this one")


class Changes(nn.Module):
    """Puts its result in the place of what it was called with, and goes by what is there."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(8, 8)

    def forward(self, state):
        x = torch.tanh(self.line(state.x))
        if state.seen:
            x = x * state.seen[-1].cos()
        if state.last is not None:
            x = x + state.last.sin()
        state.last = x
        state.seen.append(x)
        state.x = x.exp()


class Counts(nn.Module):
    """Counts in what it was called with, and goes by the number."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, state):
        state.seen.append(len(state.seen) + 1.5)
        return x + self.down(torch.tanh(self.up(x * state.seen[-1])))


class CountsUp(Counts):
    """Puts a number in the place of another."""

    def forward(self, x, state):
        state.last = (state.last or 0) + 1.5
        return x + self.down(torch.tanh(self.up(x * state.last)))


class WritesTo(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(8, 8)

    def forward(self, state):
        y = torch.tanh(self.line(state.x))
        with torch.no_grad():
            state.x.add_(1)
        state.x = y


class OfBlocks(nn.Module):
    def __init__(self, block, make):
        super().__init__()
        self.blocks, self.make = nn.ModuleList(block() for _ in range(3)), make

    def forward(self, x):
        state = self.make(x * 1)
        for block in self.blocks:
            block(state)
        return state.x


def square(model, batch):
    return model(batch).square().mean()


def batch():
    return torch.randn(4, 8, requires_grad=True)


@pytest.mark.parametrize("what", ["blocks", "selective"])
@pytest.mark.parametrize("make", [State, Slotted, Attributes, Graph])
def test_an_object_that_a_block_changes(make, what):
    results = with_and_without(partial(OfBlocks, Changes, make), what, square, batch)
    assert differences(*results) == []


@pytest.mark.parametrize("block", [Counts, CountsUp])
@pytest.mark.parametrize("what", ["blocks", "selective"])
@pytest.mark.parametrize("make", [State, Slotted, Attributes, Graph])
def test_an_object_that_a_block_counts_in(make, block, what):
    """Somebody holds it, so that the block would find it as the last one left it."""

    class Held(OfBlocks):
        def forward(self, x):
            state = self.state = self.make(torch.zeros(8))
            for block in self.blocks:
                x = block(x, state)
            return x

    results = with_and_without(partial(Held, block, make), what, square, batch)
    assert differences(*results) == []


def test_what_there_is_one_of_is_left_as_it_is():
    """A copy of a logger is the logger itself, whose handlers are the program's."""
    logger, handler = logging.getLogger("held"), logging.NullHandler()
    logger.addHandler(handler)
    state = State(torch.ones(2), last=logger)
    held = HeldArgument(state)
    state.seen.append(1)
    assert held.restored().last is logger
    assert logger.handlers == [handler]
    assert logger.manager is logging.Logger.manager


@pytest.mark.parametrize("make", [State, Attributes])
def test_a_tensor_in_an_object_that_is_written_to_is_an_error(make):
    model = OfBlocks(WritesTo, make)
    with Recompute(model):
        loss = square(model, torch.ones(2, 8, requires_grad=True))
        with pytest.raises(RuntimeError, match=r"an input of a block .* shape \(2, 8\)"):
            loss.backward()


def test_an_object_that_cannot_be_copied_is_an_error_if_it_is_changed():
    model = OfBlocks(Changes, NoCopy)
    with Recompute(model):
        loss = square(model, torch.ones(2, 8))
        with pytest.raises(RuntimeError, match="called with a NoCopy that holds other tensors"):
            loss.backward()


def test_an_object_that_holds_the_graph_does_not_keep_it():
    model = OfBlocks(Changes, State)
    with Recompute(model):
        out = model(torch.ones(2, 8))
        gone = weakref.ref(out)
        del out
        gc.collect()
        assert gone() is None


@pytest.mark.parametrize("make", [State, NoCopy])
def test_an_object_that_nobody_changes_is_given_itself(make):
    state = make(torch.ones(2))
    held = HeldArgument(state)
    assert held.restored() is state
    state.seen.append(state.x)
    if make is State:
        first, second = held.restored(), held.restored()
        assert first is not state
        assert first is not second
        assert first.x is state.x
        assert first.seen == []
        assert first.seen is not second.seen
