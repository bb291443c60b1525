"""float8 in a trainer: alone and on several ranks."""

from __future__ import annotations

import copy
import dataclasses
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn, optim

import ranks
from float8_models import (
    EMULATED,
    MEASURED,
    WATCHED,
    batches,
    gpt,
    gpt_without_batch_norm,
    loss_fn,
    step_timer_of,
    timer_of,
)
from torchfast import Plan, PlanError, Trainer

# --- in a step -----------------------------------------------------------------------------------


def trained(precision, steps=12, **options):
    model = gpt()
    factory = partial(optim.AdamW, lr=3e-3)
    trainer = Trainer(model, factory, loss_fn, Plan(precision=precision), **options)
    losses = [float(trainer.step(batch)) for batch in batches(1) * steps]
    return trainer, losses


@pytest.mark.parametrize("options", [EMULATED, MEASURED])
def test_an_optimizer_that_holds_weights_of_another_model_is_refused(options):
    model, old = gpt(), gpt()
    stale = {id(model.blocks[0][0].weight): old.blocks[0][0].weight}
    mixed = [stale.get(id(p), p) for p in model.parameters()]
    with pytest.raises(PlanError, match=r"lacks the weight of 'blocks\.0\.0'"):
        Trainer(model, optim.SGD(mixed, lr=0.1), loss_fn, Plan(precision=options))
    assert type(model.blocks[0][0]) is nn.Linear
    with pytest.raises(PlanError, match="would train tensors that nothing reads"):
        Trainer(model, lambda _: optim.SGD(mixed, lr=0.1), loss_fn, Plan(precision=options))
    # What the loss has besides, and what is not trained, is nobody's mistake.
    some = [*list(model.parameters())[3:], nn.Parameter(model.gate.bias.detach().clone())]
    Trainer(model, optim.SGD(some, lr=0.1), loss_fn, Plan(precision=options)).close()


class Drawing(nn.Module):
    """Draws from a generator of its own, and counts its calls."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 16)
        self.generator, self.calls = torch.Generator().manual_seed(3), 0

    def forward(self, x):
        self.calls += 1
        kept = torch.rand(x.shape, generator=self.generator) > 0.1 * self.calls
        return self.last(self.first(x) * kept)


def loss_with_noise(rng):
    def loss(model, batch):
        return (model(batch) + rng.normal()).float().square().mean()

    return loss


def test_the_watch_changes_no_run_that_draws_from_generators_of_its_own():
    def losses(watch_at):
        options = dataclasses.replace(EMULATED, watch_at=watch_at)
        trainer = Trainer(
            Drawing(),
            partial(optim.SGD, lr=0.1),
            loss_with_noise(np.random.default_rng(3)),
            Plan(precision=options),
        )
        generator = torch.Generator().manual_seed(0)
        batch = torch.randn(16, 32, generator=generator)
        return [float(trainer.step(batch)) for _ in range(4)], trainer

    plain, _ = losses(())
    watched, trainer = losses((1, 2, 3))
    assert watched == plain
    trainer.report()
    drifts = trainer._step._transforms._float8.watch.drifts
    assert all(abs(drift.loss_drift) < 0.02 for drift in drifts)  # both passes draw the same


class Followed(nn.Module):
    """Has an encoder that follows the one that is trained, and counts in a list."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key = nn.Linear(32, 32), nn.Linear(32, 32).requires_grad_(False)
        self.head, self.seen = nn.Linear(32, 32), []

    def forward(self, x):
        with torch.no_grad():
            for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
                key.mul_(0.5).add_(query, alpha=0.5)
        self.seen.append(len(x))
        return self.head(self.query(x)) * self.key(x) * len(self.seen)


class Centered(nn.Module):
    """A loss function with a statistic of what it has seen."""

    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(32))

    def forward(self, model, batch):
        out = model(batch)
        loss = (out - self.center).float().square().mean()
        with torch.no_grad():
            self.center.mul_(0.5).add_(out.detach().float().mean(0), alpha=0.5)
        return loss


CRITERION = Centered()


def by_a_global_name(model, batch):
    return CRITERION(model, batch)


