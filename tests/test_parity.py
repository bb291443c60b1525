"""Plans that promise to change no number, against a loop that imports nothing of torchfast.

Every broken step in `test_a_broken_step_is_found` must turn parity red: that is what makes the
green ones mean something.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn, optim
from torch.optim import lr_scheduler as schedulers

from models import BATCHES, LOSSES, MODELS, DropoutNet, make_batches, mean_loss, weighted_loss
from torchfast import ParityError, Plan, TrainStep
from torchfast._core import weights
from torchfast.gradients import Gradients
from torchfast.parallel import sharding
from torchfast.testing import Tolerance, assert_parity
from torchfast.update import Update


def grouped(make, params):
    """Two parameter groups with learning rates of their own."""
    matrices, rest = [], []
    for p in params:
        (matrices if p.dim() > 1 else rest).append(p)
    groups = [{"params": g} for g in (matrices, rest) if g]
    groups[-1]["lr"] = 0.003
    return make(groups)


def trainable(make, params):
    return make([p for p in params if p.requires_grad])


# Every optimizer of torch.optim whose update is one step(); LBFGS needs a closure, SparseAdam
# sparse gradients and Muon matrices, so the latter two have tests of their own below.
OPTIMIZERS = {
    "ASGD": partial(optim.ASGD, lr=0.05),
    "Adadelta": partial(optim.Adadelta, lr=1.0),
    "Adafactor": partial(optim.Adafactor, lr=0.01),
    "Adagrad": partial(optim.Adagrad, lr=0.05),
    "Adam": partial(optim.Adam, lr=0.01),
    "Adam amsgrad": partial(optim.Adam, lr=0.01, amsgrad=True, weight_decay=0.1),
    "AdamW": partial(optim.AdamW, lr=0.01),
    "AdamW for-loop": partial(optim.AdamW, lr=0.01, foreach=False),
    "AdamW foreach": partial(optim.AdamW, lr=0.01, foreach=True),
    "AdamW fused": partial(optim.AdamW, lr=0.01, fused=True),
    "Adamax": partial(optim.Adamax, lr=0.01),
    "NAdam": partial(optim.NAdam, lr=0.01),
    "RAdam": partial(optim.RAdam, lr=0.01),
    "RMSprop": partial(optim.RMSprop, lr=0.005, momentum=0.9, centered=True),
    "Rprop": partial(optim.Rprop, lr=0.01),
    "SGD": partial(optim.SGD, lr=0.1),
    "SGD momentum": partial(optim.SGD, lr=0.1, momentum=0.9, dampening=0.1),
    "SGD nesterov fused": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, fused=True),
}

SCHEDULERS = {
    "none": None,
    "StepLR": partial(schedulers.StepLR, step_size=2, gamma=0.5),
    "CosineAnnealingLR": partial(schedulers.CosineAnnealingLR, T_max=6),
    "LambdaLR": lambda o: schedulers.LambdaLR(o, [lambda s: 1 / (1 + s)] * len(o.param_groups)),
    "OneCycleLR": partial(schedulers.OneCycleLR, max_lr=0.02, total_steps=20, cycle_momentum=False),
    "warm-up then exponential": lambda o: schedulers.SequentialLR(
        o,
        [schedulers.LinearLR(o, 0.1, total_iters=2), schedulers.ExponentialLR(o, 0.9)],
        milestones=[2],
    ),
}


@pytest.mark.parametrize("plan", ["eager", "exact"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_is_exact(name, plan):
    result = assert_parity(
        DropoutNet,
        OPTIMIZERS[name],
        mean_loss,
        make_batches(7),
        plan,
        accumulate=3,  # 3, 3, 1: the last group is short
        max_grad_norm=0.5,
    )
    assert result.exact
    assert result.num_steps == 3


@settings(max_examples=60)
@given(
    plan=st.sampled_from(["eager", "exact"]),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    scheduler=st.sampled_from(sorted(SCHEDULERS)),
    model=st.sampled_from(sorted(MODELS)),
    batch=st.sampled_from(sorted(BATCHES)),
    loss=st.sampled_from(sorted(LOSSES)),
    groups=st.sampled_from([grouped, trainable]),
    accumulate=st.sampled_from([1, 3]),
    clip=st.sampled_from([None, 0.1, 10.0]),
    count=st.integers(2, 7),
    ragged=st.booleans(),
    seed=st.integers(0, 3),
)
def test_any_combination_is_exact(
    plan, optimizer, scheduler, model, batch, loss, groups, accumulate, clip, count, ragged, seed
):
    result = assert_parity(
        MODELS[model],
        lambda params: groups(OPTIMIZERS[optimizer], params),
        LOSSES[loss],
        make_batches(count, kind=batch, ragged=ragged, seed=seed),
        plan,
        accumulate=accumulate,
        max_grad_norm=clip,
        lr_scheduler=SCHEDULERS[scheduler],
        seed=seed,
    )
    assert result.num_steps == -(-count // accumulate)


@pytest.mark.parametrize("name", [n for n in SCHEDULERS if n != "none"])
def test_every_scheduler_is_exact_over_two_groups(name):
    assert_parity(
        DropoutNet,
        lambda params: grouped(OPTIMIZERS["AdamW"], params),
        mean_loss,
        make_batches(8),
        lr_scheduler=SCHEDULERS[name],
    )


def test_schedulers_that_cycle_betas_are_exact():
    for make in (
        partial(schedulers.OneCycleLR, max_lr=0.02, total_steps=20),
        partial(schedulers.CyclicLR, base_lr=0.001, max_lr=0.01, step_size_up=3),
    ):
        assert_parity(
            DropoutNet, OPTIMIZERS["AdamW"], mean_loss, make_batches(6), lr_scheduler=make
        )


def test_sparse_gradients_are_exact():
    def loss_fn(model, batch):
        return model(batch).square().mean()

    batches = [torch.randint(50, (6,)) for _ in range(5)]
    model = nn.Embedding(50, 4, sparse=True)
    for make in (partial(optim.SparseAdam, lr=0.01), partial(optim.SGD, lr=0.1)):
        assert_parity(model, make, loss_fn, batches, accumulate=2)

    def weighted(model, batch):
        return model(batch).square().sum(), {}, float(len(batch))

    assert_parity(model, partial(optim.SGD, lr=0.1), weighted, batches, accumulate=2)


def test_muon_is_exact():
    assert_parity(
        nn.Linear(8, 4, bias=False), partial(optim.Muon, lr=0.01), mean_loss, make_batches(4)
    )


def test_a_tensor_learning_rate_stays():
    make = partial(optim.AdamW, lr=torch.tensor(0.01), fused=True)
    assert_parity(DropoutNet, make, mean_loss, make_batches(4))


def test_host_random_numbers_in_the_forward_are_exact():
    import random

    import numpy as np

    def loss_fn(model, batch):
        return mean_loss(model, batch) * random.random() + float(np.random.rand())

    assert_parity(DropoutNet, OPTIMIZERS["AdamW"], loss_fn, make_batches(4))


# --- negative controls: a comparison that cannot fail proves nothing ----------------------------


def no_clip(monkeypatch):
    monkeypatch.setattr(sharding, "clip_grad_norm_", lambda parameters, norm: norm)


ACCUMULATE = 3


def divided_otherwise(monkeypatch, divisor):
    """Let the loss of a mean be divided by something else than the size of its group."""
    original = Gradients._backward

    def backward(self, batch, **options):
        return original(self, batch, **{**options, "divisor": divisor})

    monkeypatch.setattr(Gradients, "_backward", backward)


def no_division(monkeypatch):
    divided_otherwise(monkeypatch, 1)


def double_update(monkeypatch):
    original = Update.__call__

    def update(self):
        self._compiled._optimizer.step()
        return original(self)

    monkeypatch.setattr(Update, "__call__", update)


def stale_gradients(monkeypatch):
    original = Gradients.__call__

    def gradients(self, group):
        kept = self._optimizer.zero_grad
        self._optimizer.zero_grad = lambda set_to_none=True: None
        try:
            return original(self, group)
        finally:
            self._optimizer.zero_grad = kept

    monkeypatch.setattr(Gradients, "__call__", gradients)


def clip_before_division(monkeypatch):
    monkeypatch.setattr(weights, "divide_gradients", lambda *_: None)


def extra_random_draw(monkeypatch):
    original = Update.__call__

    def update(self):
        torch.rand(1)
        return original(self)

    monkeypatch.setattr(Update, "__call__", update)


def scheduler_not_stepped(monkeypatch):
    original = TrainStep.__init__

    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self._schedule = None

    monkeypatch.setattr(TrainStep, "__init__", init)


def wrong_loss(monkeypatch):
    original = Gradients.__call__

    def gradients(self, group):
        loss, metrics = original(self, group)
        return loss * 1.0000001, metrics

    monkeypatch.setattr(Gradients, "__call__", gradients)


def short_group_divided_by_accumulate(monkeypatch):
    divided_otherwise(monkeypatch, ACCUMULATE)


@pytest.mark.parametrize(
    ("mutate", "loss_fn", "first"),
    [
        (no_clip, mean_loss, "gradients"),
        (no_division, mean_loss, "loss"),
        (double_update, mean_loss, "parameters"),
        (stale_gradients, mean_loss, "gradients"),
        (clip_before_division, weighted_loss, "gradients"),
        (extra_random_draw, mean_loss, "random generators"),
        (scheduler_not_stepped, mean_loss, "scheduler"),
        (wrong_loss, mean_loss, "loss"),
        (short_group_divided_by_accumulate, mean_loss, "loss"),
    ],
)
def test_a_broken_step_is_found(monkeypatch, mutate, loss_fn, first):
    def check():
        return assert_parity(
            DropoutNet,
            OPTIMIZERS["SGD momentum"],
            loss_fn,
            make_batches(7),
            accumulate=ACCUMULATE,
            max_grad_norm=0.05,
            lr_scheduler=SCHEDULERS["StepLR"],
        )

    check()
    mutate(monkeypatch)
    with pytest.raises(ParityError, match=f"at step . of 3: {first} "):
        check()


# --- close plans ------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [Plan(precision="bf16"), Plan(precision="fp16"), "fast"])
@pytest.mark.parametrize("name", ["dropout", "batchnorm", "tied"])
def test_close_plans_are_close(name, plan):
    batches = make_batches(24, size=32)
    result = assert_parity(
        MODELS[name],
        partial(optim.SGD, lr=0.05, momentum=0.9),
        mean_loss,
        # fp16 skips its first updates until the scale fits, which is not what is compared here.
        batches,
        plan.replace(precision=_small_scale()) if plan == Plan(precision="fp16") else plan,
        accumulate=2,
        max_grad_norm=1.0,
        tolerance=Tolerance(loss=0.02, update=0.05),
    )
    assert not result.exact
    assert result.num_steps == 12


def _small_scale():
    from torchfast import PrecisionOptions

    return PrecisionOptions(format="fp16", init_scale=256.0)


@pytest.mark.parametrize("mutate", [no_clip, no_division, double_update, stale_gradients])
def test_a_broken_step_is_not_close(monkeypatch, mutate):
    def check():
        return assert_parity(
            DropoutNet,
            OPTIMIZERS["SGD momentum"],
            mean_loss,
            make_batches(24, size=32),
            Plan(precision="bf16"),
            accumulate=2,
            max_grad_norm=0.05,
            tolerance=Tolerance(loss=0.02, update=0.05),
        )

    check()
    mutate(monkeypatch)
    with pytest.raises(ParityError, match="is not close to the plain loop") as caught:
        check()
    assert "compiled code" not in str(caught.value)


@pytest.mark.parametrize("rate", [0.5, 0.0])
def test_dropout_in_compiled_code_is_named(rate):
    def build():
        return nn.Sequential(nn.Linear(8, 32), nn.Dropout(rate), nn.Dropout(rate), nn.Linear(32, 4))

    def compare():
        return assert_parity(
            build, OPTIMIZERS["SGD momentum"], mean_loss, make_batches(2), Plan(compile=True)
        )

    if not rate:
        assert not compare().exact
        return
    with pytest.raises(ParityError, match=r"drops other units .* \(p=0\.5 in 2 modules\): comp"):
        compare()


class KeepsItsLoss(nn.Module):
    """Keeps an auxiliary loss, with its graph, in an attribute."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.extra = self.layer.weight.square().mean()

    def forward(self, x):
        self.extra = self.layer.weight.square().mean()
        return self.layer(x)


def test_a_model_that_keeps_a_graph_is_copied():
    def loss_fn(model, batch):
        return mean_loss(model, batch) + model.extra

    assert_parity(
        KeepsItsLoss(), partial(optim.SGD, lr=0.1), loss_fn, make_batches(3), plan="exact"
    )
