"""Averaged weights on a real device: torch's own average bit for bit, in graphs, without a sync."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import optim

from averages import MixedNet, comparable, reference, weights_of
from gpu.graph_jobs import (
    GRAPH,
    build,
    copied,
    counters,
    lambdas,
    loss_fn,
    on_gpu,
    state,
)
from gpu.test_syncs import no_syncs
from models import make_batches
from test_parity import OPTIMIZERS
from torchfast import EMAOptions, MicroBatches, Plan, PrecisionOptions, Trainer
from torchfast._core.compare import differences

pytestmark = pytest.mark.usefixtures("deterministic")

WARM = EMAOptions(decay=0.99, warm_up=True)
RULES = [0.99, WARM, EMAOptions(decay=0.99, use_buffers=True)]


def beside_torch(trainer, steps, ema):
    """Take steps, each compared with torch's own average of the same weights."""
    expected = reference(trainer.model, ema)
    use_buffers = EMAOptions.of(ema).use_buffers
    torch.manual_seed(1)
    for number, batch in enumerate(steps, start=1):
        trainer.step(batch)
        expected.update_parameters(trainer.model)
        pair = comparable(expected, trainer.ema_model, use_buffers=use_buffers)
        assert not differences(*pair), f"step {number}"


@pytest.mark.parametrize("ema", RULES, ids=repr)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_hundred_steps_are_averaged_exactly(name, ema):
    trainer = build(name, GRAPH, scheduler=lambdas, max_grad_norm=0.5, ema=ema)
    beside_torch(trainer, on_gpu(make_batches(10, size=12)) * 10, ema)
    found = counters(trainer)
    assert (found["graphs"], found["replays"], found["eager steps"]) == (1, 97, 3)
    assert trainer.state_dict()["ema"]["num_averaged"] == 100


@pytest.mark.parametrize("plan", ["eager", "fast"])
@pytest.mark.parametrize("ema", RULES, ids=repr)
def test_other_plans_average_exactly_too(ema, plan):
    trainer = build("AdamW", plan, ema=ema)
    beside_torch(trainer, on_gpu(make_batches(5, size=12)) * 4, ema)


@pytest.mark.parametrize("name", ["AdamW fused", "AdamW"])
def test_captured_and_eager_runs_end_alike(name):
    """Training is not touched either: the same run without an average has the same weights."""
    groups = on_gpu(make_batches(8, size=12))
    steps = [MicroBatches(groups[i : i + 4]) for i in (0, 4)] * 50
    ends = []
    for plan, ema in ((Plan(), 0.99), (GRAPH, 0.99), (GRAPH, None)):
        trainer = build(name, plan, accumulate=4, ema=ema)
        torch.manual_seed(1)
        for step in steps:
            trainer.step(step)
        ends.append(state(trainer))
    eager, captured, without = ends
    assert not differences(eager, captured)
    assert not differences(without, {k: v for k, v in captured.items() if "ema" not in k})


SKIPPING = {
    "skip": Plan(nonfinite="skip"),
    "fp16": Plan(precision=PrecisionOptions(format="fp16", init_scale=256.0)),
}


@pytest.mark.parametrize("ema", [0.99, WARM], ids=repr)
@pytest.mark.parametrize("plan", SKIPPING)
def test_a_skipped_replay_leaves_the_average(plan, ema):
    trainer = build("AdamW fused", SKIPPING[plan].replace(cuda_graph=True), ema=ema)
    expected = reference(trainer.model, ema)
    bad = {0, 7, 8, 20}  # the first too, when there is no average yet
    torch.manual_seed(1)
    for number, (inputs, targets) in enumerate(on_gpu(make_batches(8, size=12)) * 4):
        before = copied(weights_of(trainer.ema_model))
        trainer.step((inputs * torch.nan if number in bad else inputs, targets))
        if number in bad:
            assert not differences(before, weights_of(trainer.ema_model))
        else:
            expected.update_parameters(trainer.model)
        pair = [dict(m.named_parameters()) for m in (expected.module, trainer.ema_model)]
        assert not differences(*pair), number
    assert counters(trainer)["skipped"] == 4
    assert counters(trainer)["replays"] > 20
    assert trainer.state_dict()["ema"]["num_averaged"] == 28


