"""Measured recipes in the whole step: what is not faster there goes back to bf16."""

from __future__ import annotations

import copy
import dataclasses
from functools import partial

import pytest
import torch
from torch import nn, optim

import ranks
from float8_models import (
    MEASURED,
    WATCHED,
    batches,
    gpt,
    gpt_without_batch_norm,
    loss_fn,
    step_timer_of,
    timer_of,
)
from torchfast import CompileOptions, Float8Options, Plan, Trainer
from torchfast._core.compare import differences
from torchfast._core.errors import UnsupportedDeviceError
from torchfast.precision import float8_choice
from torchfast.precision.float8_conversion import Float8Conversion

SHAPES = {"bf16": 1.0, "tensorwise": 0.5, "rowwise": 0.6, "rowwise_with_gw_hp": 0.7}


class Seen(list):
    """What a timer has seen of a model."""

    def __init__(self, model):
        super().__init__()
        self.model = model


def trained(monkeypatch, plan, float8_ms, *, steps=3, seen=None, model=None):
    monkeypatch.setattr("torchfast.precision.float8_choice._on_device", timer_of(SHAPES))
    monkeypatch.setattr(
        "torchfast.precision.float8_step._on_device", step_timer_of(float8_ms, seen)
    )
    model = gpt() if model is None else model
    torch.manual_seed(3)
    trainer = Trainer(model, partial(optim.AdamW, lr=3e-3), loss_fn, plan, max_grad_norm=1.0)
    losses = [float(trainer.step(batch)) for batch in batches(steps)]
    return trainer, losses


@pytest.mark.parametrize(
    ("float8_ms", "kept"),
    [
        ([0.9, 0.91, 0.89], True),
        ([1.0, 1.01, 0.99], True),
        ([0.98, 1.015, 1.05], True),  # cannot be told, and not by more than 2 %
        ([1.03, 1.031, 1.029], False),
        ([1.01, 1.0101, 1.0102], False),  # surely slower
        ([0.9, 1.03, 1.2], False),
    ],
)
def test_a_step_that_is_slower_in_float8_stays_in_bf16(monkeypatch, float8_ms, kept):
    trainer, _ = trained(monkeypatch, Plan(precision=MEASURED), float8_ms)
    report = str(trainer.report())
    assert "float8 recipes measured on cpu" in report
    assert "forward and backward of the whole step took" in report
    assert ("4 of 6 linear layers (4 tensorwise, emulated)" in report) == kept
    assert ("more than 1.02 is not taken: all is in bf16" in report) != kept
    assert (type(trainer.model.blocks[0][0]) is nn.Linear) != kept
    if not kept:
        why = "'blocks.1.3' (forward and backward of the whole step took"
        assert why in report


def test_the_whole_step_is_timed_for_the_budget_of_the_options(monkeypatch):
    budgets, plan = [], Plan(precision=dataclasses.replace(MEASURED, budget_s=1000.0))
    monkeypatch.setattr("torchfast.precision.float8_choice._on_device", timer_of(SHAPES))
    clock = step_timer_of([0.5] * 3)

    def timer(works, device, budget_s, around):
        budgets.append(budget_s)
        return clock(works, device, budget_s, around)

    monkeypatch.setattr("torchfast.precision.float8_step._on_device", timer)
    Trainer(gpt(), partial(optim.SGD, lr=0.1), loss_fn, plan).step(batches(1)[0])
    assert budgets == [1000.0]


@pytest.mark.parametrize("kept", [True, False])
def test_a_resumed_run_takes_the_recipes_of_the_saved_one(monkeypatch, tmp_path, kept):
    plan = Plan(precision=MEASURED)
    trainer, _ = trained(monkeypatch, plan, [0.5 if kept else 1.5] * 3)
    torch.save(trainer.state_dict(), tmp_path / "state.pt")
    expected = [float(trainer.step(batch)) for batch in batches(3, seed=1)]
    recipes = dict(trainer._step._transforms._float8.linears.recipes)
    assert len(recipes) == 4 * kept

    def refused(*_, **__):
        raise AssertionError("nothing is to be measured")

    monkeypatch.setattr("torchfast.precision.float8_choice._on_device", refused)
    monkeypatch.setattr("torchfast.precision.float8_step._on_device", refused)
    resumed = Trainer(gpt(), partial(optim.AdamW, lr=3e-3), loss_fn, plan, max_grad_norm=1.0)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert [float(resumed.step(batch)) for batch in batches(3, seed=1)] == expected
    assert resumed._step._transforms._float8.linears.recipes == recipes
    assert "in the run whose state was loaded" in str(resumed.report())
    assert differences(resumed.state_dict()["model"], trainer.state_dict()["model"]) == []
    assert resumed.state_dict()["float8"] == {"recipes": recipes}


