"""Models, batches and trainers whose compiled steps are captured on a device."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import optim

from benchmarks.workloads.gpt import GPT, GPTSize
from benchmarks.workloads.tokens import next_token_loss, token_batches
from torchfast import Plan, Trainer

FAST = Plan.preset("fast")
STEPS = 14
WARM_UP = 3  # steps before the first capture
SIZE = GPTSize(4, 64, 4, vocabulary=256, batch=8, context=64, lr=0.05)
# AdamW's first updates divide by moments that are still noise: rounding decides their signs.
sgd = partial(optim.SGD, lr=0.05, momentum=0.9)


@contextmanager
def nothing_compiled():
    """Nothing compiled before it counts, and nothing of it is left."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def gpt():
    return GPT(SIZE)


def text(count, batch=SIZE.batch):
    return token_batches(
        vocabulary=SIZE.vocabulary, batch=batch, context=SIZE.context, num_batches=count
    )


def image_loss(model, batch):
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets)


def trained_on_gpu(plan=FAST, make=gpt, loss_fn=next_token_loss, **options):
    torch.manual_seed(0)
    model = make().cuda()
    return Trainer(model, sgd(model.parameters()), loss_fn, plan, **options)


def assert_captured(report, steps, *, breaks=0):
    """All steps but the first ones were replays, of kernels that were compiled once.

    With breaks=None there may be graph breaks, as in other people's models.
    """
    found = report.counters
    assert found["compile_graphs"] > 0
    assert found.get("compile_recompiles", 0) == 0
    if breaks is None:
        breaks = found.get("compile_graph_breaks", 0)
    assert found.get("compile_graph_breaks", 0) == breaks
    graphs = (found["graphs"], found["replays"], found["eager steps"])
    assert graphs == (1, steps - WARM_UP, WARM_UP)
    aside = [d for d in report.stepped_aside if d.lever in ("compile", "cuda_graph")]
    assert (aside == []) is (breaks == 0), aside
