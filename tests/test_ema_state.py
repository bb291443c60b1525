"""Averaged weights in saved state, in checkpoints and in fit."""

from __future__ import annotations

import copy
import logging
import os
from functools import partial

import pytest
import torch
from torch import optim

import fitting
from averages import MixedNet, comparable, reference, weights_of
from models import BatchNormNet, DropoutNet, make_batches, mean_loss
from stepping import make_trainer, roundtrip
from torchfast import (
    CheckpointManager,
    EMAOptions,
    Plan,
    StateMismatchError,
    Trainer,
    import_state_dict,
)
from torchfast.__main__ import main
from torchfast._core.compare import differences

SGD = partial(optim.SGD, lr=0.1, momentum=0.9)
ADAMW = partial(optim.AdamW, lr=0.01, fused=True)
WARM = EMAOptions(decay=0.9, warm_up=True)
SKIP = Plan(nonfinite="skip")
BATCHES = make_batches(6)


def trained(steps, **options):
    trainer = make_trainer(ADAMW, **{"ema": 0.9, **options})
    torch.manual_seed(1)
    for batch in make_batches(steps):
        trainer.step(batch)
    return trainer


# --- the state ------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["exact", SKIP], ids=str)
@pytest.mark.parametrize("ema", [0.9, WARM, EMAOptions(decay=0.9, use_buffers=True)], ids=repr)
@pytest.mark.parametrize("net", [BatchNormNet, MixedNet])
@pytest.mark.parametrize("at", [0, 1, 4])
def test_a_resumed_average_is_the_uninterrupted_one(at, net, ema, plan):
    whole = trained(8, net=net, ema=ema, plan=plan)
    state = roundtrip(trained(at, net=net, ema=ema, plan=plan).state_dict())
    resumed = make_trainer(ADAMW, net=net, ema=ema, plan=plan)
    resumed.load_state_dict(state)
    for batch in make_batches(8)[at:]:
        resumed.step(batch)
    expected, found = ({**t.state_dict(), "rng": None} for t in (whole, resumed))
    assert not differences(expected, found)
    assert found["ema"]["num_averaged"] == 8


def test_the_state_has_the_models_own_keys_and_loads_into_a_plain_model():
    trainer = trained(3, net=BatchNormNet)
    state = trainer.state_dict()
    assert state["ema_model"].keys() == state["model"].keys()
    plain = BatchNormNet()
    plain.load_state_dict(state["ema_model"])
    assert not differences(weights_of(trainer.ema_model), weights_of(plain))
    assert state["ema"] == {"num_averaged": 3, "unrounded": {}}
    assert not {"ema", "ema_model"} & make_trainer(SGD).state_dict().keys()


def test_two_trainers_that_load_one_state_share_no_average():
    state = trained(3).state_dict()
    first, second = (make_trainer(ADAMW, ema=0.9) for _ in range(2))
    first.load_state_dict(state)
    second.load_state_dict(state)
    before = copy.deepcopy(weights_of(second.ema_model))
    first.step(make_batches(1)[0])
    assert not differences(before, weights_of(second.ema_model))


def test_an_average_of_32_bits_goes_on_in_16_and_back():
    """Only the model's dtype differs: nothing of the average is rounded on the way in."""

    def narrow():
        return DropoutNet().bfloat16()

    def loss(model, batch):
        weight = model.layers[0].weight
        return mean_loss(lambda x: model(x.to(weight.dtype)).float(), batch)

    wide = trained(3, loss_fn=loss)
    short = make_trainer(ADAMW, loss, net=narrow, ema=0.9)
    short.load_state_dict(wide.state_dict())
    state = short.state_dict()
    assert not differences(dict(wide.ema_model.named_parameters()), state["ema"]["unrounded"])
    again = make_trainer(ADAMW, loss, ema=0.9)
    again.load_state_dict(state)
    assert not differences(weights_of(wide.ema_model), weights_of(again.ema_model))


@pytest.mark.parametrize("ema", [0.9, WARM], ids=repr)
def test_a_state_without_an_average_begins_one_anew(ema, caplog):
    state = roundtrip(trained(4, ema=None).state_dict())
    trainer = trained(5, ema=ema)
    trainer.load_state_dict(state)
    assert [r.getMessage() for r in caplog.records if "holds no averaged weights" in r.message]
    assert not differences(weights_of(trainer.model), weights_of(trainer.ema_model))
    expected = reference(trainer.model, ema)
    for batch in make_batches(4, seed=2):
        trainer.step(batch)
        expected.update_parameters(trainer.model)
    assert not differences(*comparable(expected, trainer.ema_model, use_buffers=False))


