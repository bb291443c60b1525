"""What a step uses is found by its code: what nobody named, and what lies on the host."""

from __future__ import annotations

import types
from functools import partial

import pytest
import torch
from torch import nn, optim

from both_ways import own_step
from models import make_batches, mean_loss
from tape import CPU, counts, reasons
from torchfast import Plan, TrainStep
from torchfast._core.code_names import names_read
from torchfast._core.compare import differences
from torchfast._core.reachable import held_by, used_by
from torchfast.graphs import CUDAGraphStep
from torchfast.graphs.attributes import Attributes
from torchfast.graphs.named_state import NamedState
from torchfast.graphs.watch import StateWatch

pytestmark = pytest.mark.usefixtures("tape")

STEPS = 16
weight = unread = 1.0


class Settings:
    weight = 1.0


# --- What nobody named ----------------------------------------------------------------------------


def test_what_is_global_and_used_is_found():
    model, optimizer, generator = nn.Linear(2, 2), optim.SGD([torch.ones(1)]), torch.Generator()
    names = {"model": model, "optimizer": optimizer, "generator": generator, "other": nn.ReLU()}
    source = "def step(x):\n    optimizer.step()\n    return inner(x)\n"
    source += "def inner(x):\n    return model(x) * generator.seed()\n"
    exec(compile(source, __file__, "exec"), names)
    step = names["step"]
    assert {*map(id, used_by(step))} == {*map(id, (model, optimizer, generator))}
    assert held_by(step) == []
    named = NamedState([optimizer], function=step)
    assert named.modules == [model]
    assert named.optimizers == [optimizer]
    assert named.generators == [generator]
    assert NamedState([], updated_after=[optimizer], function=step).optimizers == []


def test_the_rate_of_an_optimizer_that_nobody_named_is_not_frozen():
    results = []
    for is_captured in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(8, 4)
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        scheduler = optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        step = own_step(model, optimizer)
        fn = CUDAGraphStep(step) if is_captured else step
        for batch in make_batches(STEPS):
            fn(batch)
            scheduler.step()
        results.append(model.state_dict())
    assert counts(fn)[1] > 0
    assert not differences(*results)


class Pair:
    """Trains two models, each by a step of its own."""

    def __init__(self):
        self.first, self.second = (optim.SGD([torch.ones(1)], lr=0.1) for _ in range(2))

    def train(self):
        self.inner()

    def inner(self):
        self.first.step()


class Called(Pair):
    def __call__(self):
        self.second.step()


def test_of_the_optimizers_of_an_object_those_that_the_step_names_are_found():
    pair, called = Pair(), Called()
    method = pair.train
    assert used_by(pair.train) == used_by(partial(pair.train)) == [pair.first]
    assert used_by(lambda: method()) == [pair.first]
    assert used_by(called) == [called.second]
    assert used_by(lambda: (called(), method())) == [called.second, pair.first]


class Adversaries:
    """Has the other model's optimizer in an attribute, with a rate that changes in each step."""

    def __init__(self):
        self.models = [nn.Linear(8, 4), nn.Linear(8, 4)]
        self.optimizers = [optim.SGD(m.parameters(), lr=0.1) for m in self.models]
        self.other = self.optimizers[1]
        self.scheduler = optim.lr_scheduler.ExponentialLR(self.other, 0.9)

    def loss_fn(self, model, batch):
        return mean_loss(model, batch)


def test_the_rate_of_another_models_optimizer_is_none_of_the_steps():
    held = Adversaries()
    step = TrainStep(held.models[0], held.optimizers[0], held.loss_fn, Plan(cuda_graph=True))
    for batch in make_batches(STEPS):
        step(batch)
        held.other.step()
        held.scheduler.step()
    assert counts(step) == (1, STEPS - 3, 3, 1), reasons(step)


# --- On a device beside the host ------------------------------------------------------------------

CUDA = torch.device("cuda", 0)  # named only: nothing runs there


@pytest.mark.parametrize("write", [torch.Tensor.zero_, lambda t: t.data.zero_()])
def test_a_tensor_on_the_host_counts_by_its_values(write):
    """A kernel takes the value of such a scalar at its launch, and a graph keeps it."""
    scale = torch.ones(())
    for device, counts_so in ((CUDA, True), (CPU, False)):
        scale.fill_(1.0)
        held = types.SimpleNamespace(scale=scale)
        attributes = Attributes(lambda held=held: held.scale, device)
        attributes.refresh([])
        watch = StateWatch(NamedState([scale]), device)
        frozen, glance = watch.frozen(), watch.glance()
        assert attributes.changed() is None
        assert watch.is_frozen_as(frozen)
        assert glance.is_as_it_was()
        write(scale)
        assert (attributes.changed() == "'scale' of SimpleNamespace") == counts_so
        assert watch.is_frozen_as(frozen) != counts_so
        assert glance.is_as_it_was() != counts_so


@pytest.mark.parametrize("shape", [(), (3,)])
def test_pinned_memory_is_read_at_each_replay_but_for_scalars(shape, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    held = types.SimpleNamespace(scale=torch.ones(shape))
    attributes = Attributes(lambda held=held: held.scale, CUDA)
    attributes.refresh([])
    watch = StateWatch(NamedState([held.scale]), CUDA)
    frozen = watch.frozen()
    held.scale.zero_()
    assert (attributes.changed() is None) == watch.is_frozen_as(frozen) == bool(shape)


# --- What code reads ------------------------------------------------------------------------------


class Held:
    def __init__(self):
        self.read, self.counted = 1.0, 0

    def method(self):
        self.counted += 1
        return self.read


def reads(held):
    return held.method() * weight * Settings.weight


def test_global_names_are_read_and_what_is_only_counted_up_is_not():
    found = names_read([reads], [Held])
    assert "read" in found.names
    assert "counted" not in found.names
    assert "method" in found.called
    ((where, names),) = found.globals
    assert where is globals()
    assert {"weight", "Settings"} <= names
    assert "unread" not in names
