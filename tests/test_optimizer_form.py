"""The form of an optimizer: put on, kept through loads and new groups, taken off."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR

from models import DropoutNet, make_batches, mean_loss
from torchfast import Plan, Trainer
from torchfast.graphs import OptimizerForm

FUSED = ["Adagrad", "Adam", "AdamW", "SGD"]
UNFUSED = ["Adadelta", "Adafactor", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop"]


def flags(optimizer):
    return [{k: g[k] for k in ("foreach", "fused") if k in g} for g in optimizer.param_groups]


@pytest.mark.parametrize("name", FUSED)
def test_fused_is_put_on_and_taken_off(name):
    model = DropoutNet()
    optimizer = getattr(optim, name)(model.parameters(), lr=0.01)
    given, defaults = flags(optimizer), dict(optimizer.defaults)
    trainer = Trainer(model, optimizer, mean_loss, "fast")
    assert all(g["fused"] is True and g["foreach"] is False for g in optimizer.param_groups)
    assert optimizer.defaults["fused"] is True
    for batch in make_batches(3):
        trainer.step(batch)
    assert flags_of(trainer.state_dict()["optimizer"]) == given
    assert flags_of(trainer.optimizer.state_dict()) == given  # whoever saves it
    trainer.close()
    assert flags(optimizer) == given
    assert optimizer.defaults == defaults
    assert "_step_supports_amp_scaling" not in optimizer.__dict__
    optimizer.step()


def flags_of(state):
    return [{k: g[k] for k in ("foreach", "fused") if k in g} for g in state["param_groups"]]


@pytest.mark.parametrize("name", UNFUSED)
def test_an_optimizer_without_a_fused_update_runs_as_given(name):
    model = DropoutNet()
    optimizer = getattr(optim, name)(model.parameters(), lr=0.01)
    given = flags(optimizer)
    trainer = Trainer(model, optimizer, mean_loss, "fast")
    assert flags(optimizer) == given
    (aside,) = [d for d in trainer.report().stepped_aside if d.lever == "optimizer"]
    assert f"torch.optim.{name} has no fused implementation" in aside.detail
    trainer.step(make_batches(1)[0])


class Own(optim.AdamW):
    """A user's subclass, which may read its flags or not."""


def embedding():
    return nn.Embedding(4, 4, sparse=True)


@pytest.mark.parametrize(
    ("model", "make", "reason"),
    [
        (DropoutNet, partial(Own, lr=0.01), "not one of torch.optim's own classes"),
        (DropoutNet, partial(optim.AdamW, differentiable=True), "differentiable=True"),
        (embedding, partial(optim.SGD, lr=0.1), "sparse gradients"),
        (lambda: nn.Linear(2, 2, dtype=torch.complex64), optim.Adam, "torch refused fused Adam"),
    ],
)
def test_what_cannot_be_fused_says_why(model, make, reason):
    module = model()
    optimizer = make(module.parameters())
    given = flags(optimizer)
    form = OptimizerForm(optimizer, "fused", module)
    assert form.form == "as_given"
    assert form.decision.outcome == "stepped aside"
    assert reason in form.decision.detail
    assert flags(optimizer) == given


def test_a_new_group_takes_the_form_and_gives_it_back():
    model = DropoutNet()
    first, *rest = model.parameters()
    optimizer = optim.AdamW([first], lr=0.01)
    with Trainer(model, optimizer, mean_loss, "fast") as trainer:
        trainer.step(make_batches(1)[0])
        optimizer.add_param_group({"params": rest, "lr": 0.1})
        trainer.step(make_batches(1)[0])
        assert [g["fused"] for g in optimizer.param_groups] == [True, True]
        assert [g["fused"] for g in trainer.state_dict()["optimizer"]["param_groups"]] == [None] * 2
    assert [g["fused"] for g in optimizer.param_groups] == [None, None]


def test_groups_of_different_forms_get_their_own_back():
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = optim.AdamW([{"params": [a], "foreach": True}, {"params": [b], "foreach": False}])
    given = flags(optimizer)
    form = OptimizerForm(optimizer, "fused", nn.Module())
    form.close()
    assert flags(optimizer) == given


def test_hyperparameters_stay_python_floats():
    model = DropoutNet()
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    scheduler = StepLR(optimizer, 1, gamma=0.5)
    trainer = Trainer(model, optimizer, mean_loss, "fast", lr_scheduler=scheduler)
    trainer.step(make_batches(1)[0])
    assert optimizer.param_groups[0]["lr"] == 0.005
    assert type(optimizer.param_groups[0]["lr"]) is float


def test_a_state_loaded_behind_our_back_keeps_the_form():
    """A plain loop's file says fused=None; torch would put that back."""
    model = DropoutNet()
    plain = optim.AdamW(model.parameters(), lr=0.01)
    mean_loss(model, make_batches(1)[0]).backward()
    plain.step()
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    trainer = Trainer(model, optimizer, mean_loss, "fast")
    optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    assert optimizer.param_groups[0]["fused"] is True
    trainer.close()
    optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    assert optimizer.param_groups[0]["fused"] is None, "the hook outlived close()"


def test_saved_state_continues_in_a_plain_loop():
    """What is saved under "fast" goes on in a plain AdamW as if it had been plain all along."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    twin = copy.deepcopy(model)
    batches = make_batches(6)
    with Trainer(
        model, partial(optim.AdamW, lr=0.01), mean_loss, Plan(optimizer="fused")
    ) as trainer:
        for batch in batches[:3]:
            trainer.step(batch)
        saved = copy.deepcopy(trainer.state_dict())
    continued = nn.Linear(8, 4)
    continued.load_state_dict(saved["model"])
    optimizer = optim.AdamW(continued.parameters(), lr=0.01)
    optimizer.load_state_dict(saved["optimizer"])
    reference = optim.AdamW(twin.parameters(), lr=0.01)
    for batch in batches[:3]:
        run(twin, reference, batch)
    for batch in batches[3:]:
        run(twin, reference, batch)
        run(continued, optimizer, batch)
    assert optimizer.param_groups[0]["fused"] is None
    assert optimizer.state[continued.weight]["step"].item() == 6
    torch.testing.assert_close(continued.weight, twin.weight, rtol=1e-5, atol=1e-6)


def run(model, optimizer, batch):
    optimizer.zero_grad()
    mean_loss(model, batch).backward()
    optimizer.step()
