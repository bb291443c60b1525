"""float8 beside bf16: drift, and what falls out of the format."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn
from torchao.float8 import Float8LinearConfig

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
from torchfast.precision.float8_drift import Drift, DriftHistory, LayerNumbers, figures
from torchfast.precision.float8_ranks import Alone


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
    assert not [r for r in caplog.records if r.name.startswith("torchfast")]


def test_a_layer_that_is_called_by_keyword_is_watched():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(32, 32)

        def forward(self, x):
            return self.layer(input=x)

    model = Named()
    float8 = applied(model, WATCHED)
    watch = Float8Watch(model, float8)
    watch.look(1, lambda: model(torch.full((16, 32), 3.0)).square().mean())
    watch.decisions()
    (drift,) = watch.drifts
    assert [(n.operand, n.amax) for n in drift.layers if n.operand == "input"] == [("input", 3.0)]
    assert {n.operand for n in drift.layers} == {"input", "weight", "gradient"}


def test_a_layer_that_loses_its_values_is_named(caplog):
    model = gpt()
    with torch.no_grad():
        model.blocks[1][0].weight[0, 0] = 1e6
    watch = watched(model, WATCHED)
    with caplog.at_level(logging.WARNING, "torchfast"):
        (_, scales) = watch.decisions()
    assert "layer 'blocks.1.0' does not fit float8" in caplog.text
    assert (
        "of the values of its weight that are not zero become it beside a largest value of 1e+06"
        in scales.detail
    )


def test_a_layer_whose_input_is_mostly_zeros_is_named(caplog):
    class Behind(nn.Module):
        def forward(self, x):
            x = x.relu() * 1e-4
            x[0, 0] = 1e7
            return x

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), Behind(), nn.Linear(64, 32))
    with torch.no_grad():
        model[0].bias.fill_(-0.3)
    watch = Float8Watch(model, applied(model, WATCHED))
    inputs = torch.randn(16, 32)
    with caplog.at_level(logging.WARNING, "torchfast"):
        watch.look(1, lambda: model(inputs).float().square().mean())
        watch.decisions()
    (numbers,) = [n for n in watch.drifts[0].layers if (n.layer, n.operand) == ("2", "input")]
    behind = model[1](model[0](inputs))
    assert (behind == 0).float().mean() > 0.6
    assert numbers.lost == pytest.approx(1 - 1 / float((behind != 0).sum()))
    assert "layer '2' does not fit float8: " in caplog.text
    assert "of the values of its input that are not zero become it" in caplog.text


def test_layers_that_nothing_calls_are_said_to_compute_nothing():
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle, self.rare = (nn.Linear(32, 32) for _ in range(3))
            self.is_rare = False

        def forward(self, x):
            return self.rare(self.used(x)) if self.is_rare else self.used(x)

    model = Idle()
    options = Float8Options(recipe="tensorwise", smallest=16, emulate=True, watch_at=(1, 2))
    watch = Float8Watch(model, applied(model, options))
    told = []
    for step in (1, 2):
        model.is_rare = step == 2
        watch.look(step, lambda: model(torch.ones(16, 32)).float().square().mean())
        told.append(watch.decisions()[0].detail)
    assert "; no forward of these called 'idle', 'rare', which so computed nothing" in told[0]
    assert "; no forward of these called 'idle', which so computed nothing" in told[1]
    model = gpt()
    assert "no forward" not in watched(model, WATCHED).decisions()[0].detail


def test_an_operand_of_zeros_loses_nothing():
    _, num_lost, num_present = figures(torch.zeros(16, 32), torch.float8_e4m3fn, by_row=True)
    assert num_lost == num_present == 0
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    with torch.no_grad():
        model[1].weight.zero_()
    watch = Float8Watch(model, applied(model, WATCHED))
    watch.look(1, lambda: model(torch.ones(16, 32)).float().square().mean())
    watch.decisions()
    assert all(n.lost == 0 for n in watch.drifts[0].layers)


def test_values_that_are_not_finite_are_named(caplog):
    model = gpt()
    with torch.no_grad():
        model.blocks[0][3].weight[0, 0] = torch.inf
    with caplog.at_level(logging.WARNING, "torchfast"):
        watched(model, WATCHED).decisions()
    assert "before update 1 layer 'blocks.0.3' does not fit float8: its weight has values" in (
        caplog.text
    )
    # In bf16 the loss is no number either, so it is not float8 that is far away.
    assert "from that in bf16" not in caplog.text


def test_a_bad_batch_leaves_the_warning_to_what_is_far_away(caplog):
    model = gpt()
    options = Float8Options(recipe="tensorwise", smallest=16, emulate=True, loss_drift=1e-9)
    watch = Float8Watch(model, applied(model, options))

    def forward(factor):
        return bf16_loss(model, batches(1)[0]) * factor

    with caplog.at_level(logging.WARNING, "torchfast"):
        watch.look(1, lambda: forward(torch.nan))
        watch.decisions()
        assert "the loss in float8 is" not in caplog.text
        watch.look(10, lambda: forward(1.0))
        watch.decisions()
    assert "before update 10 the loss in float8 is" in caplog.text


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


def test_a_loss_near_zero_is_no_reason_to_warn_where_the_gradients_are_close(caplog):
    torch.manual_seed(1)
    critic = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Linear(64, 1))
    real, made = torch.randn(64, 64), torch.randn(64, 64) + 0.5
    with torch.no_grad():  # what both have in common is all of it but for a hair
        less = (critic(made).mean() - critic(real).mean()).float()

    def forward(times=1.0):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = critic(made).float().mean() - critic(real).float().mean()
        return times * (out - less + 1e-5)

    watch = Float8Watch(critic, applied(critic, WATCHED))
    with caplog.at_level(logging.WARNING, "torchfast"):
        watch.look(1, forward)
        watch.decisions()
    (drift,) = watch.drifts
    assert abs(drift.loss_drift) > 0.02 > abs(drift.norm_drift)
    assert not [r for r in caplog.records if r.name.startswith("torchfast")]
    # Where these are far as well, it is told.
    calls = iter((1.05, 1.0))
    watch = Float8Watch(critic, watch._float8)
    with caplog.at_level(logging.WARNING, "torchfast"):
        watch.look(1, lambda: forward(next(calls)))
        watch.decisions()
    assert "before update 1 the loss in float8 is" in caplog.text


def test_a_layer_that_stops_fitting_late_in_a_run_is_named(caplog):
    options = Float8Options(
        recipe="tensorwise", smallest=16, emulate=True, watch_at=(1, 3), watch_every=50
    )
    model = gpt()
    watch = Float8Watch(model, applied(model, options))
    looked = []

    def forward():
        looked.append(step)
        return bf16_loss(model, batches(1)[0])

    with caplog.at_level(logging.WARNING, "torchfast"):
        for step in range(1, 160):
            if step == 60:
                with torch.no_grad():
                    model.blocks[0][0].weight[0, 0] = 1e6
            if step == 120:
                with torch.no_grad():
                    model.blocks[1][3].weight[0, 0] = torch.inf  # not finite: the worst
            watch.look(step, forward)
        watch.decisions()
    assert sorted(set(looked)) == [1, 3, 50, 100, 150]
    said = [r.getMessage() for r in caplog.records if "does not fit" in r.getMessage()]
    assert ["before update 100 layer 'blocks.0.0'" in said[0], len(said)] == [True, 2]
    assert "before update 150 layer 'blocks.1.3'" in said[1]


@pytest.mark.parametrize(
    ("watch_at", "every", "due"),
    [
        ((), 5, []),
        ((2,), None, [2]),
        ((2, 12), 5, [2, 12, 15, 20]),
        ((1,), 1, list(range(1, 21))),
    ],
)
def test_which_updates_are_compared(watch_at, every, due):
    options = Float8Options(watch_at=watch_at, watch_every=every)
    assert [step for step in range(1, 21) if options.watches(step)] == due


def test_what_a_long_run_keeps_does_not_grow():
    history, numbers = DriftHistory(), []
    for step in range(1, 2001):
        loss = 1.5 if step == 700 else 1.001
        layers = tuple(
            LayerNumbers(layer=name, operand="input", amax=1.0, scale=448.0, lost=lost)
            for name, lost in (("fits", 0.1), ("does not", 0.9 if step == 1990 else 0.1))
        )
        history.add(
            Drift(step=step, loss=loss, plain_loss=1.0, norm=1.0, plain_norm=1.0, layers=layers)
        )
        numbers.append(len(history.kept))
    assert max(numbers) == 32
    assert [d.step for d in history.kept[:4]] == [1, 2, 3, 1972]
    # Of those between the first and the last only the operands that do not fit are kept.
    assert [len(d.layers) for d in history.kept] == [2] * 3 + [0] * 18 + [1] + [0] * 9 + [2]
    told = str(history)
    assert "; 1994 more, the loss furthest at update 700: loss 1.5 (+50.00%)" in told
    assert told.startswith("update 1: loss")
    assert "; update 2000: loss" in told


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


@pytest.mark.parametrize(
    ("recipe", "largest", "lost"),
    [
        ("tensorwise", 57344, 0.0),  # of e5m2, whose range a scale for a whole tensor needs
        ("rowwise", 448, 31 / 32),
        ("rowwise_with_gw_hp", 448, 31 / 32),
    ],
)
def test_gradients_are_judged_in_the_format_that_the_recipe_gives_them(recipe, largest, lost):
    model = nn.Sequential(nn.Linear(32, 32))
    options = Float8Options(recipe=recipe, smallest=16, emulate=True)
    watch = Float8Watch(model, applied(model, options))
    gradient = torch.full((16, 32), 1e-6)
    gradient[:, 0] = 1.0
    watch.look(1, lambda: (model(torch.ones(16, 32)) * gradient).sum())
    watch.decisions()
    (found,) = [n for n in watch.drifts[0].layers if n.operand == "gradient"]
    assert (found.amax, found.scale) == (1.0, largest)
    assert found.lost == pytest.approx(lost)
    config = Float8LinearConfig.from_recipe_name(recipe)
    assert torch.finfo(config.cast_config_grad_output.target_dtype).max == largest


class BesideSmallValues:
    """Trains with a rank that has seen small values only, by a reduction that passes NaN over."""

    are_many = is_first = True

    def __init__(self, model):
        alone = Alone(model)
        self.all_agree, self.gradients, self.norm = alone.all_agree, alone.gradients, alone.norm
        self.mean = alone.mean

    def largest(self, value):
        return torch.fmax(value, torch.ones_like(value))


def test_a_largest_value_that_is_no_number_wins_over_those_of_other_ranks():
    model = nn.Sequential(nn.Linear(32, 32))
    with torch.no_grad():
        model[0].weight[0, 0] = torch.nan
    watch = Float8Watch(model, applied(model, WATCHED), BesideSmallValues(model))
    watch.look(1, lambda: model(torch.ones(16, 32)).sum())
    watch.decisions()
    (weight,) = [n for n in watch.drifts[0].layers if n.operand == "weight"]
    assert weight.problem == "its weight has values that are not finite, so it has no scale"


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
    largest, num_lost, num_present = figures(values, dtype, by_row=by_row)
    lost = num_lost / num_present
    assert largest == values.abs().max()
    assert float(lost) == pytest.approx(float(expected), abs=2 / values.numel())
    assert 0.1 < lost < 0.9
