"""Tensors that nobody named, written to in ways of which no version tells."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn, optim

from tape import counts
from torchfast import CUDAGraphStep
from torchfast.graphs.named_state import NamedState

pytestmark = pytest.mark.usefixtures("tape")


def averaging(writes):
    """A step with averages of the weights in its closure, that nobody names, beside the plain one.

    Return whether they ever differ.
    """

    def make():
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
        averages = [p.detach().clone() for p in model.parameters()]

        def step(x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                writes(averages, list(model.parameters()))
            return loss.detach()

        return step, averages, [model, optimizer]

    plain, expected, _ = make()
    own, averages, state = make()
    captured = CUDAGraphStep(own, state=state)
    for x in torch.randn(12, 8, 4):
        plain(x)
        captured(x)
    assert counts(captured) == (1, 9, 3, 1)
    return not all(map(torch.equal, averages, expected))


def through_data(averages, parameters):
    for average, parameter in zip(averages, parameters, strict=True):
        average.data.mul_(0.9).add_(parameter.data, alpha=0.1)


def by_foreach(averages, parameters):
    # As on CUDA, where no version tells of it.
    with torch.autograd._unsafe_preserve_version_counter(tuple(averages)):
        torch._foreach_lerp_(averages, parameters, 0.1)


@pytest.mark.parametrize("writes", [through_data, by_foreach])
def test_tensors_in_a_closure_that_are_written_to_unseen_are_right(writes):
    assert not averaging(writes)


@pytest.mark.parametrize("writes", [through_data, by_foreach])
def test_without_a_look_at_their_bits_the_check_would_move_them(writes, monkeypatch):
    monkeypatch.setattr(NamedState, "noting_writes", lambda *_: nullcontext())
    assert averaging(writes)


def test_data_of_any_kind_in_a_closure_is_left_alone():
    data = [
        torch.empty(0),
        torch.randn(4, 2).T,
        torch.randint(9, (3,), dtype=torch.uint8),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(2, 1).expand(2, 5),
        torch.eye(2).to_sparse(),
    ]
    model = nn.Linear(2, 2)
    step = CUDAGraphStep(lambda x: model(x + data[1].sum() + len(data)), state=[model])
    for _ in range(6):
        step(torch.ones(3, 2))
    assert counts(step) == (1, 3, 3, 1)
