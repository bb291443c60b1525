"""Recompute takes less memory, stands in place, goes without a trace, and checks its options."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import types
import weakref

import pytest
import torch
from torch import nn

from recomputed import (
    GPT,
    Counted,
    GPTBlock,
    Live,
    ResNet,
    live_bytes,
    make,
    make_or_skip,
    token_loss,
    tokens,
)
from torchfast import ClosedError, PlanError, Recompute, RecomputeOptions
from torchfast.memory.kept_results import op_class


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


def test_a_shallow_copy_runs_the_block_that_it_is_a_copy_of():
    model = nn.Sequential(Counted(), Counted())
    with Recompute(model):
        other = copy.copy(model[0])
        other(torch.ones(2, 4))
        assert (other.num_runs, model[0].num_runs) == (0, 1)
        del model
        with pytest.raises(RuntimeError, match=r"a shallow copy .* is gone; use copy\.deepcopy"):
            other(torch.ones(2, 4))


def test_replicas_of_data_parallel_are_refused():
    model = nn.DataParallel(nn.Sequential(Counted(), Counted()))
    Recompute(model).close()  # it makes none
    model.device_ids = [0, 1]
    with pytest.raises(ValueError, match=r"nn\.DataParallel makes shallow copies"):
        Recompute(model)


def test_a_forward_of_the_users_own_is_kept():
    model = nn.Sequential(Counted(), Counted())
    own = model[0].forward = lambda x: x * 3
    with Recompute(model):
        assert torch.equal(model[0](torch.ones(1)), torch.full((1,), 3.0))
        assert copy.deepcopy(model)[0].forward is own
    assert model[0].forward is own


@pytest.mark.parametrize("what", ["blocks", "selective"])
def test_close_ends_it_where_somebody_has_wrapped_the_forward_since(what):
    model = nn.Sequential(Counted(), Counted())
    recompute = Recompute(model, what)
    for block in model:
        block.forward = functools.partial(block.forward)  # as accelerate does
    recompute.close()
    model(torch.ones(2, 4)).sum().backward()
    assert [block.num_runs for block in model] == [1, 1]
    with Recompute(model):
        model(torch.ones(2, 4)).sum().backward()
    assert [block.num_runs for block in model] == [3, 3]


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
    model, _, _ = make_or_skip("llama")
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


@pytest.mark.filterwarnings("ignore:`torch.jit.:DeprecationWarning")
@pytest.mark.parametrize("how", ["script", "trace"])
def test_blocks_of_torch_script_are_refused(how):
    def scripted():
        line = nn.Linear(4, 4)
        return torch.jit.script(line) if how == "script" else torch.jit.trace(line, torch.ones(4))

    model = nn.Sequential(nn.Linear(4, 4), scripted(), scripted())
    with pytest.raises(ValueError, match=r"its module 1 is TorchScript, .* name others"):
        Recompute(model, ("1", "2"))
    Recompute(model, ("0",)).close()  # what is not recomputed may be what it is


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
        (1.5, PlanError, "recompute must be .* a number between 0 and 1, .* got 1.5"),
        (0, PlanError, "recompute must be False, .* got 0"),
        (RecomputeOptions, TypeError, "recompute must be .* or RecomputeOptions, got"),
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


def test_what_is_closed_is_not_entered_again():
    model = GPT()
    with Recompute(model) as recompute:
        pass
    with pytest.raises(ClosedError, match="this Recompute was closed; make a new one"):
        recompute.__enter__()
    with Recompute(model):
        assert "forward" in vars(model.blocks[0])