def test_recipes_of_a_state_are_left_where_they_do_not_fit(monkeypatch):
    trainer, _ = trained(monkeypatch, Plan(precision=MEASURED), [0.5] * 3)
    state = copy.deepcopy(trainer.state_dict())

    def loaded(plan, state, steps):
        other, _ = trained(monkeypatch, plan, [0.5] * 3, steps=steps)
        other.load_state_dict(state)
        other.step(batches(1)[0])
        return other, str(other.report())

    for steps, recipes in ((1, {}), (0, {"blocks.0.0": "of a later release"})):
        other, report = loaded(
            Plan(precision=MEASURED), {**state, "float8": {"recipes": recipes}}, steps
        )
        assert "in the run whose state was loaded" not in report  # decided, or measured anew
        assert len(other.state_dict()["float8"]["recipes"]) == 4
    _, report = loaded(Plan(precision="bf16"), state, 0)
    assert "float8" not in report
    named = Float8Options(recipe="rowwise", smallest=16, emulate=True, watch_at=())
    other, report = loaded(Plan(precision=named), state, 0)
    assert "(4 rowwise, emulated)" in report
    assert "float8" not in other.state_dict()


def test_a_refused_recipe_of_a_state_is_measured_anew(monkeypatch):
    trainer, _ = trained(monkeypatch, Plan(precision=MEASURED), [0.5] * 3)
    other, _ = trained(monkeypatch, Plan(precision=MEASURED), [0.5] * 3, steps=0)

    def refused(self, recipe):
        raise UnsupportedDeviceError("another device")

    monkeypatch.setattr(Float8Conversion, "probe", refused)
    other.load_state_dict(copy.deepcopy(trainer.state_dict()))
    other.step(batches(1)[0])
    assert "float8 recipes measured on cpu" in str(other.report())


def test_what_was_taken_back_trains_as_bf16_to_the_bit(monkeypatch):
    taken_back, losses = trained(monkeypatch, Plan(precision=MEASURED), [1.5, 1.5, 1.5])
    plain, expected = trained(monkeypatch, Plan(precision="bf16"), [])
    assert losses == expected
    for part in ("model", "optimizer"):
        assert differences(taken_back.state_dict()[part], plain.state_dict()[part]) == []
    kept, others = trained(monkeypatch, Plan(precision=MEASURED), [0.5, 0.5, 0.5])
    assert others != expected
    assert differences(kept.state_dict()["model"], plain.state_dict()["model"]) != []


def test_the_check_leaves_no_trace_and_runs_each_way(monkeypatch):
    model = gpt()
    seen = Seen(model)
    before = copy.deepcopy(model.state_dict())
    states = []
    monkeypatch.setattr("torchfast.precision.float8_choice._on_device", timer_of(SHAPES))
    monkeypatch.setattr(
        "torchfast.precision.float8_step._on_device", step_timer_of([0.5] * 3, seen)
    )
    trainer = Trainer(model, partial(optim.SGD, lr=0.0), loss_fn, Plan(precision=MEASURED))
    transforms = trainer._step._transforms
    check = type(transforms).check_step

    def checked(self, work):
        generator = torch.get_rng_state()
        check(self, work)
        states.append(torch.equal(generator, torch.get_rng_state()))
        states.append(differences(before, model.state_dict()) == [])
        states.append(all(p.grad is None for p in model.parameters()))

    monkeypatch.setattr(type(transforms), "check_step", checked)
    for batch in batches(2):
        trainer.step(batch)
        monkeypatch.setattr(type(transforms), "check_step", check)
    assert states == [True] * 3
    assert seen == [("bf16", "Linear"), ("float8", "Float8Linear")]  # at the first step only


def test_named_recipes_are_not_checked(monkeypatch):
    options = Float8Options(recipe="tensorwise", smallest=16, emulate=True, watch_at=())
    trainer, _ = trained(monkeypatch, Plan(precision=options), [9.0, 9.0, 9.0])
    assert "whole step" not in str(trainer.report())
    assert len(trainer._step._transforms._float8.linears.recipes) == 4


@pytest.mark.parametrize("budget_s", [1.0, 1e-3])
def test_the_real_clock_tells_with_an_interval_whatever_the_budget(monkeypatch, budget_s):
    monkeypatch.setattr("torchfast.precision.float8_choice._on_device", timer_of(SHAPES))
    options = Float8Options(emulate=True, watch_at=(), budget_s=budget_s)
    trainer = Trainer(gpt(), partial(optim.SGD, lr=0.1), loss_fn, Plan(precision=options))
    trainer.step(batches(1)[0])
    # Emulated and eager it takes several times as long.
    report = str(trainer.report())
    assert "more than 1.02 is not taken: all is in bf16" in report
    assert "to inf)" not in report
    assert all(type(trainer.model.blocks[i][0]) is nn.Linear for i in (0, 1))


