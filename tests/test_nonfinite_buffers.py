"""What the forward of a bad batch wrote into the buffers is put back, whatever they hold."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn, optim

from poison import (
    POISONS,
    SKIP,
    assert_same,
    batches_with,
    poisoned_loss,
    run,
    state_of,
    trainer_of,
)
from test_parity import OPTIMIZERS
from torchfast import Trainer


class Holder(nn.Module):
    """Does to its buffer what it is told, in training."""

    def __init__(self, change, buffer, *, persistent=True):
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("held", buffer, persistent=persistent)
        self.change = change

    def forward(self, x):
        self.change(self)
        return self.layer(x)


def add(model):
    model.held += 1


def replace(model):
    model.held = model.held + 1


def grow(model):
    model.held = torch.cat([model.held, model.held[-1:]])


def resize(model):
    """As observers of quantization do in their first forward."""
    model.held.resize_(5).fill_(1)


def make(model):
    model.held = torch.ones(2)


def unmake(model):
    model.held = None


def turn(model):
    model.held.logical_not_()


CHANGES = {
    "float": (add, torch.zeros(3)),
    "float64": (add, torch.zeros((), dtype=torch.float64)),
    "half": (add, torch.zeros(3, dtype=torch.float16)),
    "bool": (turn, torch.zeros(3, dtype=torch.bool)),
    "uint8": (add, torch.zeros(3, dtype=torch.uint8)),
    "complex": (add, torch.zeros(3, dtype=torch.complex64)),
    "large": (add, torch.zeros(200, 200)),
    "transposed": (add, torch.arange(6.0).view(2, 3).t()),
    "empty": (add, torch.zeros(0)),
    "replaced": (replace, torch.zeros(3)),
    "replaced large": (replace, torch.zeros(200, 200)),
    "replaced while expanded": (replace, torch.zeros(1).expand(3)),
    "grown": (grow, torch.zeros(3)),
    "resized": (resize, torch.zeros(3)),
    "resized large": (resize, torch.zeros(200, 200)),
    "made": (make, None),
    "unmade": (unmake, torch.zeros(3)),
}


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("name", CHANGES)
def test_buffers_of_every_kind_are_put_back(name, persistent):
    change, buffer = CHANGES[name]
    for poison in (None, *POISONS):
        model = Holder(change, copy.deepcopy(buffer), persistent=persistent)
        trainer = Trainer(model, partial(optim.SGD, lr=0.1), poisoned_loss, SKIP)
        run(trainer, batches_with([poison]))
        after = Holder(change, copy.deepcopy(buffer))
        if poison is None:
            change(after)
        assert_same({"held": after.held}, {"held": model.held})


def test_buffers_that_cannot_change_in_place_are_no_obstacle():
    with torch.inference_mode():
        inferred = torch.ones(3)
    model = Holder(lambda model: None, inferred)
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    trainer = Trainer(model, partial(optim.SGD, lr=0.1), poisoned_loss, SKIP)
    run(trainer, batches_with([None, "NaN input", None]))
    assert trainer.num_skipped == 1
    assert model.held is inferred


@pytest.mark.parametrize("change", [add, replace])
def test_a_buffer_held_twice_stays_one(change):
    model = Holder(change, torch.zeros(3))
    model.twin = nn.Module()
    model.twin.register_buffer("held", model.held)

    def both(model, change=change):
        change(model)
        model.twin.held = model.held

    model.change = both
    trainer = Trainer(model, partial(optim.SGD, lr=0.1), poisoned_loss, SKIP)
    run(trainer, batches_with([None, "NaN input"]))
    assert model.twin.held is model.held
    assert torch.equal(model.held, torch.ones(3))


def test_a_replaced_buffer_does_not_write_into_the_batch():
    """What stands in the buffer may be the user's own tensor."""

    def loss_fn(model, batch):
        model.held = batch[0]
        return poisoned_loss(model, batch)

    model = Holder(lambda model: None, torch.zeros(6, 8))
    trainer = Trainer(model, partial(optim.SGD, lr=0.1), loss_fn, SKIP)
    ((batch,),) = batches_with(["NaN loss only"])
    kept = batch[0].clone()
    trainer.step(batch)
    assert torch.equal(batch[0], kept)
    assert torch.equal(model.held, torch.zeros(6, 8))


def test_spectral_norm_is_put_back():
    def net():
        return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 4)))

    trainer = trainer_of(OPTIMIZERS["AdamW"], SKIP, net=net)
    before = state_of(trainer)
    run(trainer, batches_with(["NaN input"]))
    assert_same(before, state_of(trainer))


def test_buffers_of_what_the_loss_holds_are_put_back():
    head = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))
    model = nn.Linear(8, 4)

    def loss_fn(model, batch):
        return poisoned_loss(lambda inputs: head(model(inputs)), batch)

    optimizer = optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    trainer = Trainer(model, optimizer, loss_fn, SKIP)
    before = copy.deepcopy(head.state_dict())
    run(trainer, batches_with(["NaN input"]))
    assert trainer.num_skipped == 1
    assert_same(before, head.state_dict())


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_a_scripted_model_skips_too():
    model = torch.jit.script(nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 4)))
    trainer = Trainer(model, partial(optim.SGD, lr=0.1), poisoned_loss, SKIP)
    before = copy.deepcopy(model.state_dict())
    run(trainer, batches_with(["NaN input"]))
    assert trainer.num_skipped == 1
    assert_same(before, model.state_dict())
