"""The control of a plan in bf16 that is not held: what bf16 alone does to the plain loop."""

from __future__ import annotations

import contextlib
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn

from benchmarks import sweep as runner
from benchmarks import sweep_model, sweep_tables
from benchmarks.outside_models import OutsideModel
from test_sweep import BF16, batch, build, loss_fn, loss_under_autocast

NHWC = '{"precision": "bf16", "channels_last": true}'
COMPILED = '{"precision": "bf16", "compile": {"backend": "aot_eager"}}'

# --- toys: functions of this module, so that another process can import them --------------------


def convolves():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, 1))


def images(generator):
    return torch.randn(2, 3, 6, 6, generator=generator)


def is_nhwc(tensor):
    return tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


def loss_of_layout(model, batch):
    """Differ where the images and the weights are laid out as NHWC; refuse what draws numbers."""
    assert model[2].p == 0
    factor = 1.2 if is_nhwc(batch) and is_nhwc(model[0].weight) else 1.0
    return loss_fn(model, batch) * factor


def loss_when_compiled(model, batch):
    """Differ under one lever of the plan, which no plain loop has."""
    return loss_fn(model, batch) * (1.2 if torch.compiler.is_compiling() else 1.0)


def loss_under_autocast_of(limit, model, batch):
    """Leave what numbers can hold, but only in bf16."""
    return loss_fn(model, batch) * (limit if torch.is_autocast_enabled("cpu") else 1.0)


GROWS = OutsideModel(build, batch, loss_under_autocast)


class NoTurns:
    def beside_others(self):
        return contextlib.nullcontext()

    alone = beside_others


def found(outside, plan):
    """Return what is found of parity, with its control, where one is run; nothing is timed."""
    with mock.patch.object(sweep_model, "speed", return_value=[]):
        *_, last = sweep_model.measure(outside, plan, "cpu", NoTurns())
    return last["parity"]


# --- what is measured ---------------------------------------------------------------------------


def test_a_plan_that_only_rounds_is_as_far_from_fp32_as_its_control():
    parity = found(GROWS, BF16)
    assert not parity["held"]
    assert parity["tolerance"] == {"loss": 0.05, "update": 0.5}
    assert parity["rounding"].keys() == {"loss_error", "update_error"}
    # From the same seeds, on the same batches, without dropout: so to the bit.
    for name, error in parity["rounding"].items():
        assert error == parity[name] > 0
    assert parity["loss_error"] == pytest.approx(0.2, rel=0.1)
    assert sweep_tables.does_as_bf16(parity)


def test_the_control_is_laid_out_as_the_plan_is():
    outside = OutsideModel(convolves, images, loss_of_layout)
    parity = found(outside, NHWC)
    assert not parity["held"]
    assert parity["loss_error"] == pytest.approx(0.2, rel=0.1)
    for name, error in parity["rounding"].items():
        assert error == pytest.approx(parity[name], rel=1e-3)
    # And not where the plan is not.
    assert sweep_model.rounding(outside, BF16, "cpu")["loss_error"] < 0.05


def test_what_another_lever_does_is_not_in_the_control():
    parity = found(OutsideModel(build, batch, loss_when_compiled), COMPILED)
    assert parity["loss_error"] == pytest.approx(0.2, rel=0.1)
    assert parity["rounding"]["loss_error"] < 0.05
    assert not sweep_tables.does_as_bf16(parity)


@pytest.mark.parametrize(
    ("outside", "plan"),
    [
        (OutsideModel(build, batch, loss_fn), BF16),  # held
        (OutsideModel(build, batch, loss_when_compiled), COMPILED.replace("bf16", "fp32")),
    ],
)
def test_without_need_there_is_no_control(outside, plan, monkeypatch):
    def refuse(*_):
        raise AssertionError("a control was run")

    monkeypatch.setattr(sweep_model, "rounding", refuse)
    parity = found(outside, plan)
    assert "rounding" not in parity
    assert parity["held"] is ("bf16" in plan)


def test_what_is_not_finite_in_bf16_is_told():
    outside = OutsideModel(build, batch, partial(loss_under_autocast_of, float("nan")))
    parity = found(outside, BF16)
    assert parity["reason"].startswith("ParityError: ")
    assert parity["rounding"] == {"reason": "not finite"}
    assert sweep_tables.apart(parity) == " (not finite; plain bf16 loop not finite)"
    assert not sweep_tables.does_as_bf16(parity)
    parity["rounding"] = {"loss_error": 0.1, "update_error": 0.1}
    assert sweep_tables.apart(parity) == " (not finite; plain bf16 loop finite)"
    assert not sweep_tables.does_as_bf16(parity)


def test_a_sweep_records_and_prints_it(capsys):
    record = runner.sweep({"toy": GROWS}, BF16)["toy"]
    assert record["status"] == "ran"
    assert record["parity"]["rounding"]["loss_error"] == record["parity"]["loss_error"]
    told = sweep_tables.apart(record["parity"])
    assert f"parity NOT held{told}  eager" in capsys.readouterr().out
    assert "parity held 0; not held, but within 1.25 times the plain bf16 loop: 1 of 1; median" in (
        runner.summary({"toy": record})
    )


# --- what is said of it -------------------------------------------------------------------------


def parity_of(loss, update, plain_loss, plain_update):
    return {
        "held": False,
        "tolerance": {"loss": 0.05, "update": 0.5},
        "loss_error": loss,
        "update_error": update,
        "rounding": {"loss_error": plain_loss, "update_error": plain_update},
    }


@pytest.mark.parametrize(
    ("errors", "told", "within"),
    [
        ((0.003, 0.72, 0.001, 0.7), "update 0.72; plain bf16 loop 0.70", True),
        ((0.003, 0.876, 0.001, 0.7), "update 0.88; plain bf16 loop 0.70", False),
        # What is within the tolerance needs no excuse, however far the control is from it.
        ((0.058, 0.4, 0.05, 0.1), "loss 0.058; plain bf16 loop 0.050", True),
        ((0.058, 0.72, 0.01, 0.7), "loss 0.058, update 0.72; ", False),
        ((0.058, 0.72, 0.06, 0.5), "plain bf16 loop 0.060, 0.50", False),
    ],
)
def test_both_errors_are_told_and_compared(errors, told, within):
    parity = parity_of(*errors)
    assert told in sweep_tables.apart(parity)
    assert sweep_tables.does_as_bf16(parity) is within


def test_a_control_that_is_not_finite_excuses_nothing():
    parity = {**parity_of(0.003, 0.72, 0, 0), "rounding": {"reason": "not finite"}}
    assert sweep_tables.apart(parity) == " (update 0.72; plain bf16 loop not finite)"
    assert not sweep_tables.does_as_bf16(parity)


def test_those_within_it_are_counted_among_all_that_are_not_held():
    near, far = parity_of(0, 0.72, 0, 0.7), parity_of(0, 0.72, 0, 0.1)
    held, older = {"held": True}, {"held": False}
    told = sweep_tables.rounded([near, far, held, older])
    assert told == "; not held, but within 1.25 times the plain bf16 loop: 1 of 3"
    assert sweep_tables.rounded([held, older]) == ""
