"""Captured steps on a real device: exact over hundreds of steps."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

from gpu.graph_jobs import (
    GRAPH,
    Net,
    assert_same_training,
    build,
    copied,
    counters,
    lambdas,
    loss_fn,
    on_gpu,
    one_cycle,
    run,
    run_in_halves,
    state,
)
from gpu.syncs import no_syncs
from models import make_batches
from test_parity import OPTIMIZERS
from torchfast import (
    CUDAGraphStep,
    MicroBatches,
    Plan,
    PrecisionOptions,
)
from torchfast._core.compare import differences

# Those that keep every bit in a form that a graph can hold.
IN_GRAPH = {"ASGD", "AdamW fused", "Rprop", "SGD", "SGD momentum", "SGD nesterov fused"}

pytestmark = pytest.mark.usefixtures("deterministic")


@pytest.mark.parametrize("scheduler", [lambdas, one_cycle])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_hundred_steps_are_exact(name, accumulate, clip, scheduler):
    groups = on_gpu(make_batches(8 * accumulate, size=12))
    steps = [
        MicroBatches(groups[i : i + accumulate]) if accumulate > 1 else groups[i]
        for i in range(0, len(groups), accumulate)
    ] * 25
    options = {"accumulate": accumulate, "max_grad_norm": clip, "scheduler": scheduler}
    captured = build(name, GRAPH, **options)
    assert_same_training(build(name, Plan(), **options), captured, steps)
    found = counters(captured)
    assert (found["graphs"], found["replays"], found["eager steps"]) == (1, 197, 3)
    (decision, *_) = [d for d in captured.report().decisions if d.lever == "cuda_graph"]
    assert (decision.outcome == "applied") == (name in IN_GRAPH)


@pytest.mark.parametrize("name", [*OPTIMIZERS])
def test_fast_captures_what_torch_can(name):
    """And trains as the eager step in the same form, bit for bit."""
    plan = Plan(optimizer="fused", cuda_graph=True)
    batches = on_gpu(make_batches(6, size=12)) * 5
    captured, halves = build(name, plan), build(name, plan)
    assert not differences(run_in_halves(halves, batches), run(captured, batches))
    assert not differences(state(halves), state(captured))
    assert counters(captured)["replays"] == 27


# Those whose default form no graph can hold: "fast" gives them one that a graph can.
TAKES_A_FORM = ["Adadelta", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop"]


@pytest.mark.parametrize("scheduler", [lambdas, one_cycle])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("name", TAKES_A_FORM)
def test_two_hundred_steps_in_the_form_of_a_graph_are_exact(name, accumulate, clip, scheduler):
    """Beside the eager halves of a step in the same form, from the same schedule."""
    plan = Plan.preset("fast").replace(compile=False)
    groups = on_gpu(make_batches(8 * accumulate, size=12))
    steps = [
        MicroBatches(groups[i : i + accumulate]) if accumulate > 1 else groups[i]
        for i in range(0, len(groups), accumulate)
    ] * 25
    options = {"accumulate": accumulate, "max_grad_norm": clip, "scheduler": scheduler}
    captured, halves = build(name, plan, **options), build(name, plan, **options)
    rates = [group["lr"] for group in captured.optimizer.param_groups]
    assert not differences(run_in_halves(halves, steps), run(captured, steps))
    assert not differences(state(halves), state(captured))
    assert not differences(dict(halves.metrics), dict(captured.metrics))
    assert [group["lr"] for group in captured.optimizer.param_groups] != rates
    found = counters(captured)
    assert (found["graphs"], found["replays"], found["eager steps"]) == (1, 197, 3)
    assert not [d for d in captured.report().stepped_aside if d.lever == "cuda_graph"]
    assert captured._step._graph.is_whole


def test_what_happens_between_steps_is_seen():
    def events(trainer):
        group = trainer.optimizer.param_groups[0]
        yield
        group["lr"] = 0.5
        yield
        group["weight_decay"] = 0.1
        yield
        trainer.model.eval()
        yield
        trainer.model.train()
        yield
        trainer.model.first.requires_grad_(False)
        yield
        trainer.model.first.requires_grad_(True)
        yield
        trainer.load_state_dict(saved[trainer])
        yield
        trainer.optimizer.zero_grad(set_to_none=True)
        yield
        extra = nn.Parameter(torch.ones(4, device="cuda"))
        trainer.model.extra = extra
        trainer.optimizer.add_param_group({"params": [extra], "lr": 0.1})
        yield
        trainer.model.load_state_dict(trainer.model.state_dict(), assign=True)
        yield

    batches = on_gpu(make_batches(7, size=12))
    saved, results = {}, []
    for plan in (Plan(), GRAPH):
        trainer = build("AdamW fused", plan)
        losses = run(trainer, batches)
        saved[trainer] = copied(trainer.state_dict())
        for _ in events(trainer):
            losses += run(trainer, batches)
        results.append((losses, state(trainer)))
        last = trainer
    assert not differences(results[0][0], results[1][0])
    assert not differences(results[0][1], results[1][1])
    assert counters(last)["replays"] > 40


def test_a_resumed_run_is_the_uninterrupted_one():
    batches = on_gpu(make_batches(8, size=12)) * 4
    whole = build("AdamW fused", GRAPH, scheduler=one_cycle)
    expected = run(whole, batches)
    first = build("AdamW fused", GRAPH, scheduler=one_cycle)
    run(first, batches[:16])
    held = copied(first.state_dict())
    # Into a trainer whose graph lives, and which has trained something else.
    second = build("AdamW fused", GRAPH, scheduler=one_cycle)
    run(second, batches[3:11])
    second.load_state_dict(held)
    assert counters(second)["graphs"] == 1
    assert not differences(expected[16:], [second.step(batch) for batch in batches[16:]])
    assert not differences(state(whole), state(second))
    assert counters(second)["captures"] == 1


@pytest.mark.parametrize(
    "plan",
    [
        Plan(precision="bf16", cuda_graph=True),
        Plan(precision=PrecisionOptions(format="fp16", init_scale=256.0), cuda_graph=True),
        Plan(nonfinite="skip", cuda_graph=True),
        Plan(precision="tf32", channels_last=True, cuda_graph=True),
    ],
    ids=["bf16", "fp16", "skip", "tf32"],
)
def test_other_levers_hold_in_a_graph(plan):
    batches = on_gpu(make_batches(8, size=12)) * 4
    poisoned = batches[13][0].clone()
    poisoned[0, 0] = torch.inf
    batches[13] = (poisoned, batches[13][1])
    if plan.nonfinite == "propagate" and plan.precision != "fp16":
        del batches[13]
    plain = build("AdamW fused", plan.replace(cuda_graph=False), max_grad_norm=1.0)
    captured = build("AdamW fused", plan, max_grad_norm=1.0)
    assert_same_training(plain, captured, batches)
    assert plain.num_skipped == captured.num_skipped
    assert counters(captured)["graphs"] == 1


# -- Any step --------------------------------------------------------------------------------------


def test_two_optimizers_and_a_generator_in_one_step():
    def make():
        torch.manual_seed(0)
        g = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)).cuda()
        d = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1)).cuda()
        og, od = (optim.Adam(m.parameters(), lr=1e-3, fused=True) for m in (g, d))
        noise = torch.Generator("cuda").manual_seed(7)

        def step(real):
            fake = g(torch.randn(len(real), 4, device="cuda", generator=noise))
            loss_d = F.softplus(-d(real)).mean() + F.softplus(d(fake.detach())).mean()
            od.zero_grad(set_to_none=True)
            loss_d.backward()
            od.step()
            loss_g = F.softplus(-d(fake)).mean()
            og.zero_grad(set_to_none=True)
            loss_g.backward()
            og.step()
            return {"generator": loss_g, "discriminator": loss_d}

        return step, [g, d, og, od, noise]

    batches = [torch.randn(32, 2, device="cuda") for _ in range(40)]
    plain, parts = make()
    expected = [{k: v.detach() for k, v in plain(b).items()} for b in batches]
    step, own = make()
    with CUDAGraphStep(step, state=own) as captured:
        found = [captured(b) for b in batches]
        assert captured.report().counters["replays"] == 37
    assert not differences(expected, found)
    for a, b in zip(parts[:4], own[:4], strict=True):
        assert not differences(a.state_dict(), b.state_dict())


def test_four_updates_in_one_graph_are_four_updates():
    def make():
        torch.manual_seed(0)
        model = Net().cuda()
        optimizer = optim.AdamW(model.parameters(), lr=0.01, fused=True)

        def update(batch):
            optimizer.zero_grad(set_to_none=True)
            loss, _ = loss_fn(model, batch)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return update, model, optimizer

    batches = on_gpu(make_batches(40, size=12))
    plain, *parts = make()
    torch.manual_seed(1)
    expected = [plain(b).clone() for b in batches]
    update, *own = make()
    torch.manual_seed(1)
    with CUDAGraphStep(lambda four: [update(b) for b in four], state=own) as captured:
        groups = [batches[i : i + 4] for i in range(0, 40, 4)]
        found = [loss for group in groups for loss in captured(group)]
        assert captured.report().counters["replays"] == 7
    assert not differences(expected, found)
    for a, b in zip(parts, own, strict=True):
        assert not differences(a.state_dict(), b.state_dict())


def test_no_sync_in_a_steady_step():
    batches = on_gpu(make_batches(4, size=12))
    captured = build("AdamW fused", GRAPH, max_grad_norm=1.0, scheduler=lambdas)
    for batch in batches * 2:
        captured.step(batch)
    with no_syncs():
        for batch in batches * 10:
            captured.step(batch)
    assert counters(captured)["replays"] == 45
