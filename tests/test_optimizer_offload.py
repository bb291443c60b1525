"""An offloaded update is that of the optimizer on the CPU, on streams that are late."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn

from offloaded_updates import (
    MAKERS,
    equal,
    give,
    groups,
    make_offloaded,
    placed,
    plain,
    read,
    values,
)
from offloading import host_apart
from torchfast._core.errors import UnsupportedOptimizerError
from torchfast.memory import OffloadedOptimizer


@pytest.fixture
def device(monkeypatch):
    with host_apart(monkeypatch) as device:
        yield device


@pytest.mark.parametrize("bucket_bytes", [1, 100, 1 << 20])
@pytest.mark.parametrize("name", MAKERS)
def test_the_update_is_that_of_the_optimizer_itself(device, name, bucket_bytes):
    expected, reference = plain(MAKERS[name])
    with device:
        parameters = placed(device)
        offloaded = OffloadedOptimizer(groups(parameters), MAKERS[name], bucket_bytes=bucket_bytes)
        for seed in range(1, 5):
            give(device, parameters, seed)
            offloaded.step()
    assert equal(read(device, parameters), expected)
    state, wanted = offloaded.state_dict(), reference.state_dict()
    assert state["state"].keys() == wanted["state"].keys()
    for index, entry in wanted["state"].items():
        for key, value in entry.items():
            found = state["state"][index][key]
            assert torch.equal(torch.as_tensor(found), torch.as_tensor(value)), (index, key)
    for one, other in zip(state["param_groups"], wanted["param_groups"], strict=True):
        assert one == other


class Averaging(torch.optim.Optimizer):
    """Counts its steps in its groups and looks at all gradients, as some that are not torch's."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1, "k": 0})

    @torch.no_grad()
    def step(self, closure=None):
        there = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = sum(p.grad.square().sum() for p in there).sqrt()
        for group in self.param_groups:
            group["k"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] / group["k"] * parameter.grad / norm)


def test_an_optimizer_that_counts_its_steps_in_its_groups(device):
    expected, reference = plain(Averaging)
    with device:
        parameters = placed(device)
        offloaded = OffloadedOptimizer(groups(parameters), Averaging, bucket_bytes=1)
        for seed in range(1, 5):
            give(device, parameters, seed)
            offloaded.step()
    assert equal(read(device, parameters), expected)
    assert [group["k"] for group in offloaded.param_groups] == [4, 4]
    assert offloaded.state_dict()["param_groups"] == reference.state_dict()["param_groups"]


@pytest.mark.parametrize("is_told", [True, False])
def test_a_change_through_data_is_taken_once_it_is_told_of(device, is_told):
    """Torch counts no write through ``.data``, so the copies would be updated as they are."""
    expected = [nn.Parameter(v) for v in values()]
    reference = MAKERS["adamw"](groups(expected))
    with device:
        parameters, optimizer = make_offloaded(device)
        for seed in range(1, 4):
            give(device, parameters, seed)
            optimizer.step()
            if seed == 2:
                for parameter in parameters:
                    parameter.data.mul_(2.0)
                if is_told:
                    optimizer.refresh()
    for seed in range(1, 4):
        for parameter, value in zip(expected, values(seed), strict=True):
            parameter.grad = value
        reference.step()
        if seed == 2:
            for parameter in expected:
                parameter.data.mul_(2.0)
    assert equal(read(device, parameters), expected) == is_told


@pytest.mark.parametrize("late", ["out", "back", "main"])
def test_no_stream_may_be_late(device, late):
    expected, _ = plain(MAKERS["adamw"])
    with device:
        parameters, optimizer = make_offloaded(device, bucket_bytes=100)
        streams = {
            "main": device.main,
            "out": optimizer._update.streams[0],
            "back": optimizer._update.streams[1],
        }
        for seed in range(1, 5):
            streams[late].sleep(0.03)
            give(device, parameters, seed)
            optimizer.step()
            for parameter in parameters:
                parameter.grad = None
    assert equal(read(device, parameters), expected)


