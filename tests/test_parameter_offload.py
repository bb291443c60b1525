"""Parameters on the host train the same model: whole models, and beside what else offloads."""

from __future__ import annotations

import copy
import gc
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from parameter_offloading import Expert, mean_square, model_of, prompt_copies, same, trained
from torchfast import (
    ActivationOffload,
    OffloadedOptimizer,
    ParameterOffload,
    Recompute,
    RecomputeOptions,
)


@pytest.fixture
def copies(monkeypatch):
    return prompt_copies(monkeypatch)


@pytest.mark.parametrize("options", [{}, {"num_micro": 3}, {"clip": 0.1}])
@pytest.mark.parametrize("name", ["gpt with dropout", "resnet", "llama", "gpt2", "mixture"])
def test_the_bits_are_those_of_the_plain_loop(copies, name, options):
    model, loss_fn, batch, what = model_of(name)
    expected = trained(copy.deepcopy(model), loss_fn, batch, **options)
    parameters, keys = list(model.parameters()), list(model.state_dict())
    offload = ParameterOffload(model, what)
    assert same(trained(model, loss_fn, batch, **options), expected)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert keys == list(model.state_dict())
    counters = offload.counters()
    assert counters["offload_gradient_bytes"] > 0
    assert counters["offload_most_resident_blocks"] == 2
    offload.close()
    assert not any("forward" in vars(module) for module in model.modules())


def test_an_expert_that_is_not_used_costs_nothing(copies):
    model, loss_fn, batch, what = model_of("mixture")
    offload = ParameterOffload(model, what)
    num_bytes = sum(p.numel() * 4 for p in model[0].experts[0].parameters())
    for step in range(1, 4):
        model.zero_grad()
        loss_fn(model, batch).backward()
        used = sum(e.up.weight.grad is not None for layer in model for e in layer.experts)
        assert 0 < used <= 8
        counters = offload.counters()
        # Twice a step, but for the last two, which are still there when the backward begins.
        assert counters["offload_fetched_blocks"] == step * (2 * used - 2)
        assert counters["offload_fetched_bytes"] == step * (2 * used - 2) * num_bytes
        assert counters["offload_gradient_bytes"] == step * used * num_bytes
        assert counters["offload_unused_blocks"] == 0
    assert all(model[0].experts[k].up.weight.grad is None for k in (2, 3))


def test_a_wrong_guess_costs_one_copy_and_is_not_made_again_at_once(copies):
    model = nn.Sequential(*(Expert() for _ in range(3)))
    offload = ParameterOffload(model)
    x = torch.randn(2, 8)

    def unused_behind(*path):
        before = offload.counters()["offload_unused_blocks"]
        y = x
        for number in path:
            y = model[number](y)
        y.sum().backward()
        return offload.counters()["offload_unused_blocks"] - before

    assert unused_behind(0, 1) == 0
    assert unused_behind(0, 1) == 0
    assert unused_behind(0, 2) == 1
    assert unused_behind(0, 1) == 0  # no guess
    assert unused_behind(0, 1) == 0  # none, and now 1 has followed twice
    assert unused_behind(0, 2) == 1
    one = ParameterOffload(copy.deepcopy(model), max_resident_blocks=1)
    assert one.counters()["offload_unused_blocks"] == 0


def test_blocks_are_on_the_device_for_their_calls_only(copies):
    model, loss_fn, batch, _ = model_of("gpt")
    offload = ParameterOffload(model, max_resident_blocks=1)
    seen = []

    def note(module, args, result):
        weight = module._parameters["weight"]
        seen.append((offload._engine.num_residents, isinstance(weight, nn.Parameter)))

    model.blocks[1].up.register_forward_hook(note)
    loss_fn(model, batch).backward()
    assert seen == [(1, False)]
    assert isinstance(model.blocks[1].up.weight, nn.Parameter)
    assert offload._engine.num_residents == 0


@pytest.mark.parametrize("recompute", [False, True])
def test_the_next_block_is_brought_ahead_both_ways(copies, recompute):
    model = nn.Sequential(*(Expert() for _ in range(5)))
    offload = ParameterOffload(model)
    if recompute:
        Recompute(model)
    there = []

    def note(*_):
        there.append("".join(sorted(block.path for block in offload._engine._residents)))

    for expert in model:
        expert.down.register_forward_hook(note)
    for _ in range(2):
        there.clear()
        y = torch.randn(2, 8)
        for expert in model:
            y = expert(y)
            y.register_hook(note)
        y.sum().backward()
    # In the forward at the end of each block; in the backward before each, from the last.
    assert there == ["01", "12", "23", "34", "34", *("34", "34", "23", "12", "01")]


