"""What schedulers and users keep in the groups of an optimizer with low-bit state."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn, optim
from torch._dynamo.utils import counters
from torch.optim.lr_scheduler import OneCycleLR

from torchfast import LowBitAdamW, Plan, Trainer
from torchfast._core.compare import differences

LOW = Plan(optimizer="adamw8bit")


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4))


def loss_fn(model, batch):
    return model(batch).square().mean()


BATCH = torch.ones(2, 64)


def test_a_scheduler_that_keeps_its_bounds_in_the_groups_goes_on_after_loading():
    schedule = partial(OneCycleLR, max_lr=0.1, total_steps=9)
    adamw = partial(optim.AdamW, lr=1e-3)
    straight = Trainer(net(), adamw, loss_fn, LOW, lr_scheduler=schedule)
    for _ in range(2):
        straight.step(BATCH)
    state = copy.deepcopy(straight.state_dict())
    resumed = Trainer(net(), adamw, loss_fn, LOW, lr_scheduler=schedule)
    resumed.load_state_dict(state)
    for trainer in (straight, resumed):
        for _ in range(2):
            trainer.step(BATCH)
    assert resumed.optimizer.param_groups[0]["lr"] == straight.optimizer.param_groups[0]["lr"]
    assert differences(straight.model.state_dict(), resumed.model.state_dict()) == []


def test_keys_of_the_user_in_the_groups_stay():
    model = net()

    def adamw(_):
        first = {"params": list(model[0].named_parameters()), "lr_scale": 0.1}
        return optim.AdamW([first, {"params": list(model[1].named_parameters())}], lr=1e-3)

    groups = Trainer(model, adamw, loss_fn, LOW).optimizer.param_groups
    assert groups[0]["lr_scale"] == 0.1
    assert [group["param_names"] for group in groups] == [["weight", "bias"]] * 2
    assert "amsgrad" not in groups[0]
    low = LowBitAdamW(model.parameters())
    plain = optim.AdamW(model.parameters())
    plain.param_groups[0]["mine"] = 3
    low.load_state_dict(plain.state_dict())
    assert set(low.param_groups[0]) == {*low.defaults, "params", "mine"}


@pytest.fixture
def compiled_by_eager(monkeypatch):
    """The update is compiled as it would be, but for the kernels."""
    compiles = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, **options: compiles(function, backend="eager", **options)
    )


@pytest.mark.usefixtures("compiled_by_eager")
def test_numbers_that_change_at_each_step_do_not_compile_at_each_step(caplog):
    weight = nn.Parameter(torch.ones(8))
    optimizer = LowBitAdamW([weight], state="full", compiled=True)
    graphs = []
    for number in range(8):
        weight.grad = torch.ones(8)
        optimizer.param_groups[0]["betas"] = (0.9 - 0.01 * number, 0.999)
        optimizer.step()
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[3] > graphs[2]  # what is compiled for follows
    assert graphs[4:] == [graphs[3]] * 4
    assert caplog.text.count("it is not compiled from now on") == 1
    assert "the update is not compiled" in optimizer.decision().detail


@pytest.mark.usefixtures("compiled_by_eager")
def test_more_shapes_than_torch_compiles_of_a_function():
    weights = [nn.Parameter(torch.ones(size)) for size in range(1, 6)]
    optimizer = LowBitAdamW(weights, lr=0.1, compiled=True)
    with torch._dynamo.config.patch(recompile_limit=2):
        for _ in range(2):
            for weight in weights:
                weight.grad = torch.ones_like(weight)
            optimizer.step()
    assert all(float(weight.detach()[0]) < 0.82 for weight in weights)


LAYOUTS = {
    "transposed": lambda x: x.view(256, 64).t(),
    "permuted": lambda x: x.view(16, 16, 64).permute(2, 0, 1),
    "channels last": lambda x: x.view(64, 16, 4, 4).contiguous(memory_format=torch.channels_last),
    "every second": lambda x: torch.stack((x, x), 1).flatten(0, 1)[::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["8bit", "4bit", "fp8", "full"])
def test_how_a_parameter_lies_in_memory_changes_no_number(kind, layout):
    torch.manual_seed(0)
    given = LAYOUTS[layout](torch.randn(64, 256))
    weights = [nn.Parameter(given), nn.Parameter(given.contiguous().clone())]
    optimizers = [LowBitAdamW([w], state=kind, compiled=False) for w in weights]
    assert weights[0].stride() != weights[1].stride()
    for _ in range(3):
        gradient = torch.randn(given.shape)
        for weight, optimizer in zip(weights, optimizers, strict=True):
            weight.grad = torch.empty_like(weight).copy_(gradient)
            optimizer.step()
    assert torch.equal(*weights)
    states = [optimizer.state_dict()["state"][0] for optimizer in optimizers]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
