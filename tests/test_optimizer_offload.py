"""An offloaded update is that of the optimizer on the CPU, on streams that are late."""

from __future__ import annotations

import copy
import threading
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from offloading import host_apart
from simulated_copies import PromptCopies
from torchfast._core.errors import UnsupportedOptimizerError
from torchfast.memory import OffloadedOptimizer, optimizer_offload

MAKERS = {
    "adamw": partial(torch.optim.AdamW, lr=0.1, fused=True),
    "adamw for-loop": partial(torch.optim.AdamW, lr=0.1, foreach=False),
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "nadam": partial(torch.optim.NAdam, lr=0.1),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1),
}
SHAPES = [(8, 8), (16,), (4, 4), (3,)]


@pytest.fixture
def device(monkeypatch):
    with host_apart(monkeypatch) as device:
        yield device


def values(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def placed(device):
    return [nn.Parameter(device.place(v)) for v in values()]


def give(device, parameters, seed):
    """Let the main stream compute gradients, late."""
    device.main.sleep(0.01)
    for parameter, value in zip(parameters, values(seed), strict=True):
        parameter.grad = parameter.detach() * 0.0 + value


def groups(parameters):
    return [{"params": parameters[:2], "lr": 0.05}, {"params": parameters[2:]}]


def plain(make, steps=4, lr=None):
    parameters = [nn.Parameter(v) for v in values()]
    optimizer = make(groups(parameters))
    for seed in range(1, steps + 1):
        for parameter, value in zip(parameters, values(seed), strict=True):
            parameter.grad = value
        if lr is not None:
            optimizer.param_groups[1]["lr"] = lr / seed
        optimizer.step()
    return parameters, optimizer


def read(device, tensors):
    with _disable_current_modes():
        return [device.read(t.detach()) for t in tensors]


def equal(found, expected):
    return all(torch.equal(a, b.detach()) for a, b in zip(found, expected, strict=True))


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


def make_offloaded(device, name="adamw", **options):
    parameters = placed(device)
    return parameters, OffloadedOptimizer(groups(parameters), MAKERS[name], **options)


@pytest.mark.parametrize("late", ["out", "back", "main"])
def test_no_stream_may_be_late(device, late):
    expected, _ = plain(MAKERS["adamw"])
    with device:
        parameters, optimizer = make_offloaded(device, bucket_bytes=100)
        streams = {"main": device.main, "out": optimizer._streams[0], "back": optimizer._streams[1]}
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
        out, back = optimizer._streams
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
        optimizer._streams[0].enqueue(held.wait)
        for seed in range(1, 5):
            give(device, parameters, seed)
            optimizer.step()
    held.set()
    assert not equal(read(device, parameters), expected)


def backward(device, parameters, seed):
    """A backward whose gradients are the values of a seed, and which calls hooks."""
    device.main.sleep(0.01)
    loss = sum((p * v).sum() for p, v in zip(parameters, values(seed), strict=True))
    loss.backward()


def test_gradients_that_are_copied_in_the_backward(device):
    expected, _ = plain(MAKERS["adamw"])
    with device:
        parameters, optimizer = make_offloaded(device, copy_early=True)
        for seed in range(1, 5):
            backward(device, parameters, seed)
            assert len(optimizer._early) == len(parameters)
            device.main.sleep(0.02)
            optimizer.step()
            optimizer.zero_grad()
    assert equal(read(device, parameters), expected)


def test_gradients_that_change_behind_the_backward_are_copied_again(device):
    with device:
        found = []
        for early in (False, True):
            parameters, optimizer = make_offloaded(device, copy_early=early)
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
        OffloadedOptimizer(nets[1].parameters(), make, copy_early=True),
    ]
    copied = []
    monkeypatch.setattr(
        torch.Tensor, "copy_", _counting(torch.Tensor.copy_, optimizers[1]._gradients, copied)
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
    # Each gradient in the backward, and once more if it has changed.
    assert len(copied) == 3 * 2 * (1 if who == "nobody" else 2)


def test_a_write_beside_an_early_copy_is_not_in_its_sum_alone(monkeypatch):
    monkeypatch.setattr(optimizer_offload, "copy_streams_for", lambda _: PromptCopies())
    checksum, writes = optimizer_offload._checksum, [0.5]

    def written(gradient):
        if writes:  # by the caller's stream, at this very moment
            gradient.mul_(writes.pop())
        return checksum(gradient)

    monkeypatch.setattr(optimizer_offload, "_checksum", written)
    weight = nn.Parameter(torch.ones(4))
    optimizer = OffloadedOptimizer([weight], partial(torch.optim.SGD, lr=1.0), copy_early=True)
    (weight * 2).sum().backward()
    optimizer.step()
    assert torch.equal(weight.detach(), torch.zeros(4))


def _counting(copy, gradients, copied):
    def counted(self, source, *args, **kwargs):
        if any(self is known for known in gradients.values()):
            copied.append(self)
        return copy(self, source, *args, **kwargs)

    return counted


def test_a_gradient_that_is_dropped_while_it_is_copied(device):
    expected, _ = plain(MAKERS["adamw"])
    with device:
        parameters, optimizer = make_offloaded(device, copy_early=True)
        for seed in range(1, 5):
            optimizer._streams[0].sleep(0.02)
            backward(device, parameters, seed + 10)
            optimizer.zero_grad()
            backward(device, parameters, seed)
            optimizer.step()
            optimizer.zero_grad()
    assert equal(read(device, parameters), expected)


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
