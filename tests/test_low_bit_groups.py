"""What schedulers and users keep in the groups of an optimizer with low-bit state."""

from __future__ import annotations

import copy
from functools import partial

import torch
from torch import nn, optim
from torch._dynamo.utils import counters
from torch.optim.lr_scheduler import OneCycleLR

from torchfast import LowBitAdamW, Plan, Trainer
from torchfast._core.compare import differences
from torchfast.compiler.record import CompileRecord

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


def test_numbers_that_change_at_each_step_do_not_compile_at_each_step(monkeypatch, caplog):
    compiles = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, **options: compiles(function, backend="eager", **options)
    )
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


def test_each_shape_is_compiled_once_and_none_of_them_again(monkeypatch):
    """More shapes than torch compiles of one function, and no word of one compiled again."""
    compiles = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, **options: compiles(function, backend="eager", **options)
    )
    weights = [nn.Parameter(torch.randn(16 * size, 256)) for size in range(1, 13)]
    plain = [nn.Parameter(weight.detach().clone()) for weight in weights]
    both = [LowBitAdamW(w, compiled=c) for w, c in ((weights, True), (plain, False))]
    with CompileRecord() as record:
        for _ in range(3):
            for one, other in zip(weights, plain, strict=True):
                one.grad = torch.randn_like(one)
                other.grad = one.grad.clone()
            for optimizer in both:
                optimizer.step()
        summary = record.summary()
    assert summary.recompiles == ()
    assert len([f for f in summary.frames if f.code.name == "update"]) == 12
    for one, other in zip(weights, plain, strict=True):
        torch.testing.assert_close(one, other)
