"""Recompute in place: the bits of the model without, less memory, and no trace after close."""

from __future__ import annotations

import copy
import gc
import pickle
import types
import weakref
from collections import namedtuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from recomputed import GPT, GPTBlock, Live, ResNet, live_bytes, make, token_loss, tokens, train
from torchfast import PlanError, Recompute, RecomputeOptions
from torchfast._core.compare import differences
from torchfast.memory.kept_results import op_class

MODELS = ("gpt", "gpt with dropout", "resnet", "llama", "gpt2", "vit")


def of(name):
    if name in ("llama", "gpt2", "vit"):
        pytest.importorskip("transformers")
    return make(name)


def saved_in_blocks(model, loss_fn, batch, blocks):
    """Return what a forward keeps that its blocks made."""
    whole = live_bytes(model, loss_fn, batch)
    kept = [block.forward for block in blocks]
    for block in blocks:
        block.forward = lambda x, *_, **__: x
    rest = live_bytes(model, loss_fn, batch)
    for block, forward in zip(blocks, kept, strict=True):
        if isinstance(forward, types.MethodType):
            del block.forward
        else:
            block.forward = forward
    return whole - rest


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
    plain, loss_fn, batch = of(name)
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
    models = []
    for is_recomputed in (False, True):
        torch.manual_seed(3)
        model = GPT(dropout=0.2)
        if is_recomputed:
            with Recompute(model, what):
                models.append(train(model, loss_fn, tokens()))
        else:
            models.append(train(model, loss_fn, tokens()))
    assert differences(*models) == []
    assert differences(expected, models[0]) != []


class Counted(nn.Module):
    """Counts how often its forward runs."""

    def __init__(self, width=4):
        super().__init__()
        self.line = nn.Linear(width, width)
        self.num_runs = 0

    def forward(self, x, **others):
        self.num_runs += 1
        return torch.tanh(self.line(x))


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
    model, loss_fn, batch = of("llama")
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


# --- less memory ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt", "gpt with dropout", "resnet"])
@pytest.mark.parametrize(("what", "share"), [("blocks", 0.25), ("selective", 0.5)])
def test_memory(name, what, share):
    model, loss_fn, batch = make(name)
    blocks = model.blocks if isinstance(model, GPT) else model.stages
    plain = saved_in_blocks(model, loss_fn, batch, blocks)
    with Recompute(model, what):
        live_bytes(model, loss_fn, batch)  # the first call of selective is measured
        kept = saved_in_blocks(model, loss_fn, batch, blocks)
    assert 0 < kept <= share * plain


def test_selective_keeps_what_costs_most_and_says_so():
    model, loss_fn, batch = make("gpt")
    with Recompute(model, "selective") as recompute:
        assert "chosen at the first call" in recompute.decisions()[0].detail
        loss_fn(model, batch)
        detail = recompute.decisions()[0].detail
    # The wide layer in front of attention is computed again; of the last one nothing is needed.
    assert "keeps 1 of 1 attention, 2 of 4 products" in detail


def test_what_is_kept_is_not_computed_again():
    ran = []

    class Noting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            ran.append(op_class(func))
            return func(*args, **(kwargs or {}))

    model, loss_fn, batch = make("gpt")
    counts = []
    for what in ("blocks", "selective"):
        with Recompute(model, what):
            loss_fn(model, batch).backward()
            loss = loss_fn(model, batch)
            ran.clear()
            with Noting():
                loss.backward()
            counts.append(ran.count("attention"))
    assert counts == [3, 0]


def test_nothing_holds_the_model_or_its_activations():
    model, loss_fn, batch = make("gpt")
    recompute = Recompute(model, "selective")
    for _ in range(2):
        loss_fn(model, batch).backward()
    gone = weakref.ref(model.blocks[0])
    del model
    assert gone() is None
    recompute.close()


@pytest.mark.parametrize("what", ["blocks", "selective"])
def test_a_forward_without_a_backward_is_freed(what):
    model, loss_fn, batch = make("gpt with dropout")
    with Recompute(model, what):
        loss_fn(model, batch)
        gc.collect()
        gc.disable()  # what only the collector finds is held too long
        try:
            with Live() as live:
                loss = loss_fn(model, batch)
            others = [*model.parameters(), batch]
            assert live.live_bytes(others) > 10_000
            del loss
            assert live.live_bytes(others) == 0
        finally:
            gc.enable()


# --- in place ------------------------------------------------------------------------------------


def test_the_model_stays_what_it_is_and_close_takes_everything_away():
    model, _, _ = make("gpt")
    seen = []
    model.blocks[0].register_forward_hook(lambda *_: seen.append(1))
    before = [dict(vars(module)) for module in model.modules()]
    keys, names = list(model.state_dict()), [n for n, _ in model.named_parameters()]
    kinds, text = [type(m) for m in model.modules()], repr(model)
    recompute = Recompute(model)
    assert list(model.state_dict()) == keys
    assert [n for n, _ in model.named_parameters()] == names
    assert [type(m) for m in model.modules()] == kinds
    assert repr(model) == text
    token_loss(model, tokens()).backward()
    assert seen == [1]  # a hook runs once, outside of what is recomputed
    recompute.close()
    recompute.close()
    assert [dict(vars(module)) for module in model.modules()] == before


