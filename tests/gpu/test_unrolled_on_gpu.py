"""Several steps in one replay on a real device: exact over hundreds of steps, and no host in it."""

from __future__ import annotations

import statistics
import time
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.optim import lr_scheduler as schedulers

from gpu.graph_jobs import (
    GRAPH,
    build,
    copied,
    counters,
    lambdas,
    loss_fn,
    on_gpu,
    one_cycle,
    run,
    state,
)
from gpu.syncs import no_syncs
from models import DropoutNet, make_batches
from torchfast import (
    CUDAGraphOptions,
    EMAOptions,
    MicroBatches,
    Plan,
    PrecisionOptions,
    StepBatches,
    Trainer,
)
from torchfast._core.compare import differences

pytestmark = pytest.mark.usefixtures("deterministic")

K = 8
# Those that keep every bit in a form that a graph can hold.
IN_GRAPH = ["ASGD", "AdamW fused", "Rprop", "SGD", "SGD momentum", "SGD nesterov fused"]


def run_together(trainer, steps):
    """Run steps in groups of K, the last one shorter, from the seed that `run` sets."""
    torch.manual_seed(1)
    return together(trainer, steps)


def together(trainer, steps):
    groups = [StepBatches(steps[i : i + K]) for i in range(0, len(steps), K)]
    return [loss for group in groups for loss in trainer.steps(group)]


def assert_same(single, several, steps):
    losses, ours = run(single, steps), run_together(several, steps)
    assert not differences(losses, ours)
    assert not differences(state(single), state(several))
    assert not differences(dict(single.metrics), dict(several.metrics))


def batches_for(num_steps, *, size=12):
    """Return batches, each with memory of its own: one that came twice would be another kind."""
    return on_gpu(make_batches(num_steps, size=size))


def grouped(batches, accumulate):
    if accumulate == 1:
        return batches
    starts = range(0, len(batches), accumulate)
    return [MicroBatches(batches[i : i + accumulate]) for i in starts]


@pytest.mark.parametrize("scheduler", [lambdas, one_cycle])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", IN_GRAPH)
def test_two_hundred_steps_are_exact(name, accumulate, clip, scheduler):
    steps = grouped(batches_for(204 * accumulate), accumulate)
    options = {"accumulate": accumulate, "max_grad_norm": clip, "scheduler": scheduler}
    several = build(name, GRAPH, **options)
    assert_same(build(name, Plan(), **options), several, steps)
    found = counters(several)
    # 3 steps warm up and 5 are replays; then 24 groups, and 4 steps that are left.
    assert (found["unrolled replays"], found["unrolled steps"]) == (24, 24 * K)
    assert (found["graphs"], found["replays"], found["eager steps"]) == (2, 5 + 24 + 4, 3)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "NAdam", "RMSprop"])
def test_the_forms_of_fast_are_exact_beside_single_steps(name):
    plan = Plan.preset("fast").replace(compile=False)
    single, several = (build(name, plan, scheduler=lambdas) for _ in range(2))
    assert_same(single, several, batches_for(60))
    assert counters(several)["unrolled steps"] == 6 * K


def test_compiled_steps_are_exact_beside_single_steps():
    plan = Plan.preset("fast").replace(compile=True)
    single, several = (build("AdamW", plan, net=DropoutNet, scheduler=lambdas) for _ in range(2))
    assert_same(single, several, batches_for(60))
    assert counters(several)["unrolled steps"] == 6 * K


@pytest.mark.parametrize("ema", [0.9, EMAOptions(decay=0.9, warm_up=True, use_buffers=True)])
@pytest.mark.parametrize("plan", ["exact", "skip", "fp16"])
def test_averages_skips_and_scales_are_exact(plan, ema):
    chosen = {
        "exact": GRAPH,
        "skip": GRAPH.replace(nonfinite="skip"),
        "fp16": GRAPH.replace(precision=PrecisionOptions(format="fp16", init_scale=1024.0)),
    }[plan]
    single, several = (
        build("AdamW fused", chosen, ema=ema, scheduler=lambdas, max_grad_norm=0.5)
        for _ in range(2)
    )
    steps = batches_for(60)
    if plan != "exact":
        for place in (21, 22, 40):
            steps[place][0].fill_(torch.nan)
    assert_same(single, several, steps)
    assert counters(several)["unrolled steps"] == 6 * K
    assert several.num_skipped == (3 if plan != "exact" else 0)


def test_what_the_host_copies_in_each_step_stands_in_each_step_of_a_graph():
    def with_constant(model, batch):
        loss, metrics = loss_fn(model, batch)
        return loss * torch.tensor(0.5, device=loss.device), metrics

    plan = Plan(cuda_graph=CUDAGraphOptions(host_constants=True))
    single, several = (build("AdamW fused", plan, loss=with_constant) for _ in range(2))
    assert_same(single, several, batches_for(60))
    assert counters(several)["unrolled steps"] > 0


def test_the_host_waits_for_nothing():
    several = build("AdamW fused", GRAPH, scheduler=lambdas, max_grad_norm=0.5)
    steps = batches_for(64)
    run_together(several, steps[: 4 * K])
    with no_syncs():
        together(several, steps[4 * K :])
    assert counters(several)["unrolled replays"] == 7


