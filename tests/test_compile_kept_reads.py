"""The backward of a compiled forward reads what the forward has read, not what it has left.

The negative control is torch's own compile, which computes another gradient (the last part).
"""

from __future__ import annotations

import copy
import operator
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchfast import Plan, Recompute, Trainer
from torchfast.compiler import CompiledModule, CompileOptions, kept_reads
from torchfast.compiler.kept_reads import KeptReads, keep_reads
from writing_blocks import EACH, Block, Codebook, Halved

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def two(make):
    torch.manual_seed(0)
    return nn.Sequential(make(), make()).double()


def rows(number=32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(number, 8, dtype=torch.float64, generator=generator)


def square(model, x):
    return model(x).square().mean()


def trained(model, sizes=(32, 32)):
    """Return gradients, then buffers, of two calls and one backward each."""
    for seed, size in enumerate(sizes):
        square(model, rows(size, seed)).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [t.clone() for t in (*gradients, *model.state_dict().values())]


@pytest.mark.parametrize("regions", ["whole", "blocks"])
@pytest.mark.parametrize("make", EACH)
def test_the_gradient_is_that_of_the_eager_model(make, regions):
    plain = two(make)
    own = copy.deepcopy(plain)
    with CompiledModule(own, regions=regions) as compiled:
        found = trained(own)
        assert compiled.is_compiled
        torch.testing.assert_close(found, trained(plain), rtol=1e-9, atol=1e-12)


def test_of_sizes_that_vary():
    plain = two(Block)
    own = copy.deepcopy(plain)
    with CompiledModule(own, regions="whole", dynamic=True) as compiled:
        found = trained(own, (4, 6, 3))
        assert compiled.report().counters["graphs"] == 1
    torch.testing.assert_close(found, trained(plain, (4, 6, 3)), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("compile", [True, "auto"])
def test_in_a_trainer(compile):
    results = []
    options = CompileOptions(regions="whole") if compile is True else compile
    for plan in (Plan(), Plan(compile=options)):
        sgd = partial(torch.optim.SGD, lr=0.1)
        with Trainer(two(Codebook), sgd, square, plan) as own:
            losses = [own.step(rows(seed=seed)) for seed in range(4)]
            results.append([*losses, *own.state_dict()["model"].values()])
            assert "gradients are off" not in str(own.report())
    torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-12)


# --- which tensors get a copy --------------------------------------------------------------------


def copies_in(model, *args):
    """Return how many tensors got one in the graphs of a model, which then runs them eagerly."""
    found = []

    def backend(graph, inputs):
        keep_reads(graph)
        kept = torch.ops.torchfast.value_of.default
        found.append(sum(n.target is kept for n in graph.graph.nodes))
        return graph.forward

    plain = copy.deepcopy(model)
    outputs = torch.compile(model, backend=backend)(*args), plain(*args)
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(model.state_dict(), plain.state_dict())
    return sum(found)


class Written(nn.Module):
    """Writes to a buffer, in one way or another."""

    def __init__(self, write, *, reads=True):
        super().__init__()
        self.line, self.write, self.reads = nn.Linear(8, 8), write, reads
        self.register_buffer("held", torch.ones(8))
        self.register_buffer("other", torch.ones(8))

    def forward(self, x):
        y = self.line(x * self.held if self.reads else x) * self.other
        with torch.no_grad():
            self.write(self.held, y.mean(0))
        return y


def written(write, *, reads=True):
    return Written(write, reads=reads).double()


def put_in_a_slice(held, mean):
    held[:4] = mean[:4]


WRITES = {
    "a method": lambda held, mean: held.copy_(mean),
    "a function": lambda held, mean: torch.neg_(held),
    "an operator": operator.iadd,
    "a slice": put_in_a_slice,
    "a view": lambda held, mean: held.view(2, 4).t().mul_(2.0),
    "out": lambda held, mean: torch.add(mean, 1.0, out=held),
    "inplace": lambda held, mean: F.relu(held, inplace=True),
    "ATen": lambda held, mean: torch.ops.aten.mul_(held, 2.0),
    "an overload": lambda held, mean: torch.ops.aten.mul_.Scalar(held, 2.0),
    "many": lambda held, mean: torch._foreach_mul_([held], 2.0),
    "many, from others": lambda held, mean: torch._foreach_copy_([held], [mean]),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_each_way_to_write_is_seen(write):
    assert copies_in(written(write), rows()) == 1
    assert copies_in(written(write, reads=False), rows()) == 0


def read_by_a_write(held, mean):
    torch._foreach_add_([mean], [held])
    held.zero_()


def filled(held, mean):
    held.copy_(mean)
    mean.add_(held * 2.0)


def zeroed(held, mean):
    held.view(2, 4).zero_()
    held[2:4].add_(mean[2:4])
    mean.add_(held * 2.0)


def partly_filled(held, mean):
    held[2:4] = mean[2:4]
    mean.add_(held * 2.0)


def filled_more_than_once(held, mean):
    held.as_strided((4, 2), (1, 2)).zero_()  # as many elements as there are, but not all of them
    mean.add_(held * 2.0)


def test_what_is_filled_anew_as_a_whole_gets_none():
    for write in (filled, zeroed):
        assert copies_in(written(write, reads=False), rows()) == 0
        assert copies_in(written(write), rows()) == 1  # it was read before
    for write in (read_by_a_write, partly_filled, filled_more_than_once):
        assert copies_in(written(write, reads=False), rows()) == 1


def test_averages_and_the_statistics_of_norms_get_none():
    average = written(lambda held, mean: held.mul_(0.9).add_(mean, alpha=0.1), reads=False)
    assert copies_in(average, rows()) == 0
    assert copies_in(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).double(), rows()) == 0


def test_without_a_gradient_there_is_none():
    with torch.no_grad():
        assert copies_in(Block().double(), rows()) == 0
    assert copies_in(Block().double().requires_grad_(False), rows()) == 0


def test_no_second_copy_where_a_recomputed_block_has_made_one():
    model = two(Block)
    assert copies_in(model, rows()) == 2
    torch._dynamo.reset()
    with Recompute(model, (Block,)):
        assert copies_in(model, rows()) == 2


def test_most_graphs_are_not_run_for_it(monkeypatch):
    def never(*_):
        raise AssertionError

    monkeypatch.setattr(kept_reads, "_WithoutData", never)
    block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0).double()
    assert copies_in(block, rows()[None]) == 0


