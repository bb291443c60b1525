"""float8 beside bf16: drift, and what falls out of the format."""

from __future__ import annotations

import copy
import logging

import pytest
import torch

from float8_models import (
    WATCHED,
    applied,
    batches,
    bf16_loss,
    gpt,
)
from torchfast import Float8Options
from torchfast._core.compare import differences
from torchfast.precision import Float8Watch
from torchfast.precision.float8_watch import figures


def watched(model, options, batch=None):
    float8 = applied(model, options)
    watch = Float8Watch(model, float8)
    watch.look(1, lambda: bf16_loss(model, batches(1)[0] if batch is None else batch))
    watch.look(2, lambda: pytest.fail("not one of those to compare at"))
    return watch


def test_the_watch_leaves_no_trace_and_reports_scales(caplog):
    model = gpt()
    before, generator = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    watch = watched(model, WATCHED)
    decisions = {d.lever: d.detail for d in watch.decisions()}
    assert torch.equal(torch.get_rng_state(), generator)
    assert differences(before, model.state_dict()) == []
    assert all(p.grad is None for p in model.parameters())
    (drift,) = watch.drifts
    assert 0 < abs(drift.loss_drift) < 0.01
    assert 0 < abs(drift.norm_drift) < 0.1
    assert {(n.layer, n.operand) for n in drift.layers} == {
        (name, operand)
        for name in ("blocks.0.0", "blocks.0.3", "blocks.1.0", "blocks.1.3")
        for operand in ("input", "weight", "gradient")
    }
    weight = next(n for n in drift.layers if (n.layer, n.operand) == ("blocks.0.0", "weight"))
    assert weight.amax == pytest.approx(float(model.blocks[0][0].weight.abs().max().detach()))
    assert weight.scale == pytest.approx(448 / weight.amax)
    assert "blocks.1.3 gradient" in decisions["float8 scales"]
    assert not caplog.records


def test_a_layer_that_loses_its_values_is_named(caplog):
    model = gpt()
    with torch.no_grad():
        model.blocks[1][0].weight[0, 0] = 1e6
    watch = watched(model, WATCHED)
    with caplog.at_level(logging.WARNING, "torchfast"):
        (_, scales) = watch.decisions()
    assert "layer 'blocks.1.0' does not fit float8" in caplog.text
    assert "of its weight become zero beside a largest value of 1e+06" in scales.detail


def test_values_that_are_not_finite_are_named(caplog):
    model = gpt()
    with torch.no_grad():
        model.blocks[0][3].weight[0, 0] = torch.inf
    with caplog.at_level(logging.WARNING, "torchfast"):
        watched(model, WATCHED).decisions()
    assert "before update 1 layer 'blocks.0.3' does not fit float8: its weight has values" in (
        caplog.text
    )


def test_drift_beyond_the_limit_warns_once(caplog):
    strict = Float8Options(
        recipe="tensorwise", smallest=16, emulate=True, watch_at=(1, 2), loss_drift=1e-9
    )
    model = gpt()
    watch = Float8Watch(model, applied(model, strict))
    with caplog.at_level(logging.WARNING, "torchfast"):
        for step in (1, 1, 2):
            watch.look(step, lambda: bf16_loss(model, batches(1)[0]))
        watch.decisions()
    assert caplog.text.count("before update 1 the loss in float8 is") == 1
    assert "update 2" not in caplog.text
    assert [d.step for d in watch.drifts] == [1, 2]


def test_too_little_memory_ends_the_watch():
    model = gpt()

    def fails():
        raise torch.OutOfMemoryError("out of memory")

    watch = Float8Watch(model, applied(model, WATCHED))
    watch.look(1, fails)
    (decision,) = watch.decisions()
    assert decision.detail == "float8 is not compared with bf16: OutOfMemoryError: out of memory"


def test_too_little_memory_for_the_norm_ends_it_too(monkeypatch):
    def fails(gradients):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr("torchfast.precision.float8_ranks.get_total_norm", fails)
    model = gpt()
    watch = Float8Watch(model, applied(model, WATCHED))
    watch.look(1, lambda: bf16_loss(model, batches(1)[0]))
    (decision,) = watch.decisions()
    assert decision.detail == "float8 is not compared with bf16: OutOfMemoryError: out of memory"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("by_row", [False, True])
def test_what_is_lost_is_what_the_format_makes_zero(dtype, by_row):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(64, 64, generator=generator) * 10 ** (
        -12 * torch.rand(64, 64, generator=generator)
    )
    values[0, 0] = 0.0
    amax = values.abs().amax(-1, keepdim=True) if by_row else values.abs().amax()
    scaled = (values * (torch.finfo(dtype).max / amax)).to(dtype).float()
    expected = ((scaled == 0) & (values != 0)).float().mean()
    largest, lost = figures(values, dtype, by_row=by_row)
    assert largest == values.abs().max()
    assert float(lost) == pytest.approx(float(expected), abs=2 / values.numel())
    assert 0.1 < lost < 0.9
