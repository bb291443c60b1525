"""Blocks that read what they write, compiled on a real device: as eager, and in a graph."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn, optim

from gpu.compile_jobs import nothing_compiled
from gpu.requirements import requires
from torchfast import CompileOptions, CUDAGraphOptions, Plan, Trainer
from writing_blocks import Block, Codebook, Halved, Hidden, Shrunk

pytestmark = [requires(gpus=1), pytest.mark.usefixtures("deterministic")]


@pytest.fixture(autouse=True)
def _nothing_compiled_is_left():
    with nothing_compiled():
        yield


def trained(make, plan, steps):
    """Return the losses, and then all of the state."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), make(), make()).double().cuda()
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(64, 8, dtype=torch.float64, generator=generator).cuda()
    sgd = partial(optim.SGD, lr=0.1)
    with Trainer(model, sgd, lambda m, x: m(x).square().mean(), plan) as own:
        losses = [own.step(rows).clone() for _ in range(steps)]
        replays = own.report().counters.get("replays", 0)
        return [*losses, *(t.clone() for t in own.state_dict()["model"].values())], replays


@pytest.mark.parametrize("recompute", [False, "blocks"])
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("make", [Block, Hidden, Codebook, Halved, Shrunk])
def test_compiled_they_train_as_they_do_eagerly(make, graph, recompute):
    steps = 8
    cuda_graph = CUDAGraphOptions(on_failure="raise") if graph else False
    plan = Plan(
        compile=CompileOptions(regions="blocks", on_failure="raise"),
        cuda_graph=cuda_graph,
        recompute=recompute,
    )
    expected, _ = trained(make, Plan(), steps)
    found, replays = trained(make, plan, steps)
    assert (replays > 0) == graph
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-10)
