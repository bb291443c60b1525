"""What an optimizer's state takes, also before there is any: tried out, or guessed."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torchfast import LowBitAdamW
from torchfast.memory.block_costs import tensors_in
from torchfast.memory.recompute_plan import fixed_bytes
from torchfast.memory.state_bytes import state_bytes

OPTIMIZERS = {
    "adamw": partial(torch.optim.AdamW, lr=1e-3),
    "adamw fused": partial(torch.optim.AdamW, lr=torch.tensor(1e-3), fused=True),
    "amsgrad": partial(torch.optim.AdamW, lr=1e-3, amsgrad=True),
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-3),
    "rmsprop with momentum": partial(torch.optim.RMSprop, lr=1e-3, momentum=0.9),
    "adadelta": torch.optim.Adadelta,
    "rprop": torch.optim.Rprop,
    "adafactor": torch.optim.Adafactor,
    "8bit": partial(LowBitAdamW, state="8bit"),
    "4bit": partial(LowBitAdamW, state="4bit"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_that_there_will_be_is_known(name, dtype):
    model = nn.Linear(256, 512, bias=False).to(dtype)
    optimizer = OPTIMIZERS[name](model.parameters())
    hooks, rng = [], torch.get_rng_state()
    optimizer.register_step_pre_hook(lambda *_: hooks.append("step"))
    torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)  # which wraps ``step``
    told = fixed_bytes(model, optimizer)
    assert not hooks
    assert not optimizer.state
    assert model.weight.grad is None
    assert torch.equal(rng, torch.get_rng_state())
    model(torch.randn(4, 256, dtype=dtype)).sum().backward()
    optimizer.step()
    assert told == pytest.approx(fixed_bytes(model, optimizer), rel=0.01)


def test_hooks_of_all_optimizers_and_groups_see_nothing_of_the_trial():
    model = nn.Linear(256, 512)
    model.bias.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    for group in optimizer.param_groups:
        del group["fused"]
    keys = [set(group) for group in optimizer.param_groups]
    seen = []
    hook = register_optimizer_step_pre_hook(lambda *_: seen.append("step"))
    try:
        told = state_bytes(optimizer)
    finally:
        hook.remove()
    assert seen == []
    assert [set(group) for group in optimizer.param_groups] == keys
    assert told == 3 * model.weight.nbytes  # and nothing for what does not train


def test_state_in_shards_is_what_this_rank_has():
    class Meshed(torch.Tensor):  # as a DTensor says what it is made of
        def __tensor_flatten__(self):
            return ["part", "mesh"], None

        @staticmethod
        def __tensor_unflatten__(inner, context, size, stride):
            raise NotImplementedError

    state = torch.zeros(8).as_subclass(Meshed)
    state.part, state.mesh = torch.zeros(2), object()
    parameter = nn.Parameter(torch.zeros(8))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.state[parameter] = {"momentum_buffer": state}
    assert state_bytes(optimizer) == 8


class Mixed(nn.Module):
    """Vectors, kernels, a table, and weights of each kind that are small."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(3000, 96)
        self.conv = nn.Conv2d(256, 320, 3)
        self.line = nn.Conv1d(8, 8, 5)
        self.wide = nn.Linear(256, 512)
        self.small = nn.Linear(8, 4)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_shape_is_counted_as_what_is_kept_of_it(name):
    model = Mixed()
    optimizer = OPTIMIZERS[name](model.parameters())
    told = state_bytes(optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    counters = sum(t.nbytes for t in tensors_in(list(optimizer.state.values())) if t.numel() == 1)
    # Of a factored matrix it is rough, and next to nothing.
    slack = 0.01 * sum(p.nbytes for p in model.parameters()) if name == "adafactor" else 0
    assert told == pytest.approx(state_bytes(optimizer) - counters, rel=0.01, abs=slack)


def test_a_group_that_has_not_been_updated_yet_is_counted_beside_one_that_has():
    first, second = nn.Linear(64, 64, bias=False), nn.Linear(64, 32, bias=False)
    optimizer = torch.optim.Adam(first.parameters())
    first.weight.grad = torch.ones_like(first.weight)
    optimizer.step()
    optimizer.add_param_group({"params": second.parameters()})
    assert state_bytes(optimizer) == 2 * first.weight.nbytes + 4 + 2 * second.weight.nbytes


def test_what_needs_a_closure_is_guessed_by_its_history():
    model = nn.Linear(50, 20)
    optimizer = torch.optim.LBFGS(model.parameters(), history_size=4, max_iter=12)
    told = state_bytes(optimizer)

    def closure():
        optimizer.zero_grad()
        loss = (model(inputs) - targets).pow(4).mean()
        loss.backward()
        return loss

    inputs, targets = torch.randn(64, 50), torch.randn(64, 20)
    optimizer.step(closure)
    assert told == pytest.approx(state_bytes(optimizer), rel=0.15)


@pytest.mark.parametrize("name", ["adamw", "adafactor", "8bit", "4bit"])
@pytest.mark.parametrize(
    "shape",
    [
        (128, 1001, 3, 3),
        (128, 2049, 1),
        (1001, 999),
        (300_001,),
        (2**18 + 128,),
        (400_000, 1),
        (2, 300_000),
        (4, 512, 512),
    ],
)
def test_large_shapes_that_blocks_do_not_divide(shape, name):
    parameter = nn.Parameter(torch.ones(shape))
    optimizer = OPTIMIZERS[name]([parameter])
    told = state_bytes(optimizer)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    slack = 0.02 * parameter.nbytes if name == "adafactor" else 8
    assert told == pytest.approx(state_bytes(optimizer), rel=0.01, abs=slack)
