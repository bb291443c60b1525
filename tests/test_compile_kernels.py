"""A kernel of one's own, registered with torch, is one node of what is compiled."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn

from models import make_batches, mean_loss
from torchfast import CompiledModule, CompileError, CompileOptions, Plan
from torchfast.testing import assert_parity

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@torch.library.custom_op("torchfast_tests::cpu_squared_relu", mutates_args=())
def squared_relu(x: torch.Tensor) -> torch.Tensor:
    # By numpy, into which no compiler sees.
    return torch.from_numpy(x.detach().numpy().clip(min=0) ** 2)


@squared_relu.register_fake
def _(x):
    return torch.empty_like(x)


def setup_context(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])


def backward(ctx, gradient):
    return gradient * 2 * ctx.saved_tensors[0].clamp(min=0)


squared_relu.register_autograd(backward, setup_context=setup_context)


class Registered(nn.Module):
    def forward(self, x):
        return squared_relu(x)


class Foreign(nn.Module):
    """The same, unknown to torch, and with a print on its way: what a launcher may do."""

    def forward(self, x):
        torch._dynamo.graph_break()
        return x.relu().square()


def net(activation=Registered):
    return nn.Sequential(nn.Linear(8, 16), activation(), nn.Linear(16, 4))


def test_it_is_one_node_of_one_graph():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model = net()
    eager = copy.deepcopy(model)
    batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    with CompiledModule(model, backend=backend, fullgraph=True):
        for twin in (model, eager):
            twin(batch).sum().backward()
    (graph,) = graphs
    called = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert sum("cpu_squared_relu" in name for name in called) == 1
    assert not any("clip" in name for name in called)
    for p, q in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_what_breaks_the_graph_is_told():
    with (
        CompiledModule(model := net(Foreign), backend="eager", fullgraph=True),
        pytest.raises(CompileError),
    ):
        model(torch.ones(2, 8))


def test_a_step_trains_the_same_through_its_backward():
    result = assert_parity(
        net,
        partial(torch.optim.AdamW, lr=0.01),
        mean_loss,
        make_batches(4),
        Plan(compile=CompileOptions(backend="aot_eager", regions="whole", fullgraph=True)),
    )
    assert result.loss_error == result.update_error == 0.0
    assert result.report.counters["compile_graphs"] == 1


def test_the_registration_holds():
    torch.library.opcheck(squared_relu, (torch.randn(3, 4, requires_grad=True),))
