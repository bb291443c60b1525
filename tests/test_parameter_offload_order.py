"""Parameters come and gradients go on streams that are late, and on memory given out again."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint

from simulated_copies import CopyingDevice
from torchfast.memory import ParameterOffload, parameter_offload

SIZE = 64


class ApartDevice(CopyingDevice):
    """What is computed on host tensors is computed at once; the device is asked for by strides."""

    def __init__(self):
        super().__init__()
        self.host_is_apart = True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name == "aten::empty_strided":
            return self.allocate(self.current(), tuple(args[0]))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def back(self):
        return self.streams[1]

    def out(self):
        return self.streams[2]


@pytest.fixture
def device(monkeypatch):
    device = ApartDevice()
    monkeypatch.setattr(parameter_offload, "copy_streams_for", lambda _: device)
    yield device
    device.end()


class Scale(nn.Module):
    def __init__(self, k):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, SIZE) + k / 10)
        self.shift = nn.Parameter(torch.full((SIZE,), k / 7))

    def forward(self, x):
        return (x * self.weight + self.shift).sin() * self.weight


class Chain(nn.Module):
    def __init__(self, depth=5, recompute=False):
        super().__init__()
        self.blocks = nn.ModuleList(Scale(k) for k in range(depth))
        self.recompute = recompute

    def forward(self, x):
        for block in self.blocks:
            if self.recompute:
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x)
        return x


def start(seed=0):
    return torch.linspace(0, 1, SIZE) + seed


def trained(model, xs, run=lambda model, x: model(x), num_micro=1):
    """Return losses' gradients added up, and the parameters behind an update of each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    gradients = []
    for number, x in enumerate(xs, start=1):
        run(model, x).sum().backward()
        if number % num_micro == 0:
            gradients += [p.grad.clone() for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return gradients + [p.detach().clone() for p in model.parameters()]


def expected_of(num_micro=1, steps=4, **options):
    return trained(Chain(**options), [start(k) for k in range(steps)], num_micro=num_micro)


def found_on(device, late, num_micro=1, steps=4, max_resident_blocks=2, **options):
    model = Chain(**options)
    offload = ParameterOffload(model, (Scale,), max_resident_blocks=max_resident_blocks)

    def run(model, x):
        for stream in late(device):
            stream.sleep(0.02)
        return model(x + 0.0)

    xs = [device.place(start(k)) for k in range(steps)]
    with device:
        return trained(model, xs, run, num_micro), offload


LATE = {
    "nothing": lambda device: [],
    "copies to the device": lambda device: [device.back()],
    "copies to the host": lambda device: [device.out()],
    "the computation": lambda device: [device.main],
}


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("max_resident_blocks", [1, 2, 3])
def test_whatever_is_late_the_bits_are_those_of_the_plain_loop(device, late, max_resident_blocks):
    found, offload = found_on(device, LATE[late], max_resident_blocks=max_resident_blocks)
    assert all(map(torch.equal, found, expected_of()))
    assert offload.counters()["offload_most_resident_blocks"] == max_resident_blocks
    assert device.num_reused > 0


@pytest.mark.parametrize("late", ["copies to the host", "the computation"])
def test_gradients_are_added_up_over_micro_batches(device, late):
    found, _ = found_on(device, LATE[late], num_micro=2)
    assert all(map(torch.equal, found, expected_of(num_micro=2)))


@pytest.mark.parametrize("late", LATE)
def test_with_recompute_around_the_blocks(device, late):
    found, _ = found_on(device, LATE[late], recompute=True)
    assert all(map(torch.equal, found, expected_of(recompute=True)))


def test_a_parameter_may_be_written_behind_a_forward(device):
    """By `load_state_dict` behind an evaluation, while the device is far behind."""
    model = Chain()
    expected = model(start()).detach()
    ParameterOffload(model, (Scale,))
    with device, torch.no_grad():
        x = device.place(start())
        device.back().sleep(0.05)
        device.main.sleep(0.05)
        found = model(x + 0.0)
        for parameter in model.parameters():
            parameter.fill_(7.0)
        assert torch.equal(device.read(found), expected)


def test_a_parameter_may_be_written_behind_a_backward(device):
    """Also one without a gradient, for which nothing else waits."""
    model = Chain().requires_grad_(False)
    x = start().requires_grad_()
    model(x).sum().backward()
    expected = x.grad
    ParameterOffload(model, (Scale,), max_resident_blocks=1)
    with device:
        x = device.place(start()).requires_grad_()
        loss = model(x + 0.0).sum()
        for stream in (device.back(), device.main):
            stream.sleep(0.05)
        (found,) = torch.autograd.grad(loss, x)
        for parameter in model.parameters():
            parameter.fill_(7.0)
        assert torch.equal(device.read(found), expected)


def test_a_parameter_may_be_written_behind_a_wrong_guess(device):
    model = Chain(depth=3)
    changed = Chain(depth=3)
    with torch.no_grad():
        changed.blocks[2].weight.fill_(2.0)
    offload = ParameterOffload(model, (Scale,), max_resident_blocks=3)
    with device, torch.no_grad():
        x = device.place(start())
        model(x + 0.0)
        model.blocks[0](x)
        model.blocks[1](x)  # which brings the last one ahead
        assert offload._engine.num_residents == 1
        model.blocks[2].weight.fill_(2.0)
        found = model(x + 0.0)
    assert torch.equal(device.read(found), changed(start()).detach())


def test_memory_of_a_wrong_guess_is_given_out_again_behind_its_copy(device):
    model = Chain(depth=3)
    offload = ParameterOffload(model, (Scale,))
    with device, torch.no_grad():
        x = device.place(start())
        model(x + 0.0)
        model.blocks[0](x)
        device.back().sleep(0.05)
        model.blocks[1](x)
        offload._engine.drop_all()
        found = [x + float(k) for k in range(32)]  # all memory that is free, and more
        device.back().synchronize()
        assert all(torch.equal(device.read(y), start() + k) for k, y in enumerate(found))
    assert offload.counters()["offload_unused_blocks"] == 1


def test_memory_of_gradients_is_given_out_again_behind_their_copies(device):
    """On CUDA the thread of the device does not wait for them, so it is called as by that."""
    model = Chain(depth=1)
    offload = ParameterOffload(model, (Scale,))
    engine, weight = offload._engine, model.blocks[0].weight
    with device, torch.no_grad():
        x = device.place(start())
        model(x + 0.0)
        (block,) = model.blocks[0].forward.blocks
        before = device.num_blocks()
        device.out().sleep(0.05)
        sent = []
        for k in range(8):
            sent.append(engine.send_gradient(block, weight, x * float(k)))
            # So many as the block has parameters may be under way.
            assert device.num_blocks() <= before + 2
        for k, (target, landed) in enumerate(sent):
            landed.synchronize()
            assert torch.equal(target, start() * k)


@pytest.mark.parametrize("max_resident_blocks", [1, 2, 3])
@pytest.mark.parametrize("depth", [4, 12])
def test_a_graph_holds_no_parameters(device, depth, max_resident_blocks):
    def blocks_behind_a_forward(model):
        x = device.place(start())
        before = device.num_blocks()
        loss = model(x + 0.0).sum()
        held = device.num_blocks() - before
        loss.backward()
        return held

    with device:
        plain = Chain(depth)
        for parameter in plain.parameters():
            parameter.data = device.place(parameter.data)
        activations = blocks_behind_a_forward(plain)
        model = Chain(depth)
        ParameterOffload(model, (Scale,), max_resident_blocks=max_resident_blocks)
        assert blocks_behind_a_forward(model) == activations + 2 * max_resident_blocks


def test_nothing_stays_behind_a_step(device):
    model = Chain()
    ParameterOffload(model, (Scale,))
    with device:
        x = device.place(start())
        before = device.num_blocks()
        for _ in range(3):
            model(x + 0.0).sum().backward()
            with _disable_current_modes():
                assert all(p.grad is not None for p in model.parameters())
        assert device.num_blocks() == before


def test_a_graph_that_is_dropped_leaves_nothing(device):
    model = Chain()
    offload = ParameterOffload(model, (Scale,))
    with device:
        x = device.place(start())
        before = device.num_blocks()
        for _ in range(3):
            loss = model(x + 0.0).sum()
            assert offload._engine.num_residents == 2
            del loss
        offload.close()
        assert device.num_blocks() == before
