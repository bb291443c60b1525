"""A compiled update on a real device: in the step's graph, close to eager, and undone."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import optim
from torch.optim import lr_scheduler as schedulers

from benchmarks.workloads.gpt import GPT, GPTSize
from benchmarks.workloads.tokens import next_token_loss, token_batches
from gpu.graph_jobs import on_gpu
from gpu.syncs import no_syncs
from torchfast import CompileOptions, Plan, Trainer
from torchfast._core.compare import differences
from torchfast.testing import Tolerance, assert_parity

STEPS = 14
WARM_UP = 3
SIZE = GPTSize(4, 64, 4, vocabulary=256, batch=8, context=64, lr=0.05)
CLOSE = Tolerance(loss=0.02, update=0.25)
# Of all that is compiled of the model only its last norm: this is about the update.
PLAN = Plan(compile=CompileOptions(regions=("norm",), update=True), cuda_graph=True)
# With moments that are still noise rounding decides the signs of updates; a large eps keeps them
# small.
OPTIMIZERS = {
    "AdamW": partial(optim.AdamW, lr=1e-3, eps=1e-3),
    "NAdam": partial(optim.NAdam, lr=1e-3, eps=1e-3),
    "RMSprop": partial(optim.RMSprop, lr=1e-3, eps=1e-3, momentum=0.9),
}


@pytest.fixture(autouse=True)
def _nothing_compiled_is_left():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def gpt():
    return GPT(SIZE)


def text(count):
    return token_batches(
        vocabulary=SIZE.vocabulary, batch=SIZE.batch, context=SIZE.context, num_batches=count
    )


def trained(make, plan=PLAN, steps=0, **options):
    torch.manual_seed(0)
    model = gpt().cuda()
    trainer = Trainer(model, make(model.parameters()), next_token_loss, plan, **options)
    for batch in on_gpu(text(steps)):
        trainer.step(batch)
    return trainer


def told(report):
    found = [d for d in report.decisions if d.lever == "compile"]
    (decision,) = [d for d in found if "the update of" in d.detail]
    return decision


@pytest.mark.parametrize("graphed", [True, False], ids=["in the graph", "without a graph"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_compiled_update_is_close_to_eager(name, graphed):
    result = assert_parity(
        gpt,
        OPTIMIZERS[name],
        next_token_loss,
        text(2 * STEPS),
        PLAN.replace(cuda_graph=graphed),
        accumulate=2,
        max_grad_norm=1.0,
        lr_scheduler=partial(schedulers.CosineAnnealingLR, T_max=STEPS),
        device="cuda",
        tolerance=CLOSE,
    )
    found = result.report.counters
    assert found["update_graphs"] == 1
    assert told(result.report).outcome == "applied"
    if graphed:
        steps = (found["graphs"], found["replays"], found["eager steps"])
        assert steps == (1, STEPS - WARM_UP, WARM_UP)
        assert "can be in the graph, as capturable" in str(result.report)


def test_a_steady_step_makes_the_host_wait_for_nothing():
    for graphed in (True, False):
        trainer = trained(OPTIMIZERS["NAdam"], PLAN.replace(cuda_graph=graphed), steps=8)
        batches = on_gpu(text(4))
        with no_syncs():
            for batch in batches:
                trainer.step(batch)
        trainer.close()


def test_a_skipped_update_leaves_every_bit():
    trainer = trained(OPTIMIZERS["AdamW"], PLAN.replace(nonfinite="skip"), steps=6)
    before = copy.deepcopy([trainer.model.state_dict(), trainer.optimizer.state_dict()])
    with torch.no_grad():
        held = next(trainer.model.parameters()).clone()
        next(trainer.model.parameters()).fill_(torch.nan)
    trainer.step(on_gpu(text(1))[0])
    with torch.no_grad():
        next(trainer.model.parameters()).copy_(held)
    assert trainer.num_skipped == 1
    assert not differences(before, [trainer.model.state_dict(), trainer.optimizer.state_dict()])


def test_files_and_what_close_leaves_are_in_the_form_as_given():
    trainer = trained(OPTIMIZERS["AdamW"], steps=6)
    plain = trained(OPTIMIZERS["AdamW"], "eager", steps=6)
    kinds = [
        [{key: (type(v), getattr(v, "device", None)) for key, v in entry.items()} for entry in s]
        for s in (t.optimizer.state_dict()["state"].values() for t in (trainer, plain))
    ]
    assert kinds[0] == kinds[1]
    assert trainer.optimizer.state_dict()["param_groups"][0]["capturable"] is False
    trainer.close()
    assert trainer.optimizer.param_groups[0]["capturable"] is False
    trainer.optimizer.step()


@pytest.mark.parametrize("name", ["NAdam", "RMSprop"])
def test_measured_before_the_capture_as_replays(name):
    options = CompileOptions(regions=("norm",), update="auto", budget_s=5.0)
    trainer = trained(OPTIMIZERS[name], PLAN.replace(compile=options), steps=8)
    detail = told(trainer.report()).detail
    assert "of the time as it is" in detail
    assert detail.endswith(" in a graph")
    assert trainer.report().counters["replays"] == 8 - WARM_UP


def test_sgd_takes_its_fused_form_in_the_graph_and_stays_so():
    trainer = trained(partial(optim.SGD, lr=0.05, momentum=0.9), steps=6)
    assert told(trainer.report()).outcome == "left alone"
    assert "it is fused" in told(trainer.report()).detail


def test_where_measuring_runs_out_of_memory_the_update_runs_as_it_is(monkeypatch):
    def no_room(*_):
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")

    monkeypatch.setattr("torchfast.update_trial._objection", no_room)
    options = CompileOptions(regions=("norm",), update="auto", budget_s=5.0)
    trainer = trained(OPTIMIZERS["NAdam"], PLAN.replace(compile=options), steps=3)
    assert told(trainer.report()).outcome == "left alone"
    assert "memory ran out" in told(trainer.report()).detail
