"""Parts of a forward that turn autocast off: they stay in fp32."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn, optim

from float8_models import EMULATED, MEASURED, WATCHED, step_timer_of, timer_of
from torchfast import CompileOptions, Float8Linears, Plan, Trainer


class Island(nn.Module):
    """Computes a layer in fp32 between two others."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.exact, self.last = (nn.Linear(32, 32) for _ in range(3))
        self.given = None

    def forward(self, x):
        x = self.first(x)
        with torch.autocast("cpu", enabled=False):
            x = x.float()
            y = self.exact(x)
            self.given = x.detach(), y.detach()
        return self.last(y)


def loss_fn(model, batch):
    return model(batch).float().square().mean()


def trained(precision, **options):
    model = Island()
    plan = Plan(precision=precision, **options)
    trainer = Trainer(model, partial(optim.SGD, lr=0.0), loss_fn, plan)
    trainer.step(torch.randn(16, 32, generator=torch.Generator().manual_seed(0)))
    return trainer, str(trainer.report())


@pytest.mark.parametrize("compiled", [False, CompileOptions(backend="aot_eager", regions="whole")])
def test_a_layer_in_fp32_stays_there_and_is_named(compiled):
    torch.compiler.reset()
    trainer, report = trained(WATCHED, compile=compiled)
    given, found = trainer.model.given
    expected = nn.functional.linear(given, trainer.model.exact.weight, trainer.model.exact.bias)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)
    assert "of these 'exact' (in fp32, since what calls it has turned autocast off)" in report
    assert trainer.model.first.weight.grad.abs().sum() > 0


def test_a_forward_beside_the_trainer_is_in_fp32_without_autocast_as_under_bf16():
    trainer, _ = trained(EMULATED)
    x = torch.randn(16, 32)
    with torch.no_grad():
        assert torch.equal(trainer.model(x), Island()(x))
    assert "'first'" not in str(trainer.report())  # it is in float8 where it trains
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not torch.equal(trainer.model(x), Island()(x))


def test_the_watch_judges_no_layer_in_fp32():
    trainer, report = trained(WATCHED)
    assert "no forward" not in report
    (drift,) = trainer._step._transforms._float8.watch.drifts
    assert {numbers.layer for numbers in drift.layers} == {"first", "last"}


def test_nothing_is_measured_for_it(monkeypatch):
    faster = {"bf16": 1.0, "tensorwise": 0.5, "rowwise": 2.0, "rowwise_with_gw_hp": 2.0}
    monkeypatch.setattr("torchfast.precision.float8_choice._on_device", timer_of(faster))
    monkeypatch.setattr("torchfast.precision.float8_step._on_device", step_timer_of([0.5] * 3))
    _, report = trained(MEASURED)
    assert "2 of 3 linear layers (2 tensorwise, emulated)" in report
    assert "'exact' (in fp32, since what calls it has turned autocast off)" in report


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loop_without_autocast_has_its_layers_in_float8(dtype):
    model = nn.Sequential(nn.Linear(32, 32)).to(dtype)
    x = torch.randn(16, 32, dtype=dtype)
    plain = model(x)
    with Float8Linears(model, EMULATED) as float8:
        assert not torch.equal(model(x), plain)
        assert "in fp32" not in float8.decision().detail