@pytest.mark.parametrize("deaf", ["out", "main"])
def test_without_a_wait_it_is_wrong(device, deaf, monkeypatch):
    expected, _ = plain(MAKERS["adamw"])
    held = threading.Event()
    with device:
        parameters, optimizer = make_offloaded(device)
        out, back = optimizer._update.streams
        monkeypatch.setattr(out if deaf == "out" else device.main, "wait_event", lambda event: None)
        # What the one that does not wait would have to wait for.
        (device.main if deaf == "out" else back).enqueue(held.wait)
        for seed in range(1, 5):
            give(device, parameters, seed)
            optimizer.step()
    if deaf == "out":
        held.set()
    found = read(device, parameters)
    held.set()
    back.synchronize()
    assert not equal(found, expected)


def test_without_waiting_for_the_gradients_it_is_wrong(device, monkeypatch):
    expected, _ = plain(MAKERS["adamw"])
    held = threading.Event()
    with device:
        parameters, optimizer = make_offloaded(device)
        monkeypatch.setattr("simulated_device.Event.synchronize", lambda self: None)
        optimizer._update.streams[0].enqueue(held.wait)
        for seed in range(1, 5):
            give(device, parameters, seed)
            optimizer.step()
    held.set()
    assert not equal(read(device, parameters), expected)


def test_parameters_that_others_write_are_noticed(device):
    expected, reference = plain(MAKERS["adamw"], steps=2)
    with torch.no_grad():
        for parameter, value in zip(expected, values(9), strict=True):
            parameter.copy_(value)
    for parameter, value in zip(expected, values(3), strict=True):
        parameter.grad = value
    reference.step()
    with device:
        parameters, optimizer = make_offloaded(device)
        for seed in (1, 2, 3):
            if seed == 3:
                with torch.no_grad():
                    for parameter, value in zip(parameters, values(9), strict=True):
                        parameter.copy_(value)
            give(device, parameters, seed)
            optimizer.step()
    assert equal(read(device, parameters), expected)


def test_a_parameter_without_a_gradient_stays(device):
    with device:
        parameters, optimizer = make_offloaded(device)
        give(device, parameters, 1)
        parameters[1].grad = None
        optimizer.step()
    found = read(device, parameters)
    assert torch.equal(found[1], values()[1])
    assert not torch.equal(found[0], values()[0])
    assert parameters[1] not in optimizer.state


def test_schedulers_and_the_user_change_the_learning_rate(device):
    expected, _ = plain(MAKERS["adamw"], lr=0.3)
    with device:
        parameters, optimizer = make_offloaded(device)
        for seed in range(1, 5):
            give(device, parameters, seed)
            optimizer.param_groups[1]["lr"] = 0.3 / seed
            optimizer.step()
    assert equal(read(device, parameters), expected)


def test_state_goes_from_one_form_to_the_other(device):
    expected, _ = plain(MAKERS["adamw"], steps=4)
    before, reference = plain(MAKERS["adamw"], steps=2)
    seen = []
    with device:
        parameters, optimizer = make_offloaded(device)
        optimizer.register_load_state_dict_post_hook(seen.append)
        with torch.no_grad():
            for parameter, value in zip(parameters, before, strict=True):
                parameter.copy_(value.detach())
        optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
        assert optimizer.state[parameters[0]]["step"] == 2
        for seed in (3, 4):
            give(device, parameters, seed)
            optimizer.step()
    assert seen == [optimizer]
    assert equal(read(device, parameters), expected)
    back = MAKERS["adamw"](groups(before))
    back.load_state_dict(optimizer.state_dict())
    assert back.state[before[0]]["step"] == 4


