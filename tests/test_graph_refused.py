"""A step that no graph holds: it does what it does without a plan, and what it returns stays."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import optim

from models import DropoutNet, make_batches
from recomputed import Operations
from tape import Twins
from test_graph_recovery import reads_item
from torchfast import Plan

ADAMW = partial(optim.AdamW, lr=0.01, fused=True)


@pytest.mark.usefixtures("tape")
def test_a_step_that_no_graph_holds_does_what_it_does_without():
    """On the device; what CUDAGraphStep is given may return state, and is copied."""
    batch = make_batches(1)[0]
    runs = {}
    for name, options in {
        "without": {"plan": Plan(cuda_graph=False, optimizer="fused")},
        "refused": {"plan": Plan(cuda_graph=True, optimizer="fused")},
        "bare": {"bare": True},
    }.items():
        twins = Twins(DropoutNet, ADAMW, reads_item, clip=1.0, **options)
        for _ in range(8):
            twins.step(batch)
        with Operations() as ran:
            loss = twins.captured(batch)
        assert loss.grad_fn is None
        runs[name] = ran.counts
    assert runs["without"] == runs["refused"]
    assert runs["bare"]["clone"] == runs["without"]["clone"] + 1


def keeps_a_sum(model, batch):
    """A metric that the model goes on with, in a step that no graph holds."""
    loss = reads_item(model, batch)
    model.sum = getattr(model, "sum", torch.zeros(())).detach_()
    model.sum += loss
    return loss, {"sum": model.sum}


@pytest.mark.usefixtures("tape")
@pytest.mark.parametrize("graph", [False, True])
def test_a_metric_is_not_what_the_next_step_writes_to(graph):
    twins = Twins(DropoutNet, ADAMW, keeps_a_sum, plan=Plan(cuda_graph=graph))
    kept, then = [], []
    for batch in make_batches(8):
        twins.captured(batch)
        kept.append(twins.captured.metrics["sum"])
        then.append(float(kept[-1]))
    assert [float(metric) for metric in kept] == then
    assert len(set(then)) == 8
