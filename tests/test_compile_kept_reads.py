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
from torchfast._core import traced_uses
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


class Masked(Block):
    """Fills a mask that it has made, which has nothing to do with it."""

    def forward(self, x):
        mask = torch.ones_like(x)
        mask[:, :] = 0.5
        mask[1:].fill_(0.25)
        return super().forward(x) * mask


@pytest.mark.parametrize("dynamic", [True, None])
def test_of_sizes_that_are_symbols_where_something_is_filled(dynamic, caplog):
    plain = two(Masked)
    own = copy.deepcopy(plain)
    with CompiledModule(own, regions="whole", dynamic=dynamic):
        found = trained(own, (4, 6, 3))
    torch.testing.assert_close(found, trained(plain, (4, 6, 3)), rtol=1e-9, atol=1e-12)
    assert "could not look into" not in caplog.text


class Queued(Block):
    """Fills as much of a buffer as it needs."""

    def __init__(self):
        super().__init__()
        self.register_buffer("queue", torch.zeros(16, 8))

    def forward(self, x):
        self.queue[: len(x)].copy_(x.detach())
        return super().forward(x) + self.queue[: len(x)]


def test_no_size_is_fixed_by_the_look():
    plain = two(Queued)
    own = copy.deepcopy(plain)
    with CompiledModule(own, regions="whole", dynamic=True) as compiled:
        found = trained(own, (4, 16))
        assert compiled.report().counters["graphs"] == 1
    torch.testing.assert_close(found, trained(plain, (4, 16)), rtol=1e-9, atol=1e-12)


class ReadsInstanceNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.InstanceNorm1d(8, track_running_stats=True)
        self.line = nn.Linear(8, 8)

    def forward(self, x):
        y = self.line(torch.tanh(x * torch.rsqrt(self.norm.running_var + 0.1)) * x)
        return self.norm(y.T[None])[0].T + x


class IntoAnArgument(Block):
    """Has no result but what it writes to an argument."""

    def forward(self, x, out):
        out.add_(super().forward(x))


class Calls(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = IntoAnArgument(), IntoAnArgument()

    def forward(self, x):
        y, z = torch.zeros_like(x), torch.zeros_like(x)
        self.one(x, y)
        self.two(y, z)
        return z


@pytest.mark.parametrize(
    ("make", "regions"), [(ReadsInstanceNorm, "whole"), (Calls, (IntoAnArgument,))]
)
def test_what_no_name_and_no_result_shows(make, regions):
    plain = two(make)
    own = copy.deepcopy(plain)
    with CompiledModule(own, regions=regions, on_failure="raise"):
        found = trained(own)
    torch.testing.assert_close(found, trained(plain), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("compile", [True, "auto"])
def test_in_a_trainer(compile):
    results = []
    options = CompileOptions(regions="whole") if compile is True else compile
    for plan in (Plan(), Plan(compile=options)):
        sgd = partial(torch.optim.SGD, lr=0.1)
        with Trainer(two(Codebook), sgd, square, plan) as own:
            losses = [own.step(rows(seed=seed)) for seed in range(4)]
            results.append([*losses, *own.state_dict()["model"].values()])
            if compile == "auto":
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


def put_in_statistics(held, mean):
    F.batch_norm(torch.stack([mean, -mean]), held, torch.ones_like(mean), training=True)


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
    "inplace, by place": lambda held, mean: F.leaky_relu(held, 0.1, True),
    "statistics": put_in_statistics,
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


def fail_at(monkeypatch, operation):
    """Let the look into a graph fail at an operation; return what was told."""
    dispatch = traced_uses.TracedUses.__torch_dispatch__

    def failing(self, func, types, args=(), kwargs=None):
        if func is operation:
            raise AttributeError("no such\nthing")
        return dispatch(self, func, types, args, kwargs)

    traced_uses._TOLD.clear()
    monkeypatch.setattr(traced_uses.TracedUses, "__torch_dispatch__", failing)


def test_a_graph_that_cannot_be_looked_into_is_compiled_and_told_once(monkeypatch, caplog):
    fail_at(monkeypatch, torch.ops.aten.tanh.default)
    model = nn.ModuleList([Block().double(), Codebook().double(), Block().double()])
    with CompiledModule(model, regions=("*",)) as compiled:
        for block in model:
            square(block, rows()).backward()
        assert compiled.is_compiled
    traced_uses._TOLD.clear()
    told = [r.getMessage() for r in caplog.records if "could not look into" in r.getMessage()]
    assert len(told) == 1
    assert "(AttributeError: no such)" in told[0]


class InAutocast(Block):
    def forward(self, x):
        y = super().forward(x)
        with torch.autocast("cpu", torch.bfloat16):
            return y + torch.sinh(self.line(x))


class InVmap(Block):
    def forward(self, x):
        return super().forward(x) + torch.vmap(torch.sinh)(x)


class InGrad(Block):
    def forward(self, x):
        return super().forward(x) + torch.func.grad(lambda x: torch.sinh(x).sum())(x)


@pytest.mark.parametrize("make", [InAutocast, InVmap, InGrad])
def test_a_look_that_fails_leaves_what_it_has_entered(monkeypatch, make):
    fail_at(monkeypatch, torch.ops.aten.sinh.default)
    seen = []

    def state():
        depth = torch._C._functorch.get_dynamic_layer_stack_depth()
        nesting = torch.autocast_increment_nesting()
        torch.autocast_decrement_nesting()
        enabled = torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()
        return depth, nesting, enabled, torch.get_autocast_dtype("cpu"), torch.is_grad_enabled()

    def backend(graph, inputs):
        before = state()
        with pytest.raises(AttributeError):
            keep_reads(graph)
        seen.append((before, state()))
        return graph.forward

    torch.compile(make().float(), backend=backend)(rows().float())
    traced_uses._TOLD.clear()
    assert seen
    assert all(before == after for before, after in seen)


class Expanded(Block):
    def __init__(self):
        super().__init__()
        self.many = self.mean.expand(32, 8)

    def forward(self, x):
        return super().forward(x) + self.many


def test_an_expanded_view_is_compiled_and_told(caplog):
    traced_uses._TOLD.clear()
    model = Expanded()
    with CompiledModule(model, regions="whole", on_failure="raise"):
        model(rows().float()).sum().backward()
    traced_uses._TOLD.clear()
    assert "is an expanded view of what is written to" in caplog.text


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