@pytest.mark.usefixtures("tape")
def test_beside_a_graph_too_it_begins_anew():
    state = roundtrip(trained(4, ema=None).state_dict())
    trainer = trained(6)
    trainer.load_state_dict(state)
    expected = reference(trainer.model, 0.9)
    for batch in make_batches(4, seed=2):
        trainer.step(batch)
        expected.update_parameters(trainer.model)
        assert not differences(*comparable(expected, trainer.ema_model, use_buffers=False))
    counters = trainer.report().counters
    assert (counters["captures"], counters["replays"]) == (1, 7)


def test_an_average_that_nobody_keeps_is_left_out_with_a_warning(caplog):
    state = roundtrip(trained(4).state_dict())
    trainer = make_trainer(ADAMW)
    trainer.load_state_dict(state)
    assert not differences(state["model"], trainer.model.state_dict())
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "this trainer averages none" in record.getMessage()


def without(key):
    return lambda state: state.pop(key)


def change(*path):
    def changed(state):
        *inner, (key, value) = path
        for name in inner:
            state = state[name]
        state[key] = value

    return changed


MISFITS = {
    "no model": (without("ema_model"), r"averaged model state must be a mapping, got NoneType"),
    "no count": (without("ema"), r"'ema' lacks 'num_averaged' or 'unrounded'; load what"),
    "other count": (change(("ema", 3)), r"'ema' lacks 'num_averaged' or 'unrounded'"),
    "averages of no mapping": (
        change("ema", ("unrounded", None)),
        r"'ema' lacks 'num_averaged' or",
    ),
    "a count that is none": (change("ema", ("num_averaged", "3")), r"'num_averaged'"),
    "a key too many": (
        change("ema_model", ("more", torch.ones(1))),
        r"averaged model state does not fit DropoutNet \(1 keys\): unexpected 'more'",
    ),
    "another shape": (
        change("ema_model", ("layers.0.bias", torch.ones(3))),
        r"averaged model state does not fit .*'layers.0.bias' has shape \(3,\), expected \(16,\)",
    ),
    "another average": (
        change("ema", "unrounded", ("layers.0.bias", torch.ones(3))),
        r"'ema' has averages of other names or shapes than DropoutNet: \['layers.0.bias'\]",
    ),
    "no average": (
        change("ema", "unrounded", ("layers.0.bias", 3)),
        r"'ema' has averages of other names or shapes",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_state_that_does_not_fit_changes_nothing(name):
    spoil, message = MISFITS[name]
    state = roundtrip(trained(4).state_dict())
    spoil(state)
    trainer = trained(2)
    before = copy.deepcopy(trainer.state_dict())
    with pytest.raises(StateMismatchError, match=message):
        trainer.load_state_dict(state)
    assert not differences(before, trainer.state_dict())


# --- checkpoints ----------------------------------------------------------------------------------


def test_a_checkpoint_exports_it(tmp_path, capsys):
    trainer = trained(3, net=BatchNormNet)
    with CheckpointManager(tmp_path / "run") as checkpoints:
        checkpoints.save(trainer.state_dict(), 3)
        checkpoints.export(tmp_path / "by-call.pt", part="ema_model")
    arguments = [os.fspath(tmp_path / "run"), os.fspath(tmp_path / "by-command.pt")]
    assert main(["checkpoint", "export", *arguments, "--part", "ema_model"]) == 0
    capsys.readouterr()
    for name in ("by-call.pt", "by-command.pt"):
        model = BatchNormNet()
        model.load_state_dict(import_state_dict(tmp_path / name))
        assert not differences(weights_of(trainer.ema_model), weights_of(model))


KINDS = {
    "plain": {"ema": 0.9},
    "warmed up": {"ema": WARM, "net": BatchNormNet, "optimizer": ADAMW},
    "skipping": {"ema": 0.9, "plan": SKIP},
    "fp16": {"ema": WARM, "plan": Plan(precision="fp16")},
    "16 bits": {"ema": 0.999, "net": MixedNet},
}


@pytest.mark.parametrize("at", [1, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_a_fit_that_was_cut_short_ends_with_the_same_average(kind, at, tmp_path):
    whole = fitting.make_trainer(**KINDS[kind])
    fitting.fit(BATCHES, trainer=whole, steps=10)
    fitting.fit(BATCHES, trainer=fitting.make_trainer(**KINDS[kind]), steps=at, checkpoint=tmp_path)
    resumed = fitting.make_trainer(**KINDS[kind])
    fitting.fit(BATCHES, trainer=resumed, steps=10, checkpoint=tmp_path)
    assert resumed.num_steps == 10
    expected, found = ({**t.state_dict(), "rng": None} for t in (whole, resumed))
    assert not differences(expected, found)


def test_a_run_may_take_an_average_up(tmp_path, caplog):
    fitting.fit(BATCHES, trainer=fitting.make_trainer(), steps=4, checkpoint=tmp_path)
    trainer = fitting.make_trainer(ema=0.9)
    fitting.fit(BATCHES, trainer=trainer, steps=8, checkpoint=tmp_path)
    assert trainer.state_dict()["ema"]["num_averaged"] == 4
    assert "holds no averaged weights" in caplog.text


# --- evaluation in fit ----------------------------------------------------------------------------


def test_fit_evaluates_the_average_where_that_is_asked_for():
    held_out = make_batches(2, seed=9)
    values = {}
    for flag in (False, True):
        trainer = fitting.make_trainer(ema=0.9)
        result = fitting.fit(
            BATCHES, trainer=trainer, steps=6, evaluate=held_out, evaluate_ema=flag
        )
        values[flag] = result.evaluation["loss"]
        assert result.evaluation == trainer.evaluate(held_out, ema=flag)
    assert values[False] != values[True]


def test_an_evaluation_of_ones_own_gets_the_averaged_model():
    seen = []

    def evaluate(model):
        seen.append(model)
        model.train()  # and is put back
        return {"loss": 1.0}

    trainer = fitting.make_trainer(ema=0.9)
    fitting.fit(BATCHES, trainer=trainer, steps=2, evaluate=evaluate, evaluate_ema=True)
    assert seen == [trainer.ema_model]
    assert not trainer.ema_model.training
    assert trainer.model.training


def test_evaluating_the_average_does_not_change_the_run():
    states = []
    for options in ({}, {"evaluate": make_batches(2), "evaluate_every": 2, "evaluate_ema": True}):
        trainer = fitting.make_trainer(ema=0.9, net=BatchNormNet)
        fitting.fit(BATCHES, trainer=trainer, steps=7, **options)
        states.append(trainer.state_dict())
    assert not differences(*states)


def test_what_fit_cannot_evaluate_is_refused_before_it_trains():
    trainer = fitting.make_trainer()
    with pytest.raises(ValueError, match=r"evaluate_ema=True\) evaluates averaged weights"):
        fitting.fit(BATCHES, trainer=trainer, steps=2, evaluate=BATCHES, evaluate_ema=True)
    with pytest.raises(ValueError, match="evaluate_ema=True needs evaluate=, got None"):
        fitting.fit(BATCHES, trainer=trainer, steps=2, evaluate_ema=True)
    with pytest.raises(TypeError, match=r"evaluate_ema must be True or False, got 1 \(int\)"):
        fitting.fit(BATCHES, trainer=trainer, steps=2, evaluate=BATCHES, evaluate_ema=1)
    assert trainer.num_steps == 0


@pytest.mark.parametrize("evaluate_ema", [False, True])
def test_an_evaluation_of_ones_own_leaves_the_training_model_in_its_mode(evaluate_ema):
    trainer = fitting.make_trainer(ema=0.9, net=BatchNormNet)

    def evaluate(model):
        trainer.model.eval()
        return {"loss": mean_loss(model.eval(), BATCHES[0]).item()}

    options = {"evaluate": evaluate, "evaluate_every": 2, "evaluate_ema": evaluate_ema}
    fitting.fit(BATCHES, trainer=trainer, steps=4, **options)
    assert all(module.training for module in trainer.model.modules())
    assert int(trainer.model.norm.num_batches_tracked) == 4


def test_weights_and_average_can_both_be_evaluated():
    trainer = fitting.make_trainer(ema=0.9, net=BatchNormNet)

    def evaluate(_):
        return {
            f"ema={flag}": trainer.evaluate(BATCHES, ema=flag)["loss"] for flag in (False, True)
        }

    result = fitting.fit(BATCHES, trainer=trainer, steps=4, evaluate=evaluate)
    assert result.evaluation["ema=False"] != result.evaluation["ema=True"]
    assert trainer.model.training


def test_evaluating_the_average_trains_no_statistics_of_a_model_that_the_loss_holds():
    torch.manual_seed(0)
    model = BatchNormNet()
    trainer = Trainer(model, SGD, lambda _, batch: mean_loss(model, batch), Plan(), ema=0.9)
    trainer.step(BATCHES[0])
    trainer.evaluate(BATCHES, ema=True)
    assert int(model.norm.num_batches_tracked) == 1
    assert model.training
