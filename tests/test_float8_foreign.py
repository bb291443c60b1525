"""Layers in float8 whose converter is gone, or is not the trainer that trains them."""

from __future__ import annotations

import copy
import gc
import weakref
from functools import partial

import pytest
from torch import nn, optim

from float8_models import EMULATED, applied, batches, gpt, loss_fn
from torchfast import Float8Linears, Plan, PlanError, Trainer

SGD = partial(optim.SGD, lr=0.1)


def kinds(model):
    return {type(m) for m in model.modules() if isinstance(m, nn.Linear)}


@pytest.mark.parametrize("precision", ["as_given", "bf16"])
def test_a_trainer_that_was_dropped_gives_plain_layers_back(precision):
    model = gpt()
    trainer = Trainer(model, SGD, loss_fn, Plan(precision=EMULATED))
    trainer.step(batches(1)[0])
    assert len(kinds(model)) == 2
    del trainer
    gc.collect()
    assert kinds(model) == {nn.Linear}
    trainer = Trainer(model, SGD, loss_fn, Plan(precision=precision))
    trainer.step(batches(1)[0])
    assert "float8" not in str(trainer.report())


def bound(model):
    float8 = Float8Linears(model, EMULATED, until_dropped=True)
    float8.apply()
    return float8


def test_layers_converted_by_hand_stay_until_they_are_closed():
    model = gpt()
    Float8Linears(model, EMULATED).apply()
    gc.collect()
    assert len(kinds(model)) == 2


def test_a_model_that_holds_its_converter_is_dropped_with_it():
    model = gpt()
    model.converter = bound(model)  # as one that has its trainer in an attribute
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


def test_a_converter_that_is_dropped_late_leaves_layers_of_another_alone():
    model = gpt()
    first = bound(model)
    first.close()
    second = applied(model, EMULATED)
    del first
    gc.collect()
    assert len(kinds(model)) == 2
    second.close()
    assert kinds(model) == {nn.Linear}


def test_exact_numbers_are_refused_where_another_has_layers_in_float8():
    model = gpt()
    with Float8Linears(model, EMULATED):
        for plan in ("exact", "eager", Plan(precision="fp32")):
            with pytest.raises(PlanError, match=r"has layer 'blocks\.0\.0' in float8; close\(\)"):
                Trainer(model, SGD, loss_fn, plan)
        Trainer(copy.deepcopy(model), SGD, loss_fn, "exact").close()
    Trainer(model, SGD, loss_fn, "exact").close()


def test_one_that_hangs_in_a_cycle_is_not_there():
    model = gpt()
    gc.disable()
    try:
        dropped = bound(model)
        dropped.itself = dropped
        del dropped
        assert len(kinds(model)) == 2
        Trainer(model, SGD, loss_fn, "exact").close()
    finally:
        gc.enable()


def test_the_report_names_layers_that_another_has_in_float8():
    model = gpt()
    trainer = Trainer(model, SGD, loss_fn, Plan(precision="bf16"))
    assert "float8 of others" not in str(trainer.report())
    with Float8Linears(model, EMULATED):
        report = str(trainer.report())
        assert "4 layers are in float8 by another trainer, Float8Linears or torchao" in report
        assert "'blocks.0.0', 'blocks.0.3', 'blocks.1.0', 'blocks.1.3'" in report
    assert "float8 of others" not in str(trainer.report())


def test_the_report_of_one_in_float8_names_only_those_of_others():
    model = gpt()
    only = Plan(precision=EMULATED)
    trainer = Trainer(model.blocks[0], SGD, loss_fn, only)
    assert "float8 of others" not in str(trainer.report())


def test_layers_that_torchao_has_converted_are_the_model_as_given():
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = gpt()
    convert_to_float8_training(
        model.blocks, config=Float8LinearConfig.from_recipe_name("tensorwise")
    )
    trainer = Trainer(model, SGD, loss_fn, "exact")
    assert "4 layers are in float8 by another trainer" in str(trainer.report())
