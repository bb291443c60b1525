"""A ``weakref.proxy`` whose object is gone: whatever is asked of it raises, so nothing is asked."""

from __future__ import annotations

import gc
import weakref
from functools import partial

import pytest
import torch
from torch import optim

from both_ways import alike, trained
from models import DropoutNet, mean_loss
from tape import counts, reasons
from torchfast._core import proxies

pytestmark = pytest.mark.usefixtures("tape")

ADAMW = partial(optim.AdamW, lr=0.01, fused=True)
STEPS, GONE_AT = 16, 8

proxy = None


class Owner:
    """What a part refers back to, and what may be called."""

    def __call__(self):
        return None


class Loss:
    def __init__(self, owner):
        self.owner = weakref.proxy(owner)
        self.owners = {"first": [self.owner]}

    def by_attribute(self, model, batch):
        return mean_loss(model, batch) if self.owner is not None else None

    def by_container(self, model, batch):
        return mean_loss(model, batch) if self.owners["first"] else None


class Part(DropoutNet):
    """Has its owner in an attribute of a module."""

    def __init__(self, owner):
        super().__init__()
        self.owner = weakref.proxy(owner)

    def forward(self, x):
        return super().forward(x) if self.owner is not None else None


def in_attribute(owner):
    return DropoutNet(), Loss(owner).by_attribute


def in_container(owner):
    return DropoutNet(), Loss(owner).by_container


def in_closure(owner):
    owner = weakref.proxy(owner)
    return DropoutNet(), lambda model, batch: mean_loss(model, batch) * (owner is not None)


def by_global(model, batch):
    return mean_loss(model, batch) * (proxy is not None)


def in_global(owner):
    globals()["proxy"] = weakref.proxy(owner)
    return DropoutNet(), by_global


def in_module(owner):
    return Part(owner), mean_loss


def in_default(owner):
    behind = weakref.proxy(owner)

    def loss_fn(model, batch, owner=behind):
        return mean_loss(model, batch) * (owner is not None)

    return DropoutNet(), loss_fn


PLACES = [in_attribute, in_container, in_closure, in_global, in_module, in_default]


def train(make, gone_at, *, cuda_graph=True):
    owners = [Owner()]
    torch.manual_seed(0)
    model, loss_fn = make(owners[0])

    def let_go(number):
        if number == gone_at:
            owners.clear()
            gc.collect()

    let_go(None)
    options = {"net": lambda: model, "cuda_graph": cuda_graph, "before": let_go}
    return trained(loss_fn, STEPS, ADAMW, **options)


@pytest.mark.parametrize("gone_at", [None, 2, GONE_AT])
@pytest.mark.parametrize("make", PLACES)
def test_what_refers_to_an_object_that_is_gone_is_left_alone(make, gone_at):
    step = alike(partial(train, make, gone_at))
    assert counts(step) == (1, STEPS - 3, 3, 1), reasons(step)


def test_a_dead_proxy_is_told_from_a_live_one():
    owner = Owner()
    live = weakref.proxy(owner)
    assert not any(map(proxies.is_dead, (owner, live, weakref.ref(owner), None, 1.0)))
    del owner
    gc.collect()
    assert proxies.is_dead(live)
