"""The recipe of each float8 layer, chosen by measurement."""

from __future__ import annotations

import torch
from torch import nn

from float8_models import (
    MEASURED,
    applied,
    batches,
    bf16_loss,
    gpt,
    timer_of,
)
from torchfast import Float8Options
from torchfast.precision.float8_options import RECIPES


def decided(model, seconds, batch=None, options=MEASURED):
    float8 = applied(model, options)
    batch = batches(1)[0] if batch is None else batch
    float8.decide(lambda: bf16_loss(model, batch), compiled=False, timer=timer_of(seconds))
    return float8


def test_the_fastest_recipe_is_taken():
    model = gpt()
    generator = torch.get_rng_state()
    float8 = decided(
        model, {"bf16": 1.0, "tensorwise": 0.9, "rowwise": 0.8, "rowwise_with_gw_hp": 1.2}
    )
    assert set(float8.recipes.values()) == {"rowwise"}
    assert len(float8.recipes) == 4
    assert torch.equal(torch.get_rng_state(), generator)
    assert model.norm.num_batches_tracked == 0
    receipt = float8.receipt.to_dict()
    shapes = {choice["shape"]: choice["layers"] for choice in receipt["choices"]}
    assert shapes == {
        "64 rows, 32 to 64": ("blocks.0.0", "blocks.1.0"),
        "64 rows, 64 to 32": ("blocks.0.3", "blocks.1.3"),
    }
    assert receipt["choices"][0]["times_ms"]["tensorwise"] == 0.9
    assert "64 rows, 32 to 64, 2 layers: rowwise (bf16 1 ms" in str(float8.receipt)
    assert not float8.is_undecided


def test_what_is_not_faster_stays_in_bf16():
    model = gpt()
    float8 = decided(
        model, {"bf16": 1.0, "tensorwise": 0.996, "rowwise": 1.2, "rowwise_with_gw_hp": 1.3}
    )
    assert float8.recipes == {}
    assert float8.decision().outcome == "left alone"
    told = float8.decision().detail
    assert "not surely faster: tensorwise took 1.00 to 1.00 of the time of bf16" in told
    assert all(type(m) is nn.Linear for m in model.modules() if isinstance(m, nn.Linear))


def test_rows_that_are_not_divisible_are_measured_as_they_are():
    odd = tuple(t[:, :5] for t in batches(1)[0])
    seconds = {"bf16": 1.0, "tensorwise": 0.5, "rowwise": 0.6, "rowwise_with_gw_hp": 0.7}
    float8 = decided(gpt(), seconds, odd)
    assert len(float8.recipes) == 4
    assert "20 rows, 32 to 64, 2 layers: tensorwise" in str(float8.receipt)


def test_layers_that_nobody_calls_and_those_that_get_no_rows_stay_in_bf16():
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle, self.expert = (nn.Linear(32, 32) for _ in range(3))

        def forward(self, x):
            # By name, and of several calls the one with the most rows counts.
            out = self.used(self.used(input=x)[:16])
            return torch.cat([out, self.expert(x[:0])]).sum()

    model = Idle()
    seconds = {"bf16": 1.0, "tensorwise": 0.5, "rowwise": 0.6, "rowwise_with_gw_hp": 0.7}
    float8 = applied(model, MEASURED)
    float8.decide(lambda: model(torch.ones(48, 32)), compiled=False, timer=timer_of(seconds))
    assert float8.recipes == {"used": "tensorwise"}
    assert "48 rows, 32 to 32, 1 layer" in str(float8.receipt)
    assert "'idle' (nothing called it in the first forward)" in float8.decision().detail
    assert "'expert' (it got no rows in the first forward)" in float8.decision().detail


def test_the_real_measurement_runs():
    model = gpt()
    options = Float8Options(emulate=True, budget_s=1.0, watch_at=(), only=("blocks.0.0",))
    float8 = applied(model, options)
    float8.decide(lambda: bf16_loss(model, batches(1)[0]), compiled=False)
    (choice,) = float8.receipt.choices
    assert choice.shape == "64 rows, 32 to 64"
    assert not choice.refused
    assert {"bf16", *RECIPES} == {*choice.times_ms}
    assert float8.recipes == {} or choice.ratios[choice.recipe][2] < 1