@pytest.mark.parametrize("loss", [Centered(), by_a_global_name])
@pytest.mark.parametrize("options", [EMULATED, dataclasses.replace(MEASURED, budget_s=0.02)])
def test_trials_change_no_run_whose_forward_writes_parameters(monkeypatch, options, loss):
    # Whole steps are timed, and found no faster: then the run is one in bf16.
    seconds = {"bf16": 1.0, "tensorwise": 0.5, "rowwise": 2.0, "rowwise_with_gw_hp": 2.0}
    monkeypatch.setattr("torchfast.precision.float8_choice._on_device", timer_of(seconds))
    monkeypatch.setattr("torchfast.precision.float8_step._on_device", step_timer_of([2.0] * 3))

    def losses(precision):
        CRITERION.center.zero_()
        model, criterion = Followed(), copy.deepcopy(loss)
        trainer = Trainer(model, partial(optim.SGD, lr=0.1), criterion, Plan(precision=precision))
        generator = torch.Generator().manual_seed(0)
        batch = torch.randn(16, 32, generator=generator)
        found = [float(trainer.step(batch)) for _ in range(3)]
        report = str(trainer.report())
        trainer.close()
        return found, model.seen, report

    is_measured = options.recipe == "auto"
    plain, seen, _ = losses("bf16" if is_measured else options)
    tried, also_seen, report = losses(dataclasses.replace(options, watch_at=(1, 2)))
    assert ("all is in bf16" if is_measured else "beside bf16, ") in report
    assert tried == plain
    assert also_seen == seen == [16] * 3


def test_nothing_is_looked_for_in_a_step_that_is_not_compared(monkeypatch):
    trainer, _ = trained(WATCHED, steps=1)

    def asked(_):
        pytest.fail("what the loss function uses was asked for")

    monkeypatch.setattr("torchfast._core.untouched.used_by", asked)
    trainer.step(batches(1)[0])


def test_a_step_in_float8_trains_as_one_in_bf16():
    _, plain = trained("bf16")
    trainer, losses = trained(WATCHED, max_grad_norm=1.0, ema=0.9)
    assert losses == pytest.approx(plain, 0.05)
    assert losses != plain
    assert losses[-1] < 0.9 * losses[0]
    report = str(trainer.report())
    assert "4 of 6 linear layers (4 tensorwise, emulated)" in report
    assert "beside bf16, update 1: loss" in report
    assert "bf16 autocast of the forward, around linear layers in float8" in report
    # The average is evaluated, copied and saved without torchao.
    assert all(
        type(m) is nn.Linear for m in trainer.ema_model.modules() if isinstance(m, nn.Linear)
    )
    state, model = copy.deepcopy(trainer.state_dict()), trainer.model
    trainer.close()
    assert type(model.blocks[0][0]) is nn.Linear
    resumed = []
    for _ in range(2):
        other, _ = trained(WATCHED, steps=1, max_grad_norm=1.0, ema=0.9)
        other.load_state_dict(state)
        resumed.append([float(other.step(batches(1)[0])) for _ in range(2)])
    assert resumed[0] == resumed[1]
    assert resumed[0][0] < losses[-2]


def test_a_trainer_built_anew_on_the_same_optimizer_takes_over():
    model = gpt()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    first = Trainer(model, optimizer, loss_fn, Plan(precision=EMULATED))
    second = Trainer(model, optimizer, loss_fn, Plan(precision=EMULATED))
    second.step(batches(1)[0])
    first.close()
    assert type(model.blocks[0][0]) is not nn.Linear
    second.close()
    assert type(model.blocks[0][0]) is nn.Linear


def test_a_refused_argument_leaves_the_model_as_it_was():
    model = gpt()
    with pytest.raises(TypeError):
        Trainer(model, partial(optim.AdamW, lr=1e-3), loss_fn, Plan(precision=EMULATED), ema="no")
    with pytest.raises(TypeError):
        Trainer(model, lambda _: None, loss_fn, Plan(precision=EMULATED))
    assert type(model.blocks[0][0]) is nn.Linear


