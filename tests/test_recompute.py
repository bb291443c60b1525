"""Recompute computes the bits of the model without, whatever its blocks take, return and change."""

from __future__ import annotations

import copy
from collections import namedtuple
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from recomputed import (
    GPT,
    Counted,
    make,
    make_or_skip,
    token_loss,
    tokens,
    train,
    with_and_without,
)
from torchfast import Recompute, RecomputeOptions
from torchfast._core.compare import differences

MODELS = ("gpt", "gpt with dropout", "resnet", "llama", "gpt2", "vit")


# --- the same numbers ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "what"),
    [
        *((name, what) for name in MODELS for what in ("blocks", "selective")),
        ("gpt with dropout", RecomputeOptions(every=2)),
        ("gpt with dropout", RecomputeOptions(selective=True, share=1.0)),
    ],
)
def test_bits(name, what):
    plain, loss_fn, batch = make_or_skip(name)
    if hasattr(getattr(plain, "config", None), "use_cache"):
        # What it is without recompute: a cache lays the keys out in another order, and which bits
        # come of that depends on the machine.
        plain.config.use_cache = False
    expected = train(plain.train(), loss_fn, batch)
    model, _, _ = make(name)
    with Recompute(model.train(), what):
        assert differences(expected, train(model, loss_fn, batch)) == []


