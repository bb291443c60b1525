"""The recipe of each float8 layer, chosen by measurement."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from float8_models import (
    EMULATED,
    MEASURED,
    applied,
    batches,
    bf16_loss,
    gpt,
    timer_of,
)
from torchfast import Float8Linears, Float8Options, PlanError
from torchfast.precision import Float8Watch
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


def test_what_a_layer_has_got_before_recipes_are_measured_is_seen():
    model = gpt()
    float8 = applied(model, MEASURED)
    model.blocks[0][0].lora = nn.Linear(32, 32)
    nn.utils.parametrizations.weight_norm(model.blocks[0][3])
    timer = timer_of({"bf16": 2.0, "tensorwise": 1.0, "rowwise": 3.0, "rowwise_with_gw_hp": 3.0})
    float8.decide(lambda: bf16_loss(model, batches(1)[0]), compiled=False, timer=timer)
    assert list(float8.recipes) == ["blocks.1.0", "blocks.1.3"]
    detail = float8.decision().detail
    assert "'blocks.0.0' (it has modules of its own (lora))" in detail
    assert "'blocks.0.3' (it is a ParametrizedLinear, not nn.Linear itself)" in detail
    float8.close()


def test_recipes_are_measured_again_when_it_is_entered_again():
    model = gpt()
    float8 = Float8Linears(model, MEASURED)
    for fastest in ("tensorwise", "rowwise"):
        seconds = {"bf16": 2.0, **dict.fromkeys(RECIPES, 3.0), fastest: 1.0}
        with float8:
            assert float8.is_undecided
            float8.decide(
                lambda: bf16_loss(model, batches(1)[0]), compiled=False, timer=timer_of(seconds)
            )
            assert set(float8.recipes.values()) == {fastest}
            assert type(model.blocks[0][0]) is not nn.Linear
        assert type(model.blocks[0][0]) is nn.Linear
        assert fastest in str(float8.receipt)  # what was measured can be read behind it


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
    remedy = "so its recipe was not measured: begin with a batch that reaches it, or name a recipe"
    told = float8.decision().detail
    assert f"'idle' (nothing called it in the first forward, {remedy}" in told
    assert f"'expert' (it got no rows in the first forward, {remedy}" in told


class Experts(nn.Module):
    """One linear layer that gets all rows, and three that get what is said."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(32, 32)
        self.experts = nn.ModuleList(nn.Linear(32, 16) for _ in range(3))
        self.rows = (0, 4, 48)

    def forward(self, x):
        x = self.dense(x)
        parts = [expert(x[:n]) for n, expert in zip(self.rows, self.experts, strict=True)]
        return torch.cat(parts).square().mean()


def test_what_gets_rows_later_is_told_in_the_report():
    model = Experts()
    options = Float8Options(emulate=True, smallest=16, watch_at=(1, 2, 3, 4))
    float8 = applied(model, options)

    def forward():
        return model(torch.ones(48, 32))

    def slow_if_few(works, device, budget_s):
        shape = 0.5 if next(faster) else 2.0
        seconds = {"tensorwise": shape, "rowwise": 2.0, "rowwise_with_gw_hp": 2.0}
        return timer_of({"bf16": 1.0, **seconds})(works, device, budget_s)

    faster = iter([True, False, True])  # the dense one, that of few rows, that of many
    float8.decide(forward, compiled=False, timer=slow_if_few)
    assert set(float8.recipes) == {"dense", "experts.2"}
    watch = Float8Watch(model, float8)
    watch.look(1, forward)
    assert "before update" not in float8.decision().detail
    model.rows = (1, 8, 48)
    watch.look(2, forward)
    model.rows = (32, 9, 48)
    watch.look(3, forward)
    told = float8.decision().detail
    first, second = told.split("; in bf16: ")[1].split("; 'experts.1'")
    assert first.startswith("'experts.0' (it got no rows in the first forward, so its recipe was")
    assert first.endswith("before update 2 it got 1 rows, of which nothing is known)")
    assert "not surely faster: tensorwise took 2.00 to 2.00 of the time of bf16 at 4 rows" in second
    assert "before update 3 it got 9 rows, of which nothing is known: begin with a batch" in second
    assert not any(layer.module._forward_pre_hooks for layer in float8._layers)


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


def test_a_choice_is_made_once_and_where_there_is_one_to_make():
    model, faster = gpt(), dict.fromkeys(("bf16", *RECIPES), 1.0) | {"rowwise": 0.5}

    def decide(float8):
        forward = partial(bf16_loss, model, batches(1)[0])
        float8.decide(forward, compiled=False, timer=timer_of(faster))

    float8 = Float8Linears(model, MEASURED)
    with pytest.raises(PlanError, match=r"nothing to decide: .* call apply\(\) before"):
        decide(float8)
    float8.apply()
    decision = float8.decision()
    assert decision.outcome == "left alone"
    assert "all in bf16 until decide() measures recipes" in decision.detail
    decide(float8)
    receipt, recipes = float8.receipt, dict(float8.recipes)
    with pytest.raises(PlanError, match=r"chosen already; close\(\) and apply\(\)"):
        decide(float8)
    assert float8.receipt is receipt
    assert float8.recipes == recipes != {}
    float8.close()
    float8.apply()
    decide(float8)
    assert float8.recipes == recipes
    float8.close()
    with (
        Float8Linears(model, EMULATED) as named,
        pytest.raises(PlanError, match="the options name recipe='tensorwise'"),
    ):
        decide(named)
