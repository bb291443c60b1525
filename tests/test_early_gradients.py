"""Gradients are copied in the backward, and once more where they changed behind it."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from offloaded_updates import (
    MAKERS,
    backward,
    equal,
    make_offloaded,
    plain,
    read,
)
from offloading import host_apart
from simulated_copies import PromptCopies
from torchfast.memory import OffloadedOptimizer, optimizer_offload
from torchfast.memory.bit_hash import BitHash


@pytest.fixture
def device(monkeypatch):
    with host_apart(monkeypatch) as device:
        yield device


def test_gradients_that_are_copied_in_the_backward(device):
    expected, _ = plain(MAKERS["adamw"])
    with device:
        parameters, optimizer = make_offloaded(device, overlap=True)
        for seed in range(1, 5):
            backward(device, parameters, seed)
            assert all(parameter in optimizer._update.early for parameter in parameters)
            device.main.sleep(0.02)
            optimizer.step()
            optimizer.zero_grad()
    assert equal(read(device, parameters), expected)


def test_gradients_that_change_behind_the_backward_are_copied_again(device):
    with device:
        found = []
        for early in (False, True):
            parameters, optimizer = make_offloaded(device, overlap=early)
            for seed in range(1, 5):
                backward(device, parameters, seed)  # two micro-batches
                backward(device, parameters, seed + 1)
                for parameter in parameters[1:]:
                    parameter.grad.mul_(0.5)
                parameters[0].grad = parameters[0].grad * 0.25  # another tensor
                optimizer.step()
                optimizer.zero_grad()
            found.append(read(device, parameters))
            optimizer.close()
    assert equal(*found)


@pytest.mark.parametrize("who", ["a loss scale", "data", "nobody"])
def test_changes_that_no_count_of_writes_tells_are_noticed(who, monkeypatch):
    monkeypatch.setattr(optimizer_offload, "copy_streams_for", lambda _: PromptCopies())
    torch.manual_seed(0)
    nets = [nn.Linear(6, 3) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    make = partial(torch.optim.SGD, lr=0.1)
    optimizers = [
        make(nets[0].parameters()),
        OffloadedOptimizer(nets[1].parameters(), make, overlap=True),
    ]
    copied = []
    monkeypatch.setattr(
        torch.Tensor,
        "copy_",
        _counting(torch.Tensor.copy_, optimizers[1]._update.gradients, copied),
    )
    for x in torch.randn(3, 4, 6):
        for net, optimizer in zip(nets, optimizers, strict=True):
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=who == "a loss scale")
            scaler.scale(net(x).square().mean()).backward()
            if who == "data":
                for parameter in net.parameters():
                    parameter.grad.data.mul_(0.5)
            scaler.step(optimizer)
            optimizer.zero_grad()
    assert equal([*nets[0].parameters()], [*nets[1].parameters()])
    # Each gradient in the backward, and once more if it has changed: then not in the next backward.
    assert len(copied) == 2 * (3 if who == "nobody" else 2 + 1 + 2)


def test_a_write_beside_an_early_copy_is_not_in_its_hash_alone(monkeypatch):
    monkeypatch.setattr(optimizer_offload, "copy_streams_for", lambda _: PromptCopies())
    works, writes = BitHash.__call__, [0.5]

    def written(self, *gradients):
        if writes:  # by the caller's stream, at this very moment
            gradients[0].mul_(writes.pop())
        return works(self, *gradients)

    monkeypatch.setattr(BitHash, "__call__", written)
    weight = nn.Parameter(torch.ones(4))
    optimizer = OffloadedOptimizer([weight], partial(torch.optim.SGD, lr=1.0), overlap=True)
    (weight * 2).sum().backward()
    optimizer.step()
    assert torch.equal(weight.detach(), torch.zeros(4))


def _counting(copy, gradients, copied):
    def counted(self, source, *args, **kwargs):
        if any(self is known for known in gradients.values()):
            copied.append(self)
        return copy(self, source, *args, **kwargs)

    return counted


@pytest.mark.parametrize("how", ["data", "another tensor"])
def test_memory_that_is_let_go_of_while_it_is_copied(device, how, monkeypatch):
    """Beneath a gradient that is the same object, and has the same bits elsewhere."""
    works, streams = BitHash.__call__, []

    def slow(self, *gradients):
        found = works(self, *gradients)
        for stream in streams:
            stream.sleep(0.03)  # between the hash and the copy
        return found

    monkeypatch.setattr(BitHash, "__call__", slow)
    with device:
        parameters, optimizer = make_offloaded(device, overlap=True)
        streams.append(optimizer._update.streams[0])
        for seed in range(1, 4):
            backward(device, parameters, seed)
            device.main.synchronize()  # the gradients are there
            written = []
            for parameter in parameters:
                same = parameter.grad.detach() * 1.0
                if how == "data":
                    parameter.grad.data = same
                else:
                    parameter.grad = same
                del same
                written.append(parameter.detach() * 0.0 + 777.0)  # where the first was
            optimizer.step()
            optimizer.zero_grad()
        found = read(device, parameters)
    assert equal(found, plain(MAKERS["adamw"], steps=3)[0])


def test_a_gradient_that_is_dropped_while_it_is_copied(device):
    expected, _ = plain(MAKERS["adamw"])
    with device:
        parameters, optimizer = make_offloaded(device, overlap=True)
        for seed in range(1, 5):
            optimizer._update.streams[0].sleep(0.02)
            backward(device, parameters, seed + 10)
            optimizer.zero_grad()
            backward(device, parameters, seed)
            optimizer.step()
            optimizer.zero_grad()
    assert equal(read(device, parameters), expected)