@pytest.mark.parametrize("what", ["blocks", "selective"])
def test_bits_under_autocast_and_accumulation(what):
    def loss_fn(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return token_loss(model, batch[:2]) + token_loss(model, batch[2:])

    expected = train(GPT(dropout=0.2).train(), loss_fn, tokens(), steps=1)
    results = with_and_without(partial(GPT, dropout=0.2), what, loss_fn, tokens, seed=3)
    assert differences(*results) == []
    assert differences(expected, results[0]) != []


def test_it_is_the_forward_that_runs_again():
    model = nn.Sequential(Counted(), Counted())
    with Recompute(model):
        model(torch.ones(2, 4)).sum().backward()
    assert [block.num_runs for block in model] == [2, 2]


@pytest.mark.parametrize("state", ["eval", "no_grad", "inference"])
def test_nothing_is_recomputed_outside_of_training(state):
    model = nn.Sequential(Counted(), Counted())
    with Recompute(model):
        if state == "eval":
            model.eval()(torch.ones(2, 4)).sum().backward()
        else:
            with torch.no_grad() if state == "no_grad" else torch.inference_mode():
                model(torch.ones(2, 4))
    assert [block.num_runs for block in model] == [1, 1]


@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm_counts_each_step_once(momentum):
    model, loss_fn, batch = make("resnet")
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = momentum
    plain = copy.deepcopy(model)
    expected = train(plain, loss_fn, batch)
    with Recompute(model):
        assert differences(expected, train(model, loss_fn, batch)) == []
    assert int(model.stages[0].norm1.num_batches_tracked) == 3


def test_a_norm_that_is_frozen_stays_what_it_is():
    model, loss_fn, batch = make("resnet")
    for norm in (m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
        norm.running_mean.uniform_()
        norm.eval()
    expected = train(copy.deepcopy(model), loss_fn, batch)
    with Recompute(model):
        assert differences(expected, train(model, loss_fn, batch)) == []


class Spectral(nn.Module):
    """Its weight depends on a buffer that each forward moves on."""

    def __init__(self):
        super().__init__()
        self.line = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        return torch.tanh(self.line(x - self.mean))


def test_buffers_that_a_forward_writes_to_are_as_the_forward_found_them():
    torch.manual_seed(0)
    model = nn.Sequential(Spectral(), Spectral(), Spectral())
    batch = torch.randn(4, 6)

    def loss_fn(model, x):
        return model(x).square().mean() + model(0.5 * x).mean()

    expected = train(copy.deepcopy(model), loss_fn, batch)
    with Recompute(model):
        assert differences(expected, train(model, loss_fn, batch)) == []


class Observed(nn.Module):
    """Its observer is switched on later."""

    def __init__(self):
        super().__init__()
        self.line, self.is_on = nn.Linear(4, 4), False
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        if self.is_on:
            self.mean.mul_(0.5).add_(x.detach().mean(0))
        return torch.tanh(self.line(x))


def test_a_buffer_that_a_later_forward_is_the_first_to_write_to():
    torch.manual_seed(0)
    model = nn.Sequential(Observed(), Observed())
    batch = torch.randn(4, 4)

    def trained(model):
        def loss_fn(model, x):
            return model(x).square().mean()

        train(model, loss_fn, batch, steps=2)
        for block in model:
            block.is_on = True
        return train(model, loss_fn, batch)

    expected = trained(copy.deepcopy(model))
    with Recompute(model):
        assert differences(expected, trained(model)) == []


Both = namedtuple("Both", ["x", "more"])


class Containers(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(4, 4)

    def forward(self, pair, /, scale, *, extra=None, note=""):
        hidden = torch.tanh(self.line(pair.x)) * scale + extra["bias"]
        extra["seen"].append(note)
        return Both(hidden, [pair.more + 1, None]), {"note": note, "flag": True}


class Passing(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Containers() for _ in range(3))

    def forward(self, x):
        pair, seen, bias = Both(x, torch.ones(4)), [], torch.full((4,), 0.1)
        for number, layer in enumerate(self.layers):
            pair, notes = layer(pair, 2.0, extra={"bias": bias, "seen": seen}, note=str(number))
            assert notes == {"note": str(number), "flag": True}
            pair = Both(pair.x, pair.more[0])
        assert seen == ["0", "1", "2"]
        return pair.x + pair.more


def test_arguments_and_results_of_any_kind_pass():
    torch.manual_seed(0)
    model = Passing()

    def loss_fn(model, x):
        return model(x).square().mean()

    expected = train(copy.deepcopy(model), loss_fn, torch.ones(2, 4))
    with Recompute(model):
        assert differences(expected, train(model, loss_fn, torch.ones(2, 4))) == []


class ByKeyword(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(4, 4)

    def forward(self, *, x):
        return F.dropout(torch.tanh(self.line(x)), 0.5, self.training)


def test_a_block_that_is_called_several_times_by_keyword():
    torch.manual_seed(0)
    block = ByKeyword()
    model = nn.ModuleList([block, ByKeyword(), block])

    def loss_fn(model, x):
        for part in model:
            x = part(x=x)
        return x.square().mean()

    expected = train(copy.deepcopy(model), loss_fn, torch.ones(2, 4))
    with Recompute(model):
        assert differences(expected, train(model, loss_fn, torch.ones(2, 4))) == []


def test_an_input_that_is_overwritten_is_an_error_and_not_another_gradient():
    model = nn.Sequential(Counted(), Counted())
    x = torch.ones(2, 4)
    with Recompute(model):
        loss = model(x).sum()
        x.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


class OverwritesInput(nn.Module):
    """As blocks that begin with an activation in place."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.ReLU(inplace=True), nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.first(x))


@pytest.mark.parametrize("what", ["blocks", "selective"])
def test_a_block_that_overwrites_its_input_is_an_error_that_names_it(what):
    model = nn.Sequential(nn.Linear(4, 4), OverwritesInput(), OverwritesInput(), OverwritesInput())
    model(torch.ones(2, 4)).sum().backward()
    with Recompute(model, what):
        loss = model(torch.ones(2, 4)).sum()
        with pytest.raises(RuntimeError, match="write to a clone, within the block too"):
            loss.backward()


class InPlace(nn.Module):
    """Writes to the result of a product, which selective recompute would keep."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        y = self.first(x)
        y += 1
        return x + self.last(F.relu(y, inplace=True).sigmoid())


def test_a_kept_result_that_is_written_to_is_computed_again():
    torch.manual_seed(0)
    model = nn.Sequential(InPlace(), InPlace(), InPlace())

    def loss_fn(model, x):
        return model(x).square().mean()

    expected = train(copy.deepcopy(model), loss_fn, torch.ones(2, 8))
    with Recompute(model, RecomputeOptions(selective=True, share=1.0)):
        assert differences(expected, train(model, loss_fn, torch.ones(2, 8))) == []


def test_gradients_of_gradients_and_a_second_backward():
    torch.manual_seed(0)
    model = nn.Sequential(Counted(), Counted())
    x = torch.ones(2, 4, requires_grad=True)

    def result():
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        loss = gradient.square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        found = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        return found

    expected = result()
    with Recompute(model):
        assert all(map(torch.equal, expected, result()))


def test_the_cache_of_keys_and_values_is_left_out_and_said():
    model, loss_fn, batch = make_or_skip("llama")
    with Recompute(model.train()) as recompute:
        loss_fn(model, batch).backward()
        assert "cache of keys and values" in recompute.decisions()[0].detail


def test_a_cache_with_earlier_tokens_is_used():
    transformers = pytest.importorskip("transformers")
    model, _, batch = make("llama")
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(batch, past_key_values=cache)
    expected = model.train()(batch, past_key_values=copy.deepcopy(cache)).logits
    with Recompute(model) as recompute:
        logits = model(batch, past_key_values=cache).logits
        assert torch.equal(logits, expected)
        aside = [d for d in recompute.decisions() if d.outcome == "stepped aside"]
        assert "in 3 calls: they were called with a cache" in aside[0].detail