def test_a_loader_feeds_replays_of_several_steps_and_goes_on_where_it_was():
    host = make_batches(44, size=12)
    single, several = (build("AdamW fused", GRAPH, scheduler=lambdas) for _ in range(2))
    torch.manual_seed(1)
    losses = [single.step(batch) for batch in single.prefetch(host, reuse=True)]
    torch.manual_seed(1)
    loader = several.prefetch(host, unroll=K, reuse=True)
    ours = []
    for group in loader:
        ours += several.steps(group)
        if len(ours) == 3 * K:
            break
    saved = copied(several.state_dict()), loader.state_dict()
    again = build("AdamW fused", GRAPH, scheduler=lambdas)
    again.load_state_dict(saved[0])
    rest = again.prefetch(host, unroll=K, reuse=True)
    rest.load_state_dict(saved[1])
    for group in rest:
        ours += again.steps(group)
    assert not differences(losses, ours)
    assert not differences(state(single), state(again))
    assert counters(several)["unrolled steps"] == 2 * K


def test_what_happens_between_groups_is_seen():
    single, several = (build("AdamW fused", GRAPH) for _ in range(2))
    batches = batches_for(16 * K)

    def events(trainer):
        group = trainer.optimizer.param_groups[0]
        yield
        group["lr"] = 0.5
        yield
        trainer.model.eval()
        yield
        trainer.model.train()
        yield

    ends = []
    for trainer, way in ((single, run), (several, run_together)):
        happening = events(trainer)
        losses = []
        for place in range(4):
            next(happening)
            losses.append(way(trainer, batches[4 * K * place : 4 * K * (place + 1)]))
        ends.append((losses, state(trainer)))
    assert not differences(*ends)
    assert counters(several)["unrolled steps"] == (3 + 4 + 3 + 4) * K


class Wide(nn.Module):
    """Its activations are what there is in memory."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(12))
        )

    def forward(self, x):
        return self.layers(x)


def test_steps_of_a_graph_take_each_others_memory():
    def loss(model, x):
        return model(x).square().mean()

    def trained(trainer, steps):
        torch.cuda.synchronize()
        together(trainer, steps)
        return counters(trainer)["pool_bytes"]

    model = Wide().cuda()
    plan = Plan(cuda_graph=CUDAGraphOptions(check=False))
    trainer = Trainer(model, optim.AdamW(model.parameters(), fused=True), loss, plan)
    steps = [torch.randn(2**16, 64, device="cuda") for _ in range(3 * K)]
    alone = trained(trainer, steps[:K])
    assert counters(trainer)["graphs"] == 1
    both = trained(trainer, steps[K:])
    assert counters(trainer)["unrolled replays"] == 2
    assert both < 1.5 * alone  # and not K times


def test_a_step_costs_the_host_less_in_a_replay_of_several():
    single, several = (build("AdamW fused", GRAPH, scheduler=exponential) for _ in range(2))
    batches = batches_for(4 * K)

    def one_by_one(steps):
        return [single.step(step) for step in steps]

    times = {"single": [], "several": []}
    for turn in range(14):
        for name, way in (("single", one_by_one), ("several", partial(together, several))):
            torch.cuda.synchronize()
            start = time.perf_counter()
            way(batches)
            times[name].append(time.perf_counter() - start)
            if turn < 2:
                times[name].clear()  # warm-up and captures
    torch.cuda.synchronize()
    assert statistics.median(times["several"]) < 0.8 * statistics.median(times["single"])


def exponential(optimizer):
    return schedulers.ExponentialLR(optimizer, 0.9999)


def test_a_step_that_several_cannot_hold_runs_one_by_one():
    """AdamW as torch builds it updates behind the graph under "exact"."""
    single, several = (build("AdamW", GRAPH, scheduler=lambdas) for _ in range(2))
    assert_same(single, several, batches_for(40))
    assert counters(several)["unrolled replays"] == 0
    (decision,) = [d for d in several.report().stepped_aside if d.lever == "unroll"]
    assert "the update is not in the graph" in decision.detail


def test_batches_of_several_shapes_are_exact():
    single, several = (build("AdamW fused", GRAPH, max_grad_norm=0.5) for _ in range(2))
    full, small = batches_for(48), batches_for(16, size=5)
    steps = [*full[:24], *full[24:29], *small[:3], *full[29:45], *small[3:11], *small[11:]]
    assert_same(single, several, steps)
    assert counters(several)["unrolled replays"] >= 4


def test_a_loss_in_a_group_stays_what_it_was():
    def loss(model, batch):
        return F.mse_loss(model(batch[0]), batch[0][:, :4])

    several = build("SGD", GRAPH, loss=loss)
    batches = batches_for(4 * K)
    together(several, batches[: 2 * K])
    kept = several.steps(StepBatches(batches[2 * K : 3 * K]))
    before = kept.clone()
    together(several, batches[3 * K :])
    assert torch.equal(kept, before)