def decaying(model):
    """Return what builds an AdamW that decays weights of linear layers, found by their class."""

    def build(parameters):
        linear = [m.weight for m in model.modules() if type(m) is nn.Linear]
        decayed = {id(weight) for weight in linear}
        rest = [p for p in parameters if id(p) not in decayed]
        groups = [{"params": linear, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        return optim.AdamW(groups, lr=3e-3)

    return build


@pytest.mark.parametrize("optimizer", ["as_given", "adamw8bit"])
def test_a_callable_that_looks_at_layers_finds_them_as_they_were_given(optimizer):
    model, other = gpt(), gpt()
    expected = decaying(other)(other.parameters()).param_groups
    names, plain = ({id(p): n for n, p in m.named_parameters()} for m in (model, other))
    plan = Plan(precision=EMULATED, optimizer=optimizer)
    with Trainer(model, decaying(model), loss_fn, plan) as trainer:
        for found, group in zip(trainer.optimizer.param_groups, expected, strict=True):
            assert [names[id(p)] for p in found["params"]] == [
                plain[id(p)] for p in group["params"]
            ]
            assert found["weight_decay"] == group["weight_decay"]
        # It is back in float8 behind that, and trains.
        assert type(model.blocks[0][0]) is not nn.Linear
        losses = [float(trainer.step(batch)) for batch in batches(1) * 4]
        assert losses[-1] < losses[0]


def test_measured_recipes_are_decided_at_the_first_step(monkeypatch):
    seen = []
    seconds = {"bf16": 1.0, "tensorwise": 0.5, "rowwise": 0.6, "rowwise_with_gw_hp": 0.7}
    monkeypatch.setattr("torchfast.precision.float8_choice._on_device", timer_of(seconds, seen))
    monkeypatch.setattr("torchfast.precision.float8_step._on_device", step_timer_of([0.5] * 3))
    trainer, _ = trained(MEASURED, steps=2)
    assert seen == [sorted(seconds)] * 2  # one for each shape, once
    report = str(trainer.report())
    assert "4 of 6 linear layers (4 tensorwise, emulated)" in report
    assert "float8 recipes measured on cpu, not compiled" in report


# --- on several ranks ----------------------------------------------------------------------------


@pytest.mark.parametrize("shard", ["ddp", "fsdp"])
def test_replicas_and_shards_train_in_float8(shard):
    def rank(number):
        model = gpt_without_batch_norm()
        keys = list(model.state_dict())
        plan = Plan(precision=WATCHED, optimizer="adamw8bit", shard=shard)
        trainer = Trainer(model, partial(optim.AdamW, lr=3e-3), loss_fn, plan, max_grad_norm=1.0)
        losses = [float(trainer.step(batch)) for batch in batches(1) * 4]
        report = str(trainer.report())
        trainer.close()
        assert list(model.state_dict()) == keys
        return losses, report, isinstance(model.blocks[0][0], nn.Linear)

    for losses, report, is_linear in ranks.run(rank):
        assert losses[-1] < 0.8 * losses[0]
        assert "4 of 6 linear layers (4 tensorwise, emulated)" in report
        assert "beside bf16, update 1: loss" in report
        assert is_linear


@pytest.mark.parametrize("shard", ["ddp", "fsdp"])
def test_a_callable_finds_layers_as_given_on_several_ranks(shard):
    def rank(number):
        model = gpt_without_batch_norm()
        all_gather = shard == "fsdp"
        precision = dataclasses.replace(EMULATED, all_gather=all_gather)
        plan = Plan(precision=precision, shard=shard)
        with Trainer(model, decaying(model), loss_fn, plan) as trainer:
            sizes = [len(group["params"]) for group in trainer.optimizer.param_groups]
            losses = [float(trainer.step(batch)) for batch in batches(1) * 4]
            return sizes, losses, "4 of 6 linear layers" in str(trainer.report())

    plain = gpt_without_batch_norm()
    groups = decaying(plain)(plain.parameters()).param_groups
    for sizes, losses, is_converted in ranks.run(rank):
        assert sizes == [len(group["params"]) for group in groups]
        assert losses[-1] < losses[0]
        assert is_converted


def test_replicas_take_the_recipes_of_the_first():
    def rank(number):
        seconds = {
            "bf16": 1.0,
            "tensorwise": 0.7 + number,
            "rowwise": 0.8,
            "rowwise_with_gw_hp": 2.0,
        }
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("torchfast.precision.float8_choice._on_device", timer_of(seconds))
            plan = Plan(precision=MEASURED, shard="ddp")
            trainer = Trainer(
                gpt_without_batch_norm(), partial(optim.AdamW, lr=1e-3), loss_fn, plan
            )
            trainer.step(batches(1)[0])
            return str(trainer.report())

    assert ["(4 tensorwise, emulated)" in report for report in ranks.run(rank)] == [True, True]
