"""fit with several steps in a replay, on a real device: told, saved and resumed as without."""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader

from gpu.graph_jobs import GRAPH, build, counters, lambdas, state
from gpu.syncs import no_syncs
from models import DropoutNet, make_batches
from torchfast import CheckpointManager, EMAOptions, Plan, PrecisionOptions
from torchfast._core.compare import differences

pytestmark = pytest.mark.usefixtures("deterministic")

K = 8
HOST = make_batches(100, size=12)
TIMED = ("seconds", "step_ms", "phases", "items_per_s", "eta_s", "memory", "memory_bytes")


def shuffled():
    """Return a loader whose order depends on the epoch."""
    return DataLoader(HOST, batch_size=None, shuffle=True)


def fitted(trainer, unroll, loader=None, **options):
    """Run fit; return all steps that it told of, and its records but for what depends on time."""
    steps = {}

    def note(event):
        if event.kind == "step":
            steps[event.num_steps] = event.loss.clone(), dict(event.metrics)

    torch.manual_seed(1)
    given = {"epochs": 2, "log_every": 5, "progress": "off", **options}
    given["callbacks"] = [note, *given.get("callbacks", ())]
    result = trainer.fit(loader or shuffled(), unroll=unroll, **given)
    records = [{k: v for k, v in r.items() if k not in TIMED} for r in result.history]
    return steps, list(map(str, records))


def summed(model):
    """Return what tells one state of a model from another; a forward would replace its buffer."""
    return {"sum": float(sum(p.detach().double().sum() for p in model.parameters()))}


PLANS = {
    "exact": GRAPH,
    "skip": GRAPH.replace(nonfinite="skip"),
    "fp16": GRAPH.replace(precision=PrecisionOptions(format="fp16", init_scale=1024.0)),
    "fast": Plan.preset("fast").replace(compile=False),
}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("plan", PLANS)
def test_all_is_told_and_trained_as_one_after_the_other(plan, accumulate):
    options = {
        "ema": EMAOptions(decay=0.9, warm_up=True),
        "scheduler": lambdas,
        "max_grad_norm": 0.5,
        "accumulate": accumulate,
    }
    one, several = (build("AdamW fused", PLANS[plan], **options) for _ in range(2))
    told = [
        fitted(trainer, unroll, evaluate=summed, evaluate_every=23)
        for trainer, unroll in ((one, None), (several, K))
    ]
    assert not differences(told[0][0], told[1][0])
    assert told[0][1] == told[1][1]
    assert not differences(state(one), state(several))
    assert counters(several)["unrolled replays"] >= 100 * 2 // accumulate // (2 * K)


def test_a_run_goes_on_from_a_checkpoint_between_groups(tmp_path):
    def trainer():
        return build("AdamW fused", GRAPH, scheduler=lambdas)

    whole = trainer()
    steps, _ = fitted(whole, None, epochs=None, steps=150)
    with CheckpointManager(tmp_path, keep_last=99) as manager:
        early, _ = fitted(
            trainer(), K, epochs=None, steps=90, checkpoint=manager, checkpoint_every=29
        )
        assert manager.steps() == [29, 58, 87, 90]
    late = trainer()
    rest, _ = fitted(late, K, epochs=None, steps=150, checkpoint=tmp_path)
    assert list(rest) == list(range(91, 151))
    assert not differences(steps, early | rest)
    assert not differences(state(whole), state(late))
    assert counters(late)["unrolled replays"] >= 5


def test_a_signal_or_a_callback_ends_it_behind_the_group():
    several = build("AdamW fused", GRAPH)

    def stop(event):
        if event.kind == "step" and event.num_steps == 30:
            event.stop()

    steps, _ = fitted(several, K, callbacks=[stop])
    assert 30 <= several.num_steps < 30 + K
    assert list(steps) == list(range(1, several.num_steps + 1))


def test_the_host_waits_for_nothing_in_a_steady_group():
    several = build("AdamW fused", GRAPH, scheduler=lambdas, max_grad_norm=0.5)
    guards = []

    def guard(event):
        if event.kind != "step":
            return
        if event.num_steps == 60:
            guards.append(no_syncs())
            guards[0].__enter__()
        elif event.num_steps == 90:
            guards.pop().__exit__(None, None, None)

    with several.prefetch(HOST, unroll=K, reuse=True) as loader:
        fitted(several, None, loader, epochs=1, log_every=100, callbacks=[guard])
    assert not guards
    assert counters(several)["unrolled replays"] >= 10


def test_times_are_those_of_a_step():
    """Of the same kernels: as much a step, however many are in a replay."""
    replays, steps = ({None: [], K: []} for _ in range(2))
    for unroll in (None, K) * 3:  # by turns, as others may be at work on this GPU and host
        trainer = build("AdamW fused", GRAPH)
        result = trainer.fit(HOST * 4, steps=400, log_every=100, unroll=unroll, progress="off")
        last = result.history[-1]
        assert last["phases"]["replay"]["source"] == "measured"
        replays[unroll].append(last["phases"]["replay"]["p50_ms"])
        steps[unroll].append(last["step_ms"]["p50"])
        by_median = 12e3 / last["step_ms"]["p50"]
        assert 0.2 * by_median < last["items_per_s"] < 2 * by_median
    assert min(replays[K]) < 1.5 * min(replays[None])  # and not K times
    assert min(steps[K]) < min(steps[None])


def test_a_step_of_fit_takes_less_where_the_host_sets_the_pace():
    seconds = {None: [], K: []}
    with ExitStack() as stack:
        calls = {}
        for unroll in seconds:
            trainer = build("SGD", GRAPH, net=DropoutNet, scheduler=lambdas)
            loader = stack.enter_context(trainer.prefetch(HOST, unroll=unroll, reuse=True))
            calls[unroll] = partial(trainer.fit, loader, steps=800, log_every=800, progress="off")
        for turn in range(7):
            for unroll, fit in calls.items():
                result = fit()
                if turn >= 2:  # warm-up and captures before
                    seconds[unroll].append(result.seconds)
    assert statistics.median(seconds[K]) < 0.8 * statistics.median(seconds[None])
