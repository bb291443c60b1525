"""The memory of captured steps on a real device: as much as eager ones take, shared by shapes."""

from __future__ import annotations

import gc
from functools import partial

import pytest
import torch
from torch import nn, optim

from gpu.graph_jobs import GRAPH, counters
from torchfast import Plan, Trainer
from torchfast.graphs import cached_memory
from torchfast.graphs.copies import copies_of

pytestmark = pytest.mark.usefixtures("deterministic")


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(8))
        )

    def forward(self, x):
        return self.layers(x)


def wide(plan):
    torch.manual_seed(0)
    model = Wide().cuda()
    optimizer = partial(optim.AdamW, lr=1e-3, fused=True)
    return Trainer(model, optimizer, lambda m, x: m(x).square().mean(), plan)


def trained(plan, batches):
    trainer = wide(plan)
    for batch in batches:
        trainer.step(batch)
    return trainer


def let_go():
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # each has to make its own
    torch.cuda.empty_cache()


def peak(plan, batches):
    let_go()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    trainer = trained(plan, batches)
    torch.cuda.synchronize()
    if plan.cuda_graph:
        torch.cuda.empty_cache()  # what the check of the graph has left
        return torch.cuda.memory_reserved() - before, trainer
    return torch.cuda.max_memory_reserved() - before, trainer


def test_a_graph_takes_the_memory_of_the_step_and_shapes_share_it():
    batches = [torch.randn(8192, 1024, device="cuda")] * 6
    eager, trainer = peak(Plan(), batches)
    del trainer
    one, trainer = peak(GRAPH, batches)
    assert one < 1.05 * eager
    del trainer
    many = [torch.randn(size, 1024, device="cuda") for size in range(8192, 0, -1024)]
    all_of_them, trainer = peak(GRAPH, [b for batch in many for b in [batch] * 6])
    assert counters(trainer)["graphs"] == 8
    assert all_of_them < 1.3 * one


def noting(done, name, function):
    def noted(*args):
        done.append(name)
        return function(*args)

    return noted


@pytest.fixture
def told(monkeypatch):
    """What was done, in order: the cache emptied, a graph replayed."""
    done = []
    for owner, name in ((torch.cuda, "empty_cache"), (torch.cuda.CUDAGraph, "replay")):
        own = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *a, own=own, name=name: (done.append(name), own(*a))
        )
    return done


@pytest.fixture
def shortage():
    """Return a function that leaves what an eager run of batches takes, and a fifth more."""
    total = torch.cuda.get_device_properties(0).total_memory

    def lack(batches):
        eager, trainer = peak(Plan(), batches)
        del trainer
        let_go()
        limit = torch.cuda.memory_reserved() + int(1.2 * eager)
        torch.cuda.set_per_process_memory_fraction(limit / total)

    yield lack
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_beside_plenty_of_memory_the_cache_goes_behind_the_first_replays(told):
    batches = [torch.randn(8192, 1024, device="cuda")] * 6
    eager, trainer = peak(Plan(), batches)
    del trainer
    let_go()
    before = torch.cuda.memory_reserved()
    told.clear()
    trainer = trained(GRAPH, batches)
    torch.cuda.synchronize()
    assert counters(trainer)["graphs"] == 1
    assert told[0] == "replay"
    assert told.count("empty_cache") == 1
    assert torch.cuda.memory_reserved() - before < 1.05 * eager


def test_where_memory_is_short_the_cache_goes_before_the_capture(told, shortage):
    batches = [torch.randn(8192, 1024, device="cuda")] * 6
    shortage(batches)
    told.clear()
    trainer = trained(GRAPH, batches)
    assert counters(trainer)["graphs"] == 1
    assert counters(trainer)["eager steps"] == 3
    assert told[0] == "empty_cache"


def test_a_capture_that_runs_out_beside_the_cache_is_made_without(monkeypatch, told, shortage):
    """As where another process takes memory in the meantime."""
    batches = [torch.randn(8192, 1024, device="cuda")] * 8
    shortage(batches)
    monkeypatch.setattr(cached_memory, "has_plenty", lambda _: True)
    told.clear()
    trainer = trained(GRAPH, batches)
    assert counters(trainer)["graphs"] == 1
    assert counters(trainer)["eager steps"] == 4
    assert told[0] == "empty_cache"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_copies_for_the_check_have_every_bit(dtype):
    bits = torch.arange(-(2**15), 2**15).to("cuda", torch.int16)
    for copy in copies_of([nn.Parameter(bits.view(dtype)) for _ in range(3)]):
        assert torch.equal(copy.view(torch.int16), bits)
