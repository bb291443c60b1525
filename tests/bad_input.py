"""Short ways to a trainer, a fit, a step and a state, to hand each of them something bad."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn, optim

from models import DropoutNet, make_batches, mean_loss
from torchfast import Trainer

SGD = partial(optim.SGD, lr=0.1)
BATCHES = make_batches(3)


def build(model=None, optimizer=SGD, loss_fn=mean_loss, plan="exact", **options):
    return Trainer(DropoutNet() if model is None else model, optimizer, loss_fn, plan, **options)


def fit(loader=BATCHES, trainer=None, **options):
    options = {"progress": "off", **options}
    if not {"steps", "epochs"} & options.keys():
        options["steps"] = 1
    return (trainer or build()).fit(loader, **options)


def step(loss_fn, batch=BATCHES[0], **options):
    return build(loss_fn=loss_fn, **options).step(batch)


def load(change, **options):
    trainer = build(**options)
    state = copy.deepcopy(trainer.state_dict())
    return trainer.load_state_dict(change(state) or state)


def twice():
    model = nn.Linear(8, 4)
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = optim.SGD([model.weight, model.bias, model.weight], lr=0.1)
    return build(model, optimizer)


def frozen():
    return nn.Linear(8, 4).requires_grad_(False)


def on_meta():
    model = nn.Linear(8, 4)
    return build(model, SGD(model.parameters()), device=torch.device("meta"))
