"""Layers that alone are not faster in float8, and may be in their step."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial

import pytest
from torch import nn, optim

from float8_models import EMULATED, MEASURED, batches, gpt, loss_fn, timer_of
from torchfast import Plan, Trainer
from torchfast._core.measure import Measurement
from torchfast.precision.float8 import Float8Linears

RECIPES = {"tensorwise": 1.2, "rowwise": 2.0, "rowwise_with_gw_hp": 2.0}
TOLD = "layers that alone are slower in float8 are not so here"


def trained(monkeypatch, seconds, steps=4):
    """Train where one of two shapes is faster in float8; return the trainer and what was timed."""
    faster, timed = iter([True, False]), []

    def of_shape(works, device, budget_s):
        found = {"bf16": 1.0, **RECIPES} | ({"tensorwise": 0.5} if next(faster) else {})
        return timer_of(found)(works, device, budget_s)

    def of_step(works, device, budget_s, around):
        for name, work in works.items():
            with around(name):
                work()
                timed.append((name, num_in_float8(trainer.model)))
        return Measurement(
            reference="bf16",
            rounds=tuple({name: seconds[name] for name in works} for _ in range(12)),
            units=dict.fromkeys(works, 1),
            failed={},
            smallest=0.02,
            elapsed_s=0.0,
            ended_by="told",
        )

    monkeypatch.setattr("torchfast.precision.float8_choice._on_device", of_shape)
    monkeypatch.setattr("torchfast.precision.float8_step._on_device", of_step)
    trainer = Trainer(gpt(), partial(optim.SGD, lr=0.1), loss_fn, Plan(precision=MEASURED))
    losses = [float(trainer.step(batch)) for batch in batches(1) * steps]
    return trainer, losses, timed


def num_in_float8(model):
    linear = [m for m in model.modules() if isinstance(m, nn.Linear)]
    return sum(type(m) is not nn.Linear for m in linear)


@pytest.mark.parametrize(
    ("float8_ms", "all_ms", "num_left"),
    [(0.9, 0.8, 4), (0.8, 0.9, 2), (1.1, 0.9, 4), (1.1, 1.05, 0), (0.9, 1.1, 2)],
)
def test_what_is_fastest_in_the_step_stays(monkeypatch, float8_ms, all_ms, num_left):
    seconds = {"bf16": 1.0, "float8": float8_ms, "all in float8": all_ms}
    trainer, _, timed = trained(monkeypatch, seconds)
    assert timed == [("bf16", 0), ("float8", 2), ("all in float8", 4)]
    assert num_in_float8(trainer.model) == num_left
    report = str(trainer.report())
    assert (f"{num_left} of 6 linear layers" in report) == bool(num_left)
    assert (TOLD in report) == (num_left == 4)
    assert len(trainer.state_dict()["float8"]["recipes"]) == num_left
    trainer.close()
    assert num_in_float8(trainer.model) == 0


def test_it_trains_as_with_that_recipe_named(monkeypatch):
    seconds = {"bf16": 1.0, "float8": 0.9, "all in float8": 0.8}
    _, losses, _ = trained(monkeypatch, seconds)
    named = Trainer(gpt(), partial(optim.SGD, lr=0.1), loss_fn, Plan(precision=EMULATED))
    assert "4 of 6 linear layers (4 tensorwise" in str(named.report())
    assert losses == [float(named.step(batch)) for batch in batches(1) * 4]
    # The control: two layers fewer are other numbers.
    seconds = {"bf16": 1.0, "float8": 0.8, "all in float8": 0.9}
    assert losses != trained(monkeypatch, seconds)[1]


def test_what_does_not_run_in_the_step_is_not_timed(monkeypatch):
    @contextmanager
    def widened(self):
        raise RuntimeError("no such kernel")
        yield

    monkeypatch.setattr(Float8Linears, "widened", widened)
    trainer, _, timed = trained(monkeypatch, {"bf16": 1.0, "float8": 0.9})
    assert timed == [("bf16", 0), ("float8", 2)]
    assert num_in_float8(trainer.model) == 2