def test_a_group_that_is_added(device):
    with device:
        parameters = placed(device)
        optimizer = OffloadedOptimizer(parameters[:2], MAKERS["sgd"])
        optimizer.add_param_group({"params": parameters[2:], "lr": 0.5})
        give(device, parameters, 1)
        optimizer.step()
    expected = [nn.Parameter(v) for v in values()]
    reference = MAKERS["sgd"](expected[:2])
    reference.add_param_group({"params": expected[2:], "lr": 0.5})
    for parameter, value in zip(expected, values(1), strict=True):
        parameter.grad = value
    reference.step()
    assert equal(read(device, parameters), expected)


def test_a_callable_may_put_parameters_into_groups_and_leave_some_out(device):
    def make(parameters):
        wide, flat = ([p for p in parameters if p.dim() == dim] for dim in (2, 1))
        return MAKERS["sgd"]([{"params": flat[:1], "lr": 0.5}, {"params": wide}])

    expected = [nn.Parameter(v) for v in values()]
    reference = make(expected)
    for parameter, value in zip(expected, values(1), strict=True):
        parameter.grad = value
    reference.step()
    with device:
        parameters = placed(device)
        optimizer = OffloadedOptimizer(parameters, make)
        held = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
        assert held == [[id(parameters[1])], [id(parameters[0]), id(parameters[2])]]
        give(device, parameters, 1)
        optimizer.step()
    assert equal(read(device, parameters), expected)
    assert optimizer.state_dict()["param_groups"] == reference.state_dict()["param_groups"]


@pytest.mark.parametrize("is_hook", [True, False])
def test_what_is_put_around_the_update_runs_once(device, is_hook):
    counts = []

    def make(parameters):
        optimizer = MAKERS["sgd"](parameters)
        step = optimizer.step
        if is_hook:
            optimizer.register_step_post_hook(lambda *_: counts.append(1))
        else:
            optimizer.step = lambda: (counts.append(1), step())
        return optimizer

    expected, _ = plain(MAKERS["sgd"], steps=1)
    with device:
        parameters = placed(device)
        optimizer = OffloadedOptimizer(groups(parameters), make, bucket_bytes=1)
        give(device, parameters, 1)
        optimizer.step()
    assert counts == [1]
    assert equal(read(device, parameters), expected)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch 2.11
def test_what_cannot_be_offloaded_is_refused(device):
    parameters = placed(device)
    with pytest.raises(UnsupportedOptimizerError, match="the update of LBFGS cannot be offloaded"):
        OffloadedOptimizer(parameters, torch.optim.LBFGS)
    others = [nn.Parameter(torch.ones(1))]
    with pytest.raises(UnsupportedOptimizerError, match="the update of SGD cannot be offloaded"):
        OffloadedOptimizer(parameters, lambda _: torch.optim.SGD(others, lr=1))

    with pytest.raises(TypeError, match=r"make must return a torch\.optim\.Optimizer"):
        OffloadedOptimizer(parameters, list)
    optimizer = OffloadedOptimizer(parameters[:1], MAKERS["sgd"])
    indices = torch.tensor([[0, 1]])
    parameters[0].grad = torch.sparse_coo_tensor(
        indices, torch.ones(2, 8), (8, 8), check_invariants=True
    )
    with pytest.raises(RuntimeError, match="a sparse gradient cannot be offloaded"):
        optimizer.step()
    with pytest.raises(TypeError, match="make must be callable"):
        OffloadedOptimizer(parameters, None)


def test_on_the_cpu_it_is_the_optimizer_itself():
    expected, _ = plain(MAKERS["adamw"])
    parameters = [nn.Parameter(v) for v in values()]
    optimizer = OffloadedOptimizer(groups(parameters), MAKERS["adamw"])
    for seed in range(1, 5):
        for parameter, value in zip(parameters, values(seed), strict=True):
            parameter.grad = value
        assert optimizer.step(lambda: 7) == 7
    assert equal([p.detach() for p in parameters], expected)
    assert optimizer.decision.outcome == "stepped aside"
