"""Branches side by side compute what they compute one after another, and nobody reads too early."""

from __future__ import annotations

import contextlib
import json
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import branches as benchmark
from models import make_batches
from tape import Twins, taped
from torchfast import CUDAGraphStep, ParallelBranches


class Expert(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.up, self.down = nn.Linear(width, 16), nn.Linear(16, width)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Mixture(nn.Module):
    """Experts, a router, a weight that all of them share."""

    def __init__(self, branches=None, num_experts=5):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.router = nn.Linear(8, num_experts)
        self.experts = nn.ModuleList(Expert() for _ in range(num_experts))
        self.shared = nn.Linear(8, 8)
        self.last = nn.Linear(8, 4)
        self.branches = branches

    def forward(self, x):
        x = torch.tanh(self.inner(x))
        gates = self.router(x).softmax(-1).split(1, dim=-1)
        if self.branches is None:
            outputs = [self.shared(expert(x)) + x for expert in self.experts]
        else:
            outputs = self.branches.map(lambda e: self.shared(e(x)) + x, self.experts)
        mixed = sum(gate * output for gate, output in zip(gates, outputs, strict=True))
        return self.last(mixed)


def mixture(branches=None):
    torch.manual_seed(0)
    return Mixture(branches)


def gradients(model, x):
    x = x.clone().requires_grad_()
    output = model(x)
    output.square().sum().backward()
    return [output.detach(), x.grad, *(p.grad for p in model.parameters())]


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# -- One after another -----------------------------------------------------------------------------


@pytest.mark.parametrize("num_streams", [1, 2, 4, 32])
def test_the_result_and_every_gradient_are_those_of_a_loop(num_streams):
    x = torch.randn(6, 8)
    assert same(gradients(mixture(), x), gradients(mixture(ParallelBranches(num_streams)), x))


def test_every_function_gets_the_arguments_and_results_keep_their_order():
    functions = [partial(lambda k, x, *, scale: (k, x * scale), k) for k in range(7)]
    outputs = ParallelBranches()(functions, torch.ones(2), scale=3.0)
    assert [k for k, _ in outputs] == list(range(7))
    assert all(torch.equal(y, torch.full((2,), 3.0)) for _, y in outputs)


def test_map_takes_items_of_several_iterables_of_one_length():
    branches = ParallelBranches()
    assert branches.map(lambda a, b: a - b, [5, 6], iter([1, 2])) == [4, 4]
    with pytest.raises(ValueError, match="shorter"):
        branches.map(lambda a, b: a - b, [5, 6], [1])


@pytest.mark.parametrize("call", [lambda b: b([]), lambda b: b.map(abs, []), lambda b: b(iter(()))])
def test_no_branches_return_nothing(call):
    assert call(ParallelBranches()) == []


def test_bad_arguments_are_named():
    branches = ParallelBranches()
    with pytest.raises(TypeError, match="num_streams must be an int >= 1"):
        ParallelBranches(2.0)
    with pytest.raises(ValueError, match="num_streams must be >= 1, got 0"):
        ParallelBranches(0)
    with pytest.raises(ValueError, match="num_streams must be <= 32, got 33"):
        ParallelBranches(33)
    with pytest.raises(TypeError, match="did you mean 'num_streams'"):
        ParallelBranches(num_stream=2)
    with pytest.raises(TypeError, match="functions must be an iterable of callables"):
        branches(nn.Linear(2, 2), torch.ones(2))
    with pytest.raises(TypeError, match=r"functions\[1\] must be callable as"):
        branches([abs, "expert"], torch.ones(2))
    with pytest.raises(TypeError, match="function must be callable as"):
        branches.map([abs], [1])


def test_what_torch_compiles_has_no_branches_left():
    model, x = mixture(ParallelBranches()), torch.randn(6, 8)
    expected = model(x)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), expected)
    each = torch.compile(
        lambda x: ParallelBranches()([torch.sin, torch.cos], x), backend="eager", fullgraph=True
    )
    assert torch.equal(each(x)[1], x.cos())


def test_autocast_casts_in_each_branch_and_its_cache_is_on_again_afterwards():
    weight = nn.Parameter(torch.randn(4, 4))
    addresses, cached = [], []

    def branch(x):
        cached.append(torch.is_autocast_cache_enabled())
        y = F.linear(x, weight)
        addresses.append(y.grad_fn.next_functions[1][0])
        return y

    with torch.autocast("cpu", torch.bfloat16):
        outputs = ParallelBranches().map(branch, [torch.ones(2, 4)] * 3)
        assert torch.is_autocast_cache_enabled()
        with contextlib.suppress(ZeroDivisionError):
            ParallelBranches()([lambda: 1 / 0] * 2)
        assert torch.is_autocast_cache_enabled()
    assert cached == [False] * 3
    assert len(set(addresses)) == 3
    assert all(o.dtype is torch.bfloat16 for o in outputs)


# -- In a captured step ----------------------------------------------------------------------------


def test_a_step_with_branches_is_captured_and_trains_as_the_loop(monkeypatch):
    batches = make_batches(8)
    net, optimizer = partial(Mixture, ParallelBranches()), partial(torch.optim.AdamW, fused=True)
    with taped(monkeypatch):
        twins = Twins(net, optimizer)
        twins.run(batches[:3])
        twins.run(batches[3:], gradients=False)
        assert twins.counts[1] == 5
        bare = Twins(net, optimizer, bare=True)
        bare.run(batches[:3])
        for batch in batches[3:]:
            bare.step(batch)
            bare.check(gradients=False)
        assert bare.counts[1] == 5
        assert isinstance(bare.captured, CUDAGraphStep)


# -- The measurement -------------------------------------------------------------------------------


def test_the_measurement_runs_without_a_gpu(tmp_path, monkeypatch, capsys):
    out = tmp_path / "branches.json"
    options = ["--device", "cpu", "--size", "smoke", "--rounds", "2", "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["branches.py", *options])
    try:
        benchmark.main()
    finally:
        torch.use_deterministic_algorithms(False)
    figures = json.loads(out.read_text())
    assert [row["streams"] for row in figures["rows"]] == [1, 2, 4, 8]
    assert all(row["same_bits"] and row["ms"] > 0 for row in figures["rows"])
    assert figures["rows"][0]["gain"] == 1.0
    assert "OTHER" not in capsys.readouterr().out
