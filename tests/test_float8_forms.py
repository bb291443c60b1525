"""A layer in float8 is the object that it was: what is bound to it stays, whenever it came."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import nn, optim
from torch._dynamo.testing import CompileCounter
from torch.nn.utils import parametrize

from float8_models import (
    EMULATED,
    MEASURED,
    applied,
    batches,
    gpt,
    gpt_without_batch_norm,
    loss_fn,
    timer_of,
)
from tape import taped
from torchfast import Float8Linears, Float8Options, Plan, Trainer
from torchfast.precision import float8_forward
from torchfast.precision.float8_step import StepCheck


def trainer_of(model, options=EMULATED):
    return Trainer(model, partial(optim.SGD, lr=0.1), loss_fn, Plan(precision=options))


def calls_of(layer):
    """Return a list that grows with each call of a layer."""
    calls = []
    layer.register_forward_hook(lambda *_: calls.append(1))
    return calls


class Doubled(nn.Module):
    def forward(self, weight):
        return weight * 2


def test_buffers_are_in_the_state_and_load():
    model = gpt()
    model.blocks[0][0].register_buffer("count", torch.zeros(()))
    keys = list(model.state_dict())
    trainer = trainer_of(model)
    state = copy.deepcopy(trainer.state_dict())
    assert list(state["model"]) == keys
    state["model"]["blocks.0.0.count"].fill_(3)
    trainer.load_state_dict(state)
    assert model.blocks[0][0].count == 3
    trainer.close()
    assert model.blocks[0][0].count == 3


@pytest.mark.parametrize("options", [EMULATED, MEASURED])
def test_hooks_run_whenever_they_were_put_on(options, monkeypatch):
    model = gpt()
    layer = model.blocks[0][0]
    if options is MEASURED:
        monkeypatch.setattr(
            "torchfast.precision.float8_choice._on_device",
            timer_of({"bf16": 2.0, "tensorwise": 1.0, "rowwise": 3.0, "rowwise_with_gw_hp": 3.0}),
        )
        monkeypatch.setattr(
            "torchfast.transform_float8.check_step",
            lambda *_, **__: StepCheck(
                times_ms={}, name="float8", ratio=0.5, low=0.4, high=0.6, is_kept=True
            ),
        )
    before = calls_of(layer)
    trainer = trainer_of(model, options)
    between = calls_of(layer)
    trainer.step(batches(1)[0])
    assert type(layer).__name__ == "Float8Linear"
    during = calls_of(model.blocks[0][0])
    for calls in (before, between, during):
        calls.clear()
    trainer.step(batches(1)[0])
    assert before == between == during == [1]
    trainer.close()
    loss_fn(model, batches(1)[0])
    assert before == between == during == [1, 1]


def test_hooks_of_states_and_of_gradients_run_in_float8():
    model, seen = gpt(), []
    layer = model.blocks[0][0]
    layer.register_state_dict_post_hook(lambda *_: seen.append("save"))
    layer.register_load_state_dict_pre_hook(lambda *_: seen.append("load"))
    layer.register_load_state_dict_post_hook(lambda *_: seen.append("loaded"))
    layer.register_full_backward_hook(lambda *_: seen.append("backward"))
    with Float8Linears(model, EMULATED):
        model.load_state_dict(model.state_dict())
        loss_fn(model, batches(1)[0]).backward()
    assert seen == ["save", "load", "loaded", "backward"]


def test_what_a_layer_gets_in_float8_stays():
    model = gpt()
    float8 = applied(model, EMULATED)
    layer = model.blocks[0][0]
    layer.register_buffer("count", torch.ones(()))
    layer.note = "mine"
    with float8.left():
        assert type(layer) is nn.Linear
        assert layer.count == 1
    float8.close()
    assert model.blocks[0][0] is layer
    assert "blocks.0.0.count" in model.state_dict()
    assert layer.note == "mine"
    assert set(vars(layer)) == {*vars(gpt().blocks[0][0]), "note"}


def test_a_parametrization_that_a_layer_gets_in_float8_stays():
    model = gpt()
    float8 = applied(model, EMULATED)
    layer = model.blocks[0][0]
    weight = layer.weight.detach().clone()
    parametrize.register_parametrization(layer, "weight", Doubled())
    kinds = [type(layer)]
    for _ in range(2):
        with float8.left():
            kinds.append(type(layer))
            assert torch.equal(layer.weight, weight * 2)
        kinds.append(type(layer))
    assert kinds[0] is kinds[2] is kinds[4]  # what was compiled for one finds it again
    assert kinds[1] is kinds[3]
    assert kinds[1].__name__ == "ParametrizedLinear"
    assert kinds[1].__bases__ == (nn.Linear,)
    copied = copy.deepcopy(model).blocks[0][0]
    assert type(copied).__name__ == "ParametrizedLinear"
    assert type(copied).__bases__ == (nn.Linear,)
    assert torch.equal(copied.weight, weight * 2)
    assert copied.weight is not layer.weight
    with float8.left():
        assert set(vars(copied)) == set(vars(layer))
    loss_fn(model, batches(1)[0]).backward()
    float8.close()
    assert torch.equal(layer.weight, weight * 2)
    parametrize.remove_parametrizations(layer, "weight")
    assert type(layer) is nn.Linear
    assert torch.equal(layer.weight, weight * 2)


def test_layers_that_a_list_of_python_holds_are_in_float8():
    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = (nn.Linear(32, 32) for _ in range(2))
            self.held = [self.one, self.two]

        def forward(self, x):
            for layer in self.held:
                x = layer(x)
            return x

    torch.manual_seed(0)
    model, x = Listed(), torch.randn(16, 32)
    plain = model(x)
    with Float8Linears(model, EMULATED):
        assert not torch.equal(model(x), plain)
    assert torch.equal(model(x), plain)


def test_copies_have_what_a_layer_has_and_are_plain():
    model = gpt()
    model.blocks[0][0].register_buffer("count", torch.ones(()))
    with Float8Linears(model, EMULATED):
        model.blocks[0][0].note = "mine"
        copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for copied in copies:
        layer = copied.blocks[0][0]
        assert type(layer) is nn.Linear
        assert layer.count == 1
        assert set(vars(layer)) == set(vars(model.blocks[0][0]))
        loss_fn(copied, batches(1)[0])


def test_a_layer_that_is_resized_in_float8_is_whole_behind_it():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=160,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = transformers.LlamaForCausalLM(config)
    options = Float8Options(recipe="tensorwise", smallest=16, emulate=True, vocabulary=True)
    with Float8Linears(model, options) as float8:
        assert "lm_head" in float8.recipes
        model.resize_token_embeddings(176)
    assert type(model.lm_head) is nn.Linear
    assert model.lm_head.out_features == 176
    assert model(torch.zeros(1, 4, dtype=torch.long)).logits.shape[-1] == 176


def test_what_was_compiled_for_one_form_is_found_again():
    counter = CompileCounter()
    model = gpt_without_batch_norm()
    for block in model.blocks:
        block.compile(backend=counter)
    float8 = applied(model, EMULATED)
    loss_fn(model, batches(1)[0])
    with float8.left():
        loss_fn(model, batches(1)[0])
    compiled = counter.frame_count
    assert compiled > 0
    for _ in range(3):
        loss_fn(model, batches(1)[0])
        with float8.left():
            loss_fn(model, batches(1)[0])
    assert counter.frame_count == compiled


def test_a_graph_stays_valid_when_a_layer_has_left_float8_and_come_back(monkeypatch, request):
    class Product:
        """In bf16: the tape records no tensors of torchao's own."""

        @staticmethod
        def apply(inputs, weight, *_):
            return (inputs.to(weight.dtype) @ weight).to(torch.bfloat16)

    _, disabled = float8_forward.products()
    monkeypatch.setattr(float8_forward, "products", lambda: (Product, disabled))
    float8_forward.forward_class.cache_clear()
    request.addfinalizer(float8_forward.forward_class.cache_clear)
    model = gpt_without_batch_norm()
    for block in model.blocks:
        block[1].p = 0.0
    options = Float8Options(recipe="tensorwise", smallest=16, emulate=True, watch_at=(1, 5, 6))
    with taped(monkeypatch):
        plan = Plan(precision=options, cuda_graph=True)
        trainer = Trainer(model, partial(optim.SGD, lr=0.1), loss_fn, plan)
        for batch in batches(1) * 10:
            trainer.step(batch)
        report = trainer.report()
    assert "update 6: loss" in str(report)
    assert report.counters["captures"] == 1
    assert report.counters["replays"] >= 5
