"""Updates that begin in the backward, of what users have: frozen layers, other optimizers."""

from __future__ import annotations

import gc
from functools import partial

import pytest
import torch
from torch import nn

from offloaded_updates import equal
from simulated_copies import PromptCopies
from torchfast._core.errors import UnsupportedOptimizerError
from torchfast.memory import OffloadedOptimizer, optimizer_offload

SGD = partial(torch.optim.SGD, lr=0.5)


@pytest.fixture(autouse=True)
def copies(monkeypatch):
    monkeypatch.setattr(PromptCopies.Stream, "query", lambda self: False)  # it is never over
    copies = PromptCopies()
    monkeypatch.setattr(optimizer_offload, "copy_streams_for", lambda _: copies)
    return copies


def hooks(parameter):
    return len(parameter._post_accumulate_grad_hooks or ())


def trained(make, *, steps=4, change=None, **options):
    """Return what two layers become, trained plainly and with an overlapped update."""
    found = []
    for overlap in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1))
        optimizer = OffloadedOptimizer(net.parameters(), make, overlap=overlap, **options)
        for step in range(steps):
            net(torch.randn(8, 6)).square().mean().backward()
            if change is not None:
                change(step, net)
            optimizer.step()
            optimizer.zero_grad()
        found.append([p.detach().clone() for p in net.parameters()])
    return *found, optimizer


@pytest.mark.parametrize("change", [torch.Tensor.neg_, lambda g: g.copy_(g.flip(0))])
def test_what_leaves_the_sum_of_all_bits_is_noticed(change):
    found = []
    for overlap in (False, True):
        weight = nn.Parameter(torch.tensor([1.0, -2.0, 3.0, -4.0]))
        optimizer = OffloadedOptimizer([weight], SGD, overlap=overlap)
        for _ in range(4):
            weight.square().sum().backward()
            change(weight.grad)
            optimizer.step()
            optimizer.zero_grad()
        found.append([weight.detach()])
    assert equal(*found)
    assert optimizer.counters()["offload_updates_taken_back"] == 1


def test_frozen_layers_are_watched_once_they_train():
    def thaw(step, net):
        net[0].requires_grad_(step >= 1)

    make = partial(torch.optim.AdamW, lr=0.1)
    net = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 1))
    net[0].requires_grad_(False)
    optimizer = OffloadedOptimizer(net.parameters(), make, overlap=True)
    assert [hooks(p) for p in net.parameters()] == [0, 0, 1, 1]
    expected, found, _ = trained(make, change=thaw)
    assert equal(found, expected)
    net[0].requires_grad_(True)
    for _ in range(2):
        net(torch.randn(8, 6)).square().mean().backward()
        optimizer.step()
    assert [hooks(p) for p in net.parameters()] == [1, 1, 1, 1]
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer.add_param_group({"params": [frozen]})
    assert hooks(frozen) == 0


def test_a_transposed_gradient_is_noticed():
    found = []
    for overlap in (False, True):
        weight = nn.Parameter(torch.arange(9.0).view(3, 3))
        optimizer = OffloadedOptimizer([weight], SGD, overlap=overlap)
        for _ in range(3):
            (weight * torch.arange(9.0).view(3, 3)).sum().backward()
            weight.grad.t_()
            optimizer.step()
            optimizer.zero_grad()
        found.append([weight.detach()])
    assert equal(*found)


def test_nothing_is_watched_behind_close():
    net = nn.Linear(3, 2)
    optimizer = OffloadedOptimizer(net.parameters(), SGD, overlap=True)
    optimizer.close()
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert [hooks(p) for p in net.parameters()] == [0, 0]


def test_a_capture_waits_for_no_copy(copies):
    net, waits = nn.Linear(3, 2), []
    optimizer = OffloadedOptimizer(net.parameters(), SGD, overlap=True)
    net(torch.ones(1, 3)).sum().backward()
    copies.main.wait_event, copies.capturing = waits.append, True
    optimizer.zero_grad()
    assert waits == []
    assert not any(p in optimizer._update.early for p in net.parameters())


def test_conjugated_gradients():
    found = []
    for overlap in (False, True):
        weight = nn.Parameter(torch.tensor([1 + 2j, -3j]))
        optimizer = OffloadedOptimizer([weight], SGD, overlap=overlap)
        for _ in range(3):
            (weight.conj() * torch.tensor([2j, 1 + 1j])).sum().abs().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([weight.detach()])
    assert equal(*found)


@pytest.mark.parametrize("name", ["Adafactor", "Muon", "RMSprop", "RAdam", "Adamax", "ASGD"])
def test_all_of_torchs_optimizers_begin_early(name):
    make = partial(getattr(torch.optim, name), lr=0.01)

    def changed(step, net):
        if step == 2:
            for parameter in net.parameters():
                parameter.grad.mul_(0.5)

    found = []
    for overlap in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 4, bias=False), nn.Linear(4, 1, bias=False))
        optimizer = OffloadedOptimizer(net.parameters(), make, overlap=overlap, bucket_bytes=1)
        for step in range(5):
            net(torch.randn(8, 6)).square().mean().backward()
            changed(step, net)
            optimizer.step()
            optimizer.zero_grad()
        found.append([p.detach().clone() for p in net.parameters()])
    assert equal(*found)
    assert tuple(optimizer.counters().values()) == (3, 1)  # 1, 2; 3 pauses; 4


def test_an_optimizer_that_is_dropped_leaves_no_hook():
    net = nn.Linear(3, 2)
    optimizer = OffloadedOptimizer(net.parameters(), SGD, overlap=True)
    net(torch.ones(1, 3)).sum().backward()
    assert [hooks(p) for p in net.parameters()] == [1, 1]
    del optimizer
    gc.collect()
    assert [hooks(p) for p in net.parameters()] == [0, 0]


def test_gradients_that_are_thrown_away_are_let_go(copies, monkeypatch):
    net, waits = nn.Linear(3, 2), []
    copies.main.wait_event = waits.append
    optimizer = OffloadedOptimizer(net.parameters(), SGD, overlap=True)
    for is_thrown_away in (False, True, False, False):
        net(torch.ones(1, 3)).sum().backward()
        assert all(p in optimizer._update.early for p in net.parameters())
        if not is_thrown_away:
            optimizer.step()
        waits.clear()
        optimizer.zero_grad()
        assert len(waits) == is_thrown_away  # for the copies, before the memory is free
        assert not any(p in optimizer._update.early for p in net.parameters())
    assert tuple(optimizer.counters().values()) == (2, 0)


def test_no_memory_to_take_back_begins_nothing():
    expected, found, optimizer = trained(SGD, max_undo_bytes=0)  # which has no state to keep
    assert equal(found, expected)
    assert tuple(optimizer.counters().values()) == (0, 0)
    assert "no update began in the backward so far" in optimizer.decision.detail


def test_without_overlap_nothing_is_counted():
    optimizer = OffloadedOptimizer(nn.Linear(3, 2).parameters(), SGD)
    assert optimizer.counters() == {}
    assert "in the backward" not in optimizer.decision.detail


def test_parameters_of_several_devices_are_refused():
    here, there = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, device="meta"))
    with pytest.raises(UnsupportedOptimizerError, match="got some on meta beside cpu"):
        OffloadedOptimizer([here, there], SGD, overlap=True)
    assert hooks(here) == 0
