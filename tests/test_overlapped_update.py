"""Updates begin in the backward: right, or taken back."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch
from torch import nn

from offloaded_updates import (
    MAKERS,
    backward,
    equal,
    groups,
    make_offloaded,
    plain,
    read,
    values,
)
from offloading import host_apart
from torchfast.memory import OffloadedOptimizer, early_gradients, optimizer_offload
from torchfast.memory.undo import Undo


@pytest.fixture
def device(monkeypatch):
    with host_apart(monkeypatch) as device:
        yield device


def begun(optimizer):
    return tuple(optimizer.counters().values())


def go_on(device, optimizer):
    """Let the backward go on until the gradients are looked at; return what ends it before."""
    held, early = threading.Event(), optimizer._update.early
    if early is None:
        return held
    look = type(early).drop_changed

    def drop_changed():
        held.set()
        look(early)

    early.drop_changed = drop_changed
    for parameter in early.arrived():
        early.wait_for(parameter)  # or a copy might be of what is written behind the backward
    device.main.enqueue(held.wait)
    return held


def trained(device, *, name="adamw", steps=4, between=None, **options):
    """Train with a backward that goes on for a while behind the gradients; return all there is."""
    with device:
        parameters, optimizer = make_offloaded(device, name, **options)
        for seed in range(1, steps + 1):
            backward(device, parameters, seed)
            go_on(device, optimizer)
            if between is not None:
                between(seed, parameters)
            optimizer.step()
            optimizer.zero_grad()
        found = read(device, parameters)
        optimizer.close()
    return found, optimizer


def halve(seed, parameters):
    for parameter in parameters:
        parameter.grad.mul_(0.5)


def halve_some(seed, parameters):
    if seed in (3, 4):
        parameters[1].grad.mul_(0.5)


def same_state(one, other):
    one, other = one.state_dict(), other.state_dict()
    assert one["param_groups"] == other["param_groups"]
    assert one["state"].keys() == other["state"].keys()
    for index, entry in other["state"].items():
        assert one["state"][index].keys() == entry.keys()
        for key, value in entry.items():
            found = one["state"][index][key]
            assert torch.equal(torch.as_tensor(found), torch.as_tensor(value)), (index, key)


@pytest.mark.parametrize("bucket_bytes", [1, 100, 1 << 20])
@pytest.mark.parametrize("name", MAKERS)
def test_an_update_that_begins_in_the_backward_is_that_of_the_optimizer(device, name, bucket_bytes):
    expected, reference = plain(MAKERS[name])
    found, optimizer = trained(device, name=name, overlap=True, bucket_bytes=bucket_bytes)
    assert equal(found, expected)
    same_state(optimizer, reference)
    assert begun(optimizer) == (3, 0)  # the first one has yet to fetch the parameters


@pytest.mark.parametrize("changed", [halve, halve_some])
@pytest.mark.parametrize("name", MAKERS)
def test_a_wrong_guess_is_taken_back(device, name, changed):
    expected, reference = trained(device, name=name, between=changed, steps=6)
    found, optimizer = trained(
        device, name=name, between=changed, steps=6, overlap=True, bucket_bytes=1
    )
    assert equal(found, expected)
    same_state(optimizer, reference)
    # halve: the first is found wrong where nothing had begun, one pauses, the third is taken back.
    assert begun(optimizer) == ((1, 1) if changed is halve else (4, 1))


@pytest.mark.parametrize("broken", ["taken back", "looked at", "kept"])
def test_without_taking_back_it_is_wrong(device, broken, monkeypatch):
    expected, _ = trained(device, between=halve_some)
    if broken == "taken back":
        monkeypatch.setattr(Undo, "take_back", lambda self, optimizer, parameters: None)
    elif broken == "kept":
        monkeypatch.setattr(torch.Tensor, "copy_", _not_into_state(torch.Tensor.copy_))
    else:
        monkeypatch.setattr(early_gradients.EarlyGradients, "drop_changed", lambda self: None)
    found, _ = trained(device, between=halve_some, overlap=True)
    assert not equal(found, expected)


def _not_into_state(copy):
    def copied(self, source, *args, **kwargs):
        is_kept = torch.is_tensor(source) and self.device == source.device and not (*args, *kwargs)
        return self if is_kept else copy(self, source, *args, **kwargs)

    return copied


def test_guesses_that_are_always_wrong_become_rare(device):
    expected, _ = trained(device, between=halve, steps=20)
    found, optimizer = trained(device, between=halve, steps=20, overlap=True)
    assert equal(found, expected)
    tried, wrong = begun(optimizer)
    assert tried == wrong <= 3  # of updates 3, 7 and 15


def test_a_right_guess_ends_the_pauses(device):
    def changed(seed, parameters):
        if seed in (3, 6):
            halve(seed, parameters)

    expected, _ = trained(device, between=changed, steps=8)
    found, optimizer = trained(device, between=changed, steps=8, overlap=True)
    assert equal(found, expected)
    assert begun(optimizer) == (5, 2)  # 2 and 3, 5 and 6, 8


def test_parameters_on_the_host_are_updated_once(device, monkeypatch):
    expected, reference = plain(MAKERS["adamw"])
    with device:
        parameters = [nn.Parameter(device.place(v)) for v in values()[:3]]
        parameters += [nn.Parameter(v) for v in values()[3:]]
        sides = iter([device, device, device, None])
        monkeypatch.setattr(optimizer_offload, "copy_streams_for", lambda _: next(sides))
        optimizer = OffloadedOptimizer(
            groups(parameters), MAKERS["adamw"], overlap=True, bucket_bytes=1
        )
        for seed in range(1, 5):
            backward(device, parameters[:3], seed)
            go_on(device, optimizer)
            parameters[3].grad = values(seed)[3]
            optimizer.step()
            optimizer.zero_grad()
        assert equal([*read(device, parameters[:3]), parameters[3].detach()], expected)
    same_state(optimizer, reference)
    assert begun(optimizer) == (3, 0)


def test_nothing_begins_behind_the_backward(device, monkeypatch):
    monkeypatch.setattr("simulated_device.Event.query", lambda self: True)
    found, optimizer = trained(device, overlap=True)
    assert equal(found, plain(MAKERS["adamw"])[0])
    assert begun(optimizer) == (0, 0)


def test_it_is_off_for_a_first_parameter_on_a_device_too(device, monkeypatch):
    there = nn.Parameter(device.place(torch.ones(3)))
    with monkeypatch.context() as patched:
        patched.setattr(optimizer_offload, "copy_streams_for", lambda _: None)
        here = [nn.Parameter(torch.ones(3))]
        optimizer = OffloadedOptimizer(here, partial(torch.optim.SGD, lr=0.1), overlap=True)
    optimizer.overlap = False
    with device:
        optimizer.add_param_group({"params": [there]})
        there.sum().backward()
        assert there not in optimizer._update.early
        optimizer.zero_grad()
        optimizer.overlap = True
        there.sum().backward()
        assert there in optimizer._update.early


def test_a_pause_does_not_go_by_while_it_is_off(device):
    with device:
        parameters, optimizer = make_offloaded(device, overlap=True)
        optimizer._update.early._pause_left = 2
        for overlap, left in ((False, 2), (True, 1), (False, 1), (True, 0)):
            optimizer.overlap = overlap
            backward(device, parameters, 1)
            optimizer.step()
            assert optimizer._update.early._pause_left == left


def test_it_can_be_off_for_a_while(device):
    counts = []
    with device:
        parameters, optimizer = make_offloaded(device, overlap=True)
        for seed in range(1, 7):
            optimizer.overlap = seed not in (3, 4)
            backward(device, parameters, seed)
            go_on(device, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            counts.append(begun(optimizer)[0])
        found = read(device, parameters)
        _, without = make_offloaded(device)
    assert counts == [0, 1, 1, 1, 2, 3]
    assert equal(found, plain(MAKERS["adamw"], steps=6)[0])
    assert optimizer.overlap
    with pytest.raises(RuntimeError, match="make it with overlap=True"):
        without.overlap = True
    without.overlap = False
    with pytest.raises(TypeError, match="overlap must be True or False"):
        optimizer.overlap = 1


@pytest.mark.parametrize(("max_bytes", "expected"), [(0, (0, 0)), (2 * 64 * 4 + 4, (3, 0))])
def test_no_more_state_is_kept_than_is_allowed(device, max_bytes, expected):
    found, optimizer = trained(device, overlap=True, max_undo_bytes=max_bytes, bucket_bytes=1)
    assert equal(found, plain(MAKERS["adamw"])[0])
    assert begun(optimizer) == expected
    assert optimizer._update._undo._num_bytes <= max_bytes


def test_what_others_wrote_is_fetched_before_it_is_updated(device):
    def written(seed, parameters):
        if seed == 3:
            with torch.no_grad():
                for parameter, value in zip(parameters, values(9), strict=True):
                    parameter.copy_(value)

    expected, reference = trained(device, between=written)
    found, optimizer = trained(device, between=written, overlap=True)
    assert equal(found, expected)
    same_state(optimizer, reference)
    assert begun(optimizer) == (2, 0)


@pytest.mark.parametrize("where", ["step", "look", "wait"])
def test_an_update_that_fails_in_the_backward_is_taken_back(device, monkeypatch, where):
    """In the update itself, or where the host waits, which is where Ctrl-C arrives."""
    expected, reference = plain(MAKERS["adamw"], steps=3)
    owner, name = {
        "step": (torch.optim.AdamW, "step"),
        "look": (early_gradients.EarlyGradients, "drop_changed"),
        "wait": (early_gradients.EarlyGradients, "wait_for"),
    }[where]
    works, calls = getattr(owner, name), []

    def fail(self, *args):
        works(self, *args)
        calls.append(self)
        if len(calls) == (1 if where == "look" else 2):
            raise KeyboardInterrupt

    with device:
        parameters, optimizer = make_offloaded(device, overlap=True, bucket_bytes=100)
        for seed in (1, 2, 3):
            backward(device, parameters, seed)
            held = go_on(device, optimizer)
            if seed == 2:
                if where == "look":
                    del optimizer._update.early.drop_changed
                    held.set()
                    monkeypatch.setattr("simulated_device.Event.query", lambda self: False)
                with monkeypatch.context() as patched:
                    patched.setattr(owner, name, fail)
                    with pytest.raises(KeyboardInterrupt):
                        optimizer.step()
                held.set()
                assert calls
                state = optimizer.state_dict()["state"]
                assert [float(entry["step"]) for entry in state.values()] == [1.0] * 4
                optimizer.zero_grad()
                backward(device, parameters, seed)
                go_on(device, optimizer)
            optimizer.step()
            optimizer.zero_grad()
    assert equal(read(device, parameters), expected)
    same_state(optimizer, reference)


def test_what_was_found_right_stays_where_the_rest_fails(device, monkeypatch):
    step, calls = torch.optim.AdamW.step, []

    def fail(self, *args):
        calls.append(self)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return step(self, *args)

    with device:
        parameters, optimizer = make_offloaded(device, overlap=True, bucket_bytes=1)
        for seed in (1, 2):
            backward(device, parameters, seed)
            go_on(device, optimizer)
            if seed == 2:
                with torch.no_grad():
                    parameters[3].mul_(1.0)  # has to be fetched, so nothing of it begins
                monkeypatch.setattr(torch.optim.AdamW, "step", fail)
                with pytest.raises(KeyboardInterrupt):
                    optimizer.step()
            else:
                optimizer.step()
                optimizer.zero_grad()
        found = read(device, parameters)
    monkeypatch.undo()
    once, twice = (plain(MAKERS["adamw"], steps=steps)[0] for steps in (1, 2))
    assert equal(found, [*twice[:3], once[3]])
    state = optimizer.state_dict()["state"]
    assert [float(entry["step"]) for entry in state.values()] == [2.0, 2.0, 2.0, 1.0]


def test_of_micro_batches_the_last_is_copied(device, monkeypatch):
    copied = []
    watched = early_gradients.EarlyGradients.copy

    def counted(self, parameter):
        watched(self, parameter)
        copied.append(parameter in self)

    monkeypatch.setattr(early_gradients.EarlyGradients, "copy", counted)
    found = []
    for overlap in (False, True):
        with device:
            parameters, optimizer = make_offloaded(device, overlap=overlap)
            for seed in range(1, 5):
                for micro in range(2 if seed < 4 else 3):
                    backward(device, parameters, seed + micro)
                go_on(device, optimizer)
                optimizer.step()
                optimizer.zero_grad()
            found.append(read(device, parameters))
            optimizer.close()
    assert equal(*found)
    # The first update cannot know; a third backward, where there were two, is one too many.
    expected = [(True, False), (False, True), (False, True), (False, True, False)]
    assert copied == [is_copied for update in expected for is_copied in update for _ in parameters]
    assert begun(optimizer) == (2, 0)


def test_state_that_is_taken_away_begins_anew(device):
    """The guess is made of an optimizer that has no state, and has none when it is taken back."""
    found = []
    for overlap in (False, True):
        with device:
            parameters, optimizer = make_offloaded(device, overlap=overlap)
            for seed in range(1, 5):
                backward(device, parameters, seed)
                go_on(device, optimizer)
                if seed == 3:
                    optimizer.state.clear()
                    halve(seed, parameters)
                optimizer.step()
                optimizer.zero_grad()
            found.append((read(device, parameters), optimizer))
    assert equal(found[0][0], found[1][0])
    same_state(found[1][1], found[0][1])
    assert begun(optimizer) == (2, 1)