def time_shapes_eagerly(monkeypatch):
    """Let the shapes of a compiled step be timed as they are: inductor takes a minute for them."""
    eager = partial(float8_choice._work, compiled=False)
    monkeypatch.setattr(float8_choice, "_work", lambda layer, shape, on, _: eager(layer, shape, on))


@pytest.mark.parametrize("float8_ms", [0.5, 1.5], ids=["kept", "taken back"])
def test_a_compiled_step_goes_on_in_what_was_found(monkeypatch, float8_ms):
    if float8_ms > 1:  # once by inductor
        time_shapes_eagerly(monkeypatch)
    monkeypatch.setattr("torchfast.precision.float8_choice._on_device", timer_of(SHAPES))
    timer = step_timer_of([float8_ms] * 3)
    monkeypatch.setattr("torchfast.precision.float8_step._on_device", timer)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32))
    trainer = Trainer(
        model,
        partial(optim.SGD, lr=0.1),
        lambda m, x: (m(x) - x).float().square().mean(),
        Plan(precision=MEASURED, compile=CompileOptions(backend="eager")),
    )
    generator = torch.Generator().manual_seed(0)
    batch = torch.randn(32, 32, generator=generator)
    losses = [float(trainer.step(batch)) for _ in range(4)]
    assert losses[-1] < losses[0]
    assert (type(model[0]) is nn.Linear) == (float8_ms > 1)
    plain = copy.deepcopy(model[0])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = (plain(batch) - batch).float().square().mean()
    found = float(trainer.step(batch))
    # In bf16 the loss is that of the plain layer; in float8 it is another.
    assert (abs(found - float(expected.detach())) < 1e-5) == (float8_ms > 1)


def test_several_ranks_do_not_check():
    def rank(number):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("torchfast.precision.float8_choice._on_device", timer_of(SHAPES))
            trainer = Trainer(
                gpt_without_batch_norm(),
                partial(optim.AdamW, lr=1e-3),
                loss_fn,
                Plan(precision=MEASURED, shard="ddp"),
            )
            trainer.step(batches(1)[0])
            return str(trainer.report())

    for report in ranks.run(rank):
        assert "(4 tensorwise, emulated)" in report
        assert "the whole step is not timed where several ranks train" in report


def test_where_a_graph_will_hold_the_step_launches_are_not_timed(monkeypatch):
    def refused(*_, **__):
        raise AssertionError("launches would count")

    seen = []
    timer = step_timer_of([0.5] * 3)
    monkeypatch.setattr("torchfast.precision.float8_choice._on_device", refused)
    monkeypatch.setattr("torchfast.precision.float8_step._on_device", refused)
    monkeypatch.setattr("torchfast.transform_float8.of_graphs", timer_of(SHAPES, seen))
    monkeypatch.setattr(
        "torchfast.precision.float8_step._of_graphs",
        lambda works, *rest: seen.append(sorted(works)) or timer(works, *rest),
    )
    trainer = Trainer(gpt(), partial(optim.SGD, lr=0.1), loss_fn, Plan(precision=MEASURED))
    trainer._step._transforms._float8._in_graph = True  # as on a GPU
    trainer.step(batches(1)[0])
    assert seen == [sorted(SHAPES)] * 2 + [["bf16", "float8"]]


@pytest.mark.parametrize("precision", [WATCHED, MEASURED], ids=["watched", "measured"])
def test_a_look_at_the_model_as_it_is_is_no_step_that_was_not_compiled(precision, monkeypatch):
    """It was told of each region that the compiler had been switched off: by torchfast itself."""
    torch.compiler.reset()
    monkeypatch.setattr("torchfast.precision.float8_choice._on_device", timer_of(SHAPES))
    monkeypatch.setattr("torchfast.precision.float8_step._on_device", step_timer_of([0.5] * 3))
    time_shapes_eagerly(monkeypatch)
    options = CompileOptions(backend="eager", regions=("blocks.*",))
    plan = Plan(precision=precision, compile=options)
    with Trainer(gpt(), partial(optim.SGD, lr=0.1), loss_fn, plan) as trainer:
        for batch in batches(1) * 2:
            trainer.step(batch)
        report = trainer.report()
    assert report.counters["compile_compiled"] >= 2
    told = [str(d.detail) for d in report.decisions if d.lever == "compile"]
    assert not [detail for detail in told if "force_eager" in detail or "DispatchMode" in detail]
