"""Tokens reach their experts and come back, whatever the routing, in room that is there."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from torchfast.memory import ExpertBuffers, Recompute

WIDTH = 4


def reference(tokens, experts, weights, modules, capacity):
    """The mixture as a loop over tokens."""
    used, outputs, dropped = [0] * len(modules), [], 0
    for token, choices, shares in zip(tokens, experts.tolist(), weights, strict=True):
        total = torch.zeros(WIDTH)
        for expert, share in zip(choices, shares, strict=True):
            if used[expert] == capacity:
                dropped += 1
                continue
            used[expert] += 1
            total = total + share * modules[expert](token)
        outputs.append(total)
    return torch.stack(outputs), dropped


@settings(max_examples=25)
@given(st.integers(0, 2**20), st.integers(1, 9), st.integers(1, 3), st.integers(1, 6))
def test_a_mixture_is_the_loop_over_its_tokens(seed, num_tokens, choices, capacity):
    torch.manual_seed(seed)
    modules = [nn.Linear(WIDTH, WIDTH).double() for _ in range(3)]
    experts = torch.stack([torch.randperm(3)[:choices] for _ in range(num_tokens)])
    weights = torch.rand(num_tokens, choices, dtype=torch.float64)
    buffers = ExpertBuffers(3, capacity, WIDTH, dtype=torch.float64)
    found, grads, dropped = [], [], []
    for fast in (False, True):
        torch.manual_seed(seed)
        tokens = torch.randn(num_tokens, WIDTH, dtype=torch.float64, requires_grad=True)
        shares = weights.clone().requires_grad_()
        if fast:
            rows, places = buffers.dispatch(tokens, experts)
            made = torch.stack([m(r) for m, r in zip(modules, rows, strict=True)])
            output = buffers.combine(made, places, shares)
        else:
            output, lost = reference(tokens, experts, shares, modules, capacity)
            dropped.append(lost)
        found.append(output)
        parameters = [p for m in modules for p in m.parameters()]
        inputs = [tokens, shares, *parameters]
        grads.append(
            torch.autograd.grad(
                output.sin().sum(), inputs, allow_unused=True, materialize_grads=True
            )
        )
    assert int(buffers.num_dropped) == dropped[0]
    torch.testing.assert_close(*found)
    torch.testing.assert_close(*grads)


def test_the_memory_is_the_same_in_each_step():
    buffers = ExpertBuffers(2, 4, WIDTH)
    addresses = set()
    for seed in range(3):
        torch.manual_seed(seed)
        tokens = torch.randn(6, WIDTH, requires_grad=True)
        rows, _ = buffers.dispatch(tokens, torch.randint(0, 2, (6, 1)))
        (rows * rows).sum().backward()
        addresses.add(rows.data_ptr())
    assert len(addresses) == 1
    assert buffers.num_bytes == 9 * WIDTH * 4


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts, self.room = nn.Linear(WIDTH, WIDTH), ExpertBuffers(1, 2, WIDTH)

    def forward(self, tokens):
        rows, places = self.room.dispatch(tokens, torch.zeros(len(tokens), 1, dtype=torch.int64))
        return self.room.combine(self.experts(rows).tanh(), places, torch.ones(len(tokens), 1))


def test_recompute_counts_no_token_twice():
    found = []
    for recompute in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(Mixture(), Mixture())
        with Recompute(model) if recompute else nullcontext():
            model(torch.randn(5, WIDTH)).square().sum().backward()
        assert [int(block.room.num_dropped) for block in model] == [3, 3]
        found.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *found))


def test_a_buffer_that_is_used_again_too_early_is_an_error():
    buffers = ExpertBuffers(2, 4, WIDTH)
    experts = torch.zeros(3, 1, dtype=torch.int64)
    weight = torch.ones(WIDTH, requires_grad=True)
    rows, _ = buffers.dispatch(torch.randn(3, WIDTH), experts)
    loss = (rows * weight).sum()
    buffers.dispatch(torch.randn(3, WIDTH), experts)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_stands_in_anothers_row_does_no_harm():
    buffers = ExpertBuffers(1, 1, WIDTH)
    tokens = torch.randn(2, WIDTH)
    rows, places = buffers.dispatch(tokens, torch.zeros(2, 1, dtype=torch.int64))
    output = buffers.combine(torch.full_like(rows, torch.inf), places, torch.ones(2, 1))
    assert torch.equal(output[1], torch.zeros(WIDTH))


def test_arguments():
    buffers = ExpertBuffers(2, 4, WIDTH)
    good, experts = torch.ones(3, WIDTH), torch.zeros(3, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"tokens must be \(tokens, width=4\)"):
        buffers.dispatch(torch.ones(3, 5), experts)
    with pytest.raises(ValueError, match=r"of torch\.float64"):
        buffers.dispatch(good.double(), experts)
    with pytest.raises(ValueError, match=r"experts must be \(tokens=3, choices\)"):
        buffers.dispatch(good, experts.flatten())
    _, places = buffers.dispatch(good, experts)
    with pytest.raises(ValueError, match="outputs must be"):
        buffers.combine(torch.ones(4, 2, WIDTH), places, torch.ones(3, 1))
    with pytest.raises(ValueError, match=r"weights of shape \(3, 1\), got Places and \(3, 2\)"):
        buffers.combine(torch.ones(2, 4, WIDTH), places, torch.ones(3, 2))
    with pytest.raises(
        ValueError, match=r"combine takes \(outputs, places, weights\).* got Tensor"
    ):
        buffers.combine(torch.ones(2, 4, WIDTH), torch.ones(3, 1), places)
    _, others = ExpertBuffers(2, 3, WIDTH).dispatch(good, experts)
    with pytest.raises(ValueError, match=r"places are of a buffer of .*=\(2, 3\), and .* \(2, 4\)"):
        buffers.combine(torch.ones(2, 4, WIDTH), others, torch.ones(3, 1))
    with pytest.raises(TypeError, match="experts must be torch's Tensor, got None"):
        buffers.dispatch(good, None)
    with pytest.raises(TypeError, match=r"tokens must be torch's Tensor, got \[1\.0\]"):
        buffers.dispatch([1.0], experts)
    with pytest.raises(ValueError, match="capacity must be >= 1"):
        ExpertBuffers(2, 0, WIDTH)
    with pytest.raises(TypeError, match=r"dtype must be torch's dtype, got 'bf16' \(str\)"):
        ExpertBuffers(2, 1, WIDTH, dtype="bf16")
    with pytest.raises(ValueError, match="did you mean 'cuda'"):
        ExpertBuffers(2, 1, WIDTH, device="gpu")


def test_compiled_it_is_the_same_in_one_graph(fresh_dynamo):
    def trained(compiled):
        torch.manual_seed(0)
        modules, router = (
            nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)),
            nn.Linear(WIDTH, 3),
        )
        buffers = ExpertBuffers(3, 4, WIDTH)

        def loss_of(tokens):
            shares, experts = router(tokens).softmax(-1).topk(2)
            rows, places = buffers.dispatch(tokens, experts)
            made = torch.stack([m(r) for m, r in zip(modules, rows.unbind(), strict=True)])
            return buffers.combine(made, places, shares).square().mean()

        if compiled:
            loss_of = torch.compile(loss_of, backend="aot_eager", fullgraph=True)
        losses = []
        for seed in range(3):  # as many tokens, and each time another routing
            tokens = torch.randn(9, WIDTH, generator=torch.Generator().manual_seed(seed))
            losses.append(loss_of(tokens))
            losses[-1].backward()
        gradients = [p.grad for p in (*modules.parameters(), *router.parameters())]
        assert buffers.num_dropped > 0
        return [*losses, *gradients, buffers.num_dropped]

    for found, expected in zip(trained(compiled=True), trained(compiled=False), strict=True):
        torch.testing.assert_close(found, expected)
