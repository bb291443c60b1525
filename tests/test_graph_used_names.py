"""What a step uses is found by its code: what nobody named, and what lies on the host."""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn, optim

from models import make_batches, mean_loss
from tape import CPU, counts
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

        def step(batch, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = mean_loss(model, batch)
            loss.backward()
            optimizer.step()
            return loss.detach()

        fn = CUDAGraphStep(step) if is_captured else step
        for batch in make_batches(STEPS):
            fn(batch)
            scheduler.step()
        results.append(model.state_dict())
    assert counts(fn)[1] > 0
    assert not differences(*results)


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
