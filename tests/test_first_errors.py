"""What those who come from a loop or a library of their own try first, and what they are told."""

from __future__ import annotations

import dataclasses
import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader

from models import make_batches, mean_loss
from torchfast import CUDAGraphStep, Plan, PlanError, Trainer
from torchfast._core.arguments import _OF_PLANS
from torchfast.graphs.graph_form import graph_form
from torchfast.testing import assert_parity


def make_model():
    return nn.Linear(8, 5)


def build(optimizer=optim.SGD, loss_fn=mean_loss, **options):
    model = make_model()
    return Trainer(model, lambda parameters: optimizer(parameters, lr=0.1), loss_fn, **options)


@pytest.mark.parametrize("loss_fn", [nn.CrossEntropyLoss(), F.cross_entropy, nn.MSELoss()])
def test_a_loss_of_torchs_is_no_loss_of_a_model_and_a_batch(loss_fn):
    with pytest.raises(TypeError, match=r"loss_fn\(model, batch\), and torch's .*oss.* takes outp"):
        build(loss_fn=loss_fn)


@pytest.mark.parametrize(
    ("name", "field"),
    [("scaler", "precision='fp16'"), ("amp", "precision='bf16'"), ("compile", "compile=True")],
)
def test_an_argument_that_is_for_the_plan_is_sent_there(name, field):
    with pytest.raises(TypeError, match=rf"that is for the plan: plan=Plan\({field}\)"):
        build(**{name: True})


def test_each_field_of_a_plan_is_sent_there():
    fields = {field.name for field in dataclasses.fields(Plan)} - {"optimizer"}
    assert fields <= _OF_PLANS.keys()
    for hint in _OF_PLANS.values():
        assert hint.partition("=")[0] in {*fields, "optimizer"}


def test_a_precision_is_no_plan_but_a_part_of_one():
    with pytest.raises(PlanError, match=r"that is a precision: plan=Plan\(precision='bf16'\)"):
        build(plan="bf16")


def test_several_optimizers_are_told_in_one_short_line():
    model = make_model()
    several = [optim.Adam(model.parameters()), optim.Adam(model.parameters())]
    with pytest.raises(TypeError, match="of several, each goes with a Trainer") as raised:
        Trainer(model, several, mean_loss)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 300
    with pytest.raises(TypeError) as raised:
        build(ema=optim.swa_utils.AveragedModel(nn.Sequential(*[make_model() for _ in range(9)])))
    assert "\n" not in str(raised.value)


class Around(optim.Optimizer):
    def __init__(self, inner):
        self.inner = inner
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, {}

    def step(self, closure=None):
        self.inner.step()


def test_an_optimizer_without_the_constructor_of_torchs_is_told_so():
    model = make_model()
    with pytest.raises(TypeError, match=r"Around has not called Optimizer.__init__\(\)"):
        Trainer(model, Around(optim.SGD(model.parameters())), mean_loss)


def test_an_optimizer_is_not_told_to_be_itself(monkeypatch):
    monkeypatch.setattr(sys.modules[graph_form.__module__], "_trial", lambda *_: "differ")
    for kind in (optim.SGD, optim.Adagrad):
        form, decision = graph_form(kind(make_model().parameters(), lr=0.1), "exact")
        assert form is None
        assert "AdamW with fused=True" in decision.detail
        assert ("and SGD" in decision.detail) == (kind is not optim.SGD)


def test_parity_takes_a_loader_and_leaves_the_generators_alone():
    batches = make_batches(6)
    loader = DataLoader(batches, batch_size=None, shuffle=True)
    before = torch.get_rng_state()
    result = assert_parity(
        make_model,
        partial(optim.SGD, lr=0.1),
        lambda model, batch: mean_loss(model, tuple(batch)),
        loader,
        accumulate=2,
    )
    assert result.exact
    assert result.num_steps == 3
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(ValueError, match="at least one batch"):
        assert_parity(make_model, partial(optim.SGD, lr=0.1), mean_loss, iter(()))


class OwnSample:
    def __init__(self, x):
        self.x = x


@pytest.mark.usefixtures("tape")
def test_the_warning_of_many_kinds_shows_the_value_that_differs(caplog):
    """A path or a name that the collator put in, or an object that is new each time."""
    step = CUDAGraphStep(lambda batch: batch["x"] * 2, device="cpu", max_graphs=2)
    for number in range(40):
        step({"n": 1, "x": torch.ones(2), "paths": ["all.jpg", f"{number:070d}.jpg"]})
    (warning,) = [r.getMessage() for r in caplog.records]
    assert warning.endswith(f"such as paths; the latest is '{'0' * 59}... (str)")
    caplog.clear()
    step = CUDAGraphStep(lambda batch: batch.x * 2, device="cpu", max_graphs=2)
    kept = [OwnSample(torch.ones(2)) for _ in range(40)]
    for sample in kept:
        step(sample)
    (warning,) = [r.getMessage() for r in caplog.records]
    assert warning.endswith("the latest is an object of OwnSample")