# --- the backend ---------------------------------------------------------------------------------


def test_backends_are_equal_where_they_compile_alike():
    assert KeptReads("default", None) == KeptReads("default", None)
    assert KeptReads("default", None) != KeptReads("max-autotune-no-cudagraphs", None)
    assert KeptReads("default", None) != KeptReads("default", False)


def test_a_graph_that_cannot_be_looked_into_is_compiled_and_told_once(monkeypatch, caplog):
    def broken(graph):
        raise AttributeError("no nodes")

    kept_reads._warn_once.cache_clear()
    monkeypatch.setattr(kept_reads, "keep_reads", broken)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).double()
    with CompiledModule(model, regions=("*",)) as compiled:
        square(model, rows()).backward()
        assert compiled.is_compiled
    kept_reads._warn_once.cache_clear()
    told = [r.getMessage() for r in caplog.records if "could not look into" in r.getMessage()]
    assert len(told) == 1
    assert "AttributeError: no nodes" in told[0]


# --- the negative control ------------------------------------------------------------------------


@pytest.mark.parametrize("make", [Block, Codebook, Halved])
def test_torch_by_itself_computes_another_gradient(make):
    plain = two(make)
    own = copy.deepcopy(plain)
    compiled = torch.compile(own)
    for model in (plain, compiled):
        square(model, rows()).backward()
    expected, found = (torch.cat([p.grad.flatten() for p in m.parameters()]) for m in (plain, own))
    assert float((found - expected).norm() / expected.norm()) > 1e-3
