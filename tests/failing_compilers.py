"""Backends that fail, models to compile with them, and what is to come of it."""

from __future__ import annotations

import copy
import signal
import threading
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def dynamo_left_clean():
    """Nothing compiled before it counts, and behind it no thread and no signal is taken."""
    torch._dynamo.reset()
    handlers = [signal.getsignal(n) for n in range(signal.SIGRTMIN, signal.SIGRTMAX + 1)]
    yield
    torch._dynamo.reset()
    for thread in threading.enumerate():
        if thread.name == "torchfast-keys":  # ends by itself, when what it reads has been read
            thread.join()
    assert not [t for t in threading.enumerate() if t.name.startswith("torchfast")]
    assert handlers == [signal.getsignal(n) for n in range(signal.SIGRTMIN, signal.SIGRTMAX + 1)]


def told(caplog):
    return [r.getMessage() for r in caplog.records if r.name.startswith("torchfast")]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.line, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if x.shape[0] == 13:
            raise ValueError("thirteen rows")
        return torch.relu(self.norm(self.line(x))) + x


class Broken(Block):
    """Its graph breaks in the middle, after the statistics of the norm."""

    def forward(self, x):
        y = super().forward(x)
        torch._dynamo.graph_break()
        return y * 2 + torch.rand_like(y)


class Backend:
    """Fails, or does what else it is told, at some of the graphs."""

    def __init__(self, act, at=lambda number: True):
        self.act, self.at, self.number = act, at, 0

    def __call__(self, graph, inputs):
        self.number += 1
        if self.at(self.number):
            self.act()
        return graph.forward


ROWS = torch.linspace(-1, 1, 32).reshape(4, 8)


def assert_as_eager(model, handle, x=ROWS, calls=1):
    """Outputs, statistics and random numbers are those of the eager model."""
    eager = copy.deepcopy(model)
    results = []
    for twin in (model, eager):
        torch.manual_seed(0)
        results.append([twin(x) for _ in range(calls)])
    torch.testing.assert_close(*results)
    torch.testing.assert_close(model.state_dict(), eager.state_dict())
    assert model.calls == eager.calls if hasattr(model, "calls") else True