@pytest.mark.parametrize("ema", RULES, ids=repr)
@pytest.mark.parametrize("plan", ["eager", "exact", "fast", *SKIPPING])
@pytest.mark.parametrize("name", ["AdamW fused", "AdamW"])
def test_fifty_steady_steps_read_nothing(name, plan, ema):
    chosen = SKIPPING.get(plan, plan)
    if plan in SKIPPING:
        chosen = chosen.replace(cuda_graph=True)
    trainer = build(name, chosen, ema=ema)
    (batch,) = on_gpu(make_batches(1, size=12))
    for _ in range(5):
        trainer.step(batch)
    with no_syncs():
        for _ in range(50):
            trainer.step(batch)
        assert trainer.ema_model is not None
    assert trainer.state_dict()["ema"]["num_averaged"] == 55


def test_weights_of_16_bits_are_averaged_in_32():
    torch.manual_seed(0)
    optimizer = partial(optim.SGD, lr=0.01)
    trainer = Trainer(MixedNet().cuda(), optimizer, loss_fn, GRAPH, ema=0.999)
    wide = None
    for batch in on_gpu(make_batches(10, size=12)) * 5:
        trainer.step(batch)
        weight = trainer.model.third.weight.detach().float()
        if wide is None:
            wide = weight.clone()
        else:
            torch._foreach_lerp_([wide], [weight], 1 - 0.999)
        assert torch.equal(trainer.ema_model.third.weight, wide.bfloat16())
    assert counters(trainer)["replays"] == 47


@pytest.mark.parametrize("name", ["AdamW fused", "AdamW"])
def test_a_state_loaded_beside_a_graph_is_averaged_on(name):
    steps = on_gpu(make_batches(8, size=12))
    saved = build(name, GRAPH, ema=WARM)
    beside_torch(saved, steps, WARM)
    saved_state = copied(saved.state_dict())
    ends = []
    for plan in (Plan(), GRAPH):
        trainer = build(name, plan, ema=WARM)
        beside_torch(trainer, steps, WARM)
        trainer.load_state_dict(saved_state)
        for batch in steps:
            trainer.step(batch)
        ends.append(state(trainer))
    assert not differences(*ends)
    assert counters(trainer)["captures"] == 1


def test_evaluating_the_average_captures_nothing_anew():
    trainer = build("AdamW fused", GRAPH, ema=0.99)
    batches = on_gpu(make_batches(8, size=12))
    for _ in range(4):
        for batch in batches:
            trainer.step(batch)
        trainer.evaluate(batches, ema=True)
        trainer.ema_model.train()
        trainer.ema_model.eval()
    assert counters(trainer)["captures"] == 1


def test_channels_last_averages_are_laid_out_as_the_weights():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten(), torch.nn.Linear(288, 4)
    )
    trainer = Trainer(model.cuda(), partial(optim.AdamW, lr=0.01), loss_pair, "fast", ema=0.9)
    batch = torch.randn(4, 3, 8, 8, device="cuda"), torch.randint(4, (4,), device="cuda")
    beside_torch(trainer, [batch] * 12, 0.9)
    strides = [p.stride() for p in trainer.model.parameters()]
    assert [p.stride() for p in trainer.ema_model.parameters()] == strides


def loss_pair(model, batch):
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def test_the_average_costs_one_launch_where_nothing_can_be_skipped():
    """With a constant decay and one dtype: a kernel for all weights, and one for the counter."""
    launches = []
    for ema in (None, 0.99):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
        optimizer = partial(optim.AdamW, lr=0.01, fused=True)
        trainer = Trainer(net.cuda(), optimizer, loss_pair, "eager", ema=ema)
        (batch,) = on_gpu(make_batches(1, size=12))
        for _ in range(3):
            trainer.step(batch)
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities, acc_events=True) as found:
            trainer.step(batch)
            torch.cuda.synchronize()
        on_device = torch.autograd.DeviceType.CUDA
        launches.append(sum(event.device_type == on_device for event in found.events()))
    assert launches[1] - launches[0] == 2