@pytest.mark.parametrize("selective", [False, True])
@pytest.mark.parametrize(
    ("offloaded", "recomputed"),
    [("blocks", "blocks"), ("blocks", ("blocks.*.down", "blocks.*.qkv")), (("blocks.*.up",),) * 2,
     (("blocks.*.up", "blocks.*.norm1"), "blocks")],
)  # fmt: skip
def test_with_recompute_inside_and_outside(copies, offloaded, recomputed, selective):
    model, loss_fn, batch, _ = model_of("gpt with dropout")
    expected = trained(copy.deepcopy(model), loss_fn, batch)
    offload = ParameterOffload(model, offloaded)
    recompute = Recompute(model, RecomputeOptions(regions=recomputed, selective=selective))
    assert same(trained(model, loss_fn, batch), expected)
    recompute.close()
    offload.close()
    assert not any("forward" in vars(module) for module in model.modules())


class Checkpointed(nn.Module):
    def __init__(self, reentrant, function):
        super().__init__()
        self.expert, self.scale = Expert(), nn.Parameter(torch.ones(8))
        self.reentrant, self.function = reentrant, function

    def forward(self, x):
        part = self.function(self.expert) if self.function else self.expert
        return checkpoint(part, x * self.scale, use_reentrant=self.reentrant)


@pytest.mark.parametrize("function", [None, lambda e: lambda x: e.down(torch.tanh(e.up(x)))])
@pytest.mark.parametrize("reentrant", [False, True])
def test_with_a_checkpoint_of_the_models_own_inside(copies, reentrant, function):
    torch.manual_seed(0)
    model = nn.Sequential(*(Checkpointed(reentrant, function) for _ in range(3)))
    batch = torch.randn(4, 8, requires_grad=True)
    expected = trained(copy.deepcopy(model), mean_square, batch)
    ParameterOffload(model)
    assert same(trained(model, mean_square, batch), expected)


@pytest.mark.parametrize("window", [0, 3000])
def test_with_offloaded_activations_each_sends_its_own(copies, window):
    model, loss_fn, batch, _ = model_of("gpt with dropout")
    expected = trained(copy.deepcopy(model), loss_fn, batch)

    def run(model, with_parameters):
        activations = ActivationOffload(model, min_bytes=1, window_bytes=window)
        parameters = ParameterOffload(model) if with_parameters else None

        def offloaded(model, batch):
            with activations:
                return loss_fn(model, batch)

        assert same(trained(model, offloaded, batch), expected)
        if parameters is not None:
            assert parameters.counters()["offload_fetched_blocks"] == 12
        return activations.counters()["offload_sent_bytes"]

    # The parameters of blocks are not taken for activations.
    sent = run(copy.deepcopy(model), with_parameters=False)
    assert run(model, with_parameters=True) == sent > 0


@pytest.mark.parametrize("has_rest", [False, True])
@pytest.mark.parametrize("maker", [torch.optim.AdamW, torch.optim.SGD, "own"])
def test_with_an_offloaded_optimizer_for_the_rest(copies, monkeypatch, maker, has_rest):
    class Own(torch.optim.SGD):
        """Not torch's, so updated in one piece."""

    Own.__module__ = __name__
    make = partial(Own if maker == "own" else maker, lr=0.1)
    # What is not offloaded is on the device, as `OffloadedOptimizer` sees it.
    host = set()
    monkeypatch.setattr(OffloadedOptimizer, "_add", _added_unless(host, OffloadedOptimizer._add))

    def run(model, loss_fn, batch, optimizer):
        for _ in range(3):
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            before = [p.grad for p in model.parameters()]
            optimizer.step()
            assert all(p.grad is g for p, g in zip(model.parameters(), before, strict=True))
        return list(model.parameters())

    model, loss_fn, batch, _ = model_of("gpt")
    for part in (model.embed, model.head):
        part.requires_grad_(has_rest)
    twin = copy.deepcopy(model)
    expected = run(twin, loss_fn, batch, make(twin.parameters()))
    ParameterOffload(model)
    host |= {id(p) for block in model.blocks for p in block.parameters()}
    optimizer = OffloadedOptimizer(model.parameters(), make)
    assert sum(h is p for p, h in optimizer._hosts.items()) == len(host)
    assert same(run(model, loss_fn, batch, optimizer), expected)


def _added_unless(host, add):
    def added(self, parameter):
        if id(parameter) in host:
            self._hosts[parameter] = parameter
        else:
            add(self, parameter)

    return added


def test_under_autocast_casts_are_made_again(copies):
    def loss_fn(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return model(batch).float().square().mean()

    torch.manual_seed(0)
    model = nn.Sequential(*(Expert(32) for _ in range(4)))
    batch = torch.randn(16, 32)
    expected = trained(copy.deepcopy(model), loss_fn, batch)
    offload = ParameterOffload(model)
    assert same(trained(model, loss_fn, batch), expected)
    loss = loss_fn(model, batch)
    weights = {e.up.weight.shape for e in model} | {e.down.weight.shape for e in model}
    kept = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.dtype == torch.bfloat16]
    assert not [t for t in kept if t.shape in weights or t.t().shape in weights]
    loss.backward()
    assert offload.counters()["offload_most_resident_blocks"] == 2