@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_computes_by_its_class_with_its_own_parameters(how):
    model = nn.Sequential(Counted(), Counted())
    with Recompute(model):
        other = how(model)
        with torch.no_grad():
            model[0].line.weight.zero_()
        other(torch.ones(2, 4)).sum().backward()
        assert other[0].forward.__self__ is other[0]
    assert [block.num_runs for block in other] == [1, 1]
    assert other[0].line.weight.grad is not None
    assert model[0].line.weight.grad is None


def test_a_forward_of_the_users_own_is_kept():
    model = nn.Sequential(Counted(), Counted())
    own = model[0].forward = lambda x: x * 3
    with Recompute(model):
        assert torch.equal(model[0](torch.ones(1)), torch.full((1,), 3.0))
        assert copy.deepcopy(model)[0].forward is own
    assert model[0].forward is own


def test_named_modules():
    model = GPT()
    with Recompute(model, {"blocks.*"}) as r:
        assert r.regions == ("blocks.0", "blocks.1", "blocks.2")
    with Recompute(model, (GPTBlock, "head")) as r:
        assert r.regions == ("blocks.0", "blocks.1", "blocks.2", "head")
    with Recompute(model, RecomputeOptions(regions=("blocks.*",), every=2)) as r:
        assert r.regions == ("blocks.0", "blocks.2")


def test_what_has_no_blocks_is_refused():
    with pytest.raises(ValueError, match="no blocks of the model repeat; name modules instead"):
        Recompute(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="recompute names 'nope', which no module"):
        Recompute(GPT(), ("nope",))
    with pytest.raises(TypeError, match=r"must be a torch.nn.Module, got 3"):
        Recompute(3)


def test_a_model_that_recomputes_by_itself_is_refused():
    model, _, _ = of("llama")
    model.model.layers[0].gradient_checkpointing = True  # as the model's own switch does
    with pytest.raises(
        ValueError, match=r"gradient_checkpointing is on in .*layers\.0; turn it off"
    ):
        Recompute(model)
    model.model.layers[0].gradient_checkpointing = False
    model.grad_checkpointing = True  # as timm's does
    with pytest.raises(ValueError, match=r"turn it off, by .*set_grad_checkpointing\(False\)"):
        Recompute(model)
    model.grad_checkpointing = False
    Recompute(model).close()


def test_a_model_with_torchs_wrapper_is_refused():
    wrapper = pytest.importorskip("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    model = nn.Sequential(*(wrapper.checkpoint_wrapper(Counted()) for _ in range(2)))
    with pytest.raises(ValueError, match="checkpoint_wrapper"):
        Recompute(model, ("0",))


def test_two_handles_on_one_model():
    model = GPT()
    first = Recompute(model)
    with pytest.raises(ValueError, match=r"another Recompute does so already \(its module blocks"):
        Recompute(model)
    del first  # nobody is left to close it
    second = Recompute(model)
    second.close()
    assert not any("forward" in vars(module) for module in model.modules())


# --- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (False, None),
        ("blocks", RecomputeOptions()),
        ("selective", RecomputeOptions(selective=True)),
        (0.5, RecomputeOptions(budget=0.5)),
        (1, RecomputeOptions(budget=1.0)),
        ({"b", "a"}, RecomputeOptions(regions=("a", "b"))),
        ([GPTBlock], RecomputeOptions(regions=(GPTBlock,))),
    ],
)
def test_options_of_what_a_plan_takes(value, expected):
    assert RecomputeOptions.of(value) == expected


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ("layers.*", PlanError, r"for one path write \('layers.\*',\)"),
        (1.5, PlanError, "budget must be a number between 0 and 1, got 1.5"),
        (None, TypeError, "recompute must be False, one of"),
        (True, TypeError, "recompute must be False, one of"),
        ((), PlanError, "at least one region"),
        ((3,), TypeError, "regions must hold paths"),
    ],
)
def test_what_makes_no_sense_is_refused(values, error, message):
    with pytest.raises(error, match=message):
        RecomputeOptions.of(values)


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"regions": "layers"}, PlanError, r"for one path write \('layers',\)"),
        ({"regions": 3}, TypeError, "regions must be one of"),
        ({"every": 0}, ValueError, "every must be >= 1"),
        ({"selective": 1}, TypeError, "selective must be True or False"),
        ({"share": "half"}, TypeError, "share must be a number between 0 and 1"),
        ({"budget": 0.5, "every": 2}, PlanError, "cannot stand beside every"),
        ({"evry": 2}, TypeError, "did you mean 'every'"),
    ],
)
def test_options_are_checked(values, error, message):
    with pytest.raises(error, match=message):
        RecomputeOptions(**values)


def test_a_budget_is_not_for_the_wrapper():
    with pytest.raises(PlanError, match="a memory budget is the compiler's"):
        Recompute(GPT(), 0.5)


def test_no_operation_that_writes_is_kept():
    aten = torch.ops.aten
    assert op_class(aten.addmm.default) == "product"
    assert op_class(aten.addmm_.default) is None
    assert op_class(aten.convolution.default) == "convolution"
    assert op_class(aten._scaled_dot_product_flash_attention.default) == "attention"
    assert op_class(aten._scaled_dot_product_cudnn_attention.default) == "attention"
    assert op_class(aten._scaled_dot_product_efficient_attention_backward.default) is None
    assert op_class(aten.add.Tensor) is None


def test_resnets_are_recomputed_by_their_blocks():
    with Recompute(ResNet()) as recompute:
        assert repr(recompute) == "Recompute(ResNet: 3 blocks of Bottleneck (stages.0 to stages.2))"
