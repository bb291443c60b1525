"""What a trial of a model leaves behind: nothing."""

from __future__ import annotations

import copy
import random
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from torchfast._core.compare import differences
from torchfast._core.generators import state_of
from torchfast._core.kept_writes import KeptWrites
from torchfast._core.untouched import TrialRun, untouched

CPU = torch.device("cpu")
MAKERS = {
    "torch": lambda: torch.Generator().manual_seed(3),
    "Python": lambda: random.Random(3),
    "NumPy": lambda: np.random.default_rng(3),
    "RandomState": lambda: np.random.RandomState(3),
}


def draw(generator):
    if isinstance(generator, torch.Generator):
        return torch.rand((), generator=generator).item()
    return generator.random()


def place(generator):
    state = state_of(generator)
    return state.tolist() if isinstance(state, torch.Tensor) else repr(state)


class Holder(nn.Module):
    def __init__(self, generator):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.generator = generator


class Loss:
    def __init__(self, generator):
        self.generator = generator

    def __call__(self, model, batch):
        return draw(self.generator)

    def method(self, model, batch):
        return draw(self.generator)


def closure(generator):
    return lambda model, batch: draw(generator)


HOLDERS = {
    "closure": closure,
    "object": Loss,
    "method": lambda generator: Loss(generator).method,
    "partial": lambda generator: partial(lambda generator, model, batch: None, generator),
    "module": lambda generator: closure(nn.Sequential(Holder(generator))),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_generators_of_modules_are_put_back(kind):
    generator = MAKERS[kind]()
    model = nn.Sequential(Holder(generator), Holder(random.SystemRandom()))
    before = place(generator)
    for _ in range(2):
        with untouched(model, CPU):
            first = draw(generator)
            assert place(generator) != before
        assert place(generator) == before
    assert draw(generator) == first


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("kind", MAKERS)
def test_generators_that_the_function_holds_are_put_back(kind, holder):
    generator = MAKERS[kind]()
    before = place(generator)
    with untouched(nn.Linear(2, 2), CPU, HOLDERS[holder](generator)):
        draw(generator)
    assert place(generator) == before


def test_attributes_of_modules_are_put_back():
    model = nn.Sequential(Holder(None))
    model[0].calls, model[0].scale, model[0].is_first = 3, 0.5, True
    model[0].seen = []
    with untouched(model, CPU):
        model[0].calls += 1
        model[0].scale *= 2
        model[0].is_first = False
        model[0].generator = "mine"
        model[0].seen.append(1)
        model[0].cache = torch.ones(2)
    assert (model[0].calls, model[0].scale, model[0].is_first) == (3, 0.5, True)
    assert model[0].generator is None
    assert model[0].seen == []
    assert not hasattr(model[0], "cache")


def in_place(model):
    with torch.no_grad():
        model[1].weight.mul_(0.5)


def through_data(model):
    model[1].weight.data.mul_(0.5)


def through_a_view(model):
    with torch.no_grad():
        model[1].weight[0].zero_()


def many_at_once(model):
    with torch.no_grad():
        torch._foreach_mul_([*model.parameters()], 0.5)


def by_another_tensor(model):
    model[1].weight.data = model[0].weight.data * 0.5


def by_the_memory_of_another(model):
    model[1].weight.data = model[0].weight.data
    with torch.no_grad():
        model[1].weight.zero_()


WRITES = (
    in_place,
    through_data,
    through_a_view,
    many_at_once,
    by_another_tensor,
    by_the_memory_of_another,
)


@pytest.mark.parametrize("eagerly", [False, True])
@pytest.mark.parametrize("write", WRITES)
def test_parameters_that_a_forward_writes_are_put_back(write, eagerly):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False))
    before = copy.deepcopy(model.state_dict())
    places = [p.data_ptr() for p in model.parameters()]
    for _ in range(2):
        with untouched(model, CPU, eagerly=eagerly):
            write(model)
            assert differences(before, model.state_dict())
        assert differences(before, model.state_dict()) == []
        assert [p.data_ptr() for p in model.parameters()] == places


def test_only_what_is_written_to_is_copied():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    writes = KeptWrites(model.parameters())
    with writes:
        model(torch.ones(2, 4)).sum().backward()
        in_place(model)
        in_place(model)
        ((kept,),) = writes._kept.values()
    assert kept[0].data_ptr() == model[1].weight.data_ptr()
    assert torch.equal(kept[1], model[1].weight * 4)


@pytest.mark.parametrize("eagerly", [False, True])
def test_what_a_loss_function_that_is_a_module_keeps_is_put_back(eagerly):
    model, loss = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    before = copy.deepcopy(loss.state_dict())
    with untouched(model, CPU, loss, eagerly=eagerly):
        loss(model(torch.randn(8, 4))).square().sum().backward()
        in_place(loss)
    assert differences(before, loss.state_dict()) == []
    assert all(p.grad is None for p in loss.parameters())


CENTER = torch.zeros(4)


@pytest.mark.parametrize("eagerly", [False, True])
@pytest.mark.parametrize("is_large", [False, True])
def test_tensors_that_the_loss_function_uses_are_put_back(monkeypatch, eagerly, is_large):
    monkeypatch.setattr("torchfast._core.untouched._SMALL_BYTES", 8 if is_large else 64)
    seen = torch.zeros(4)

    def loss(model, batch):
        CENTER.add_(batch)
        seen.add_(1)
        batch.div_(2)

    batch = torch.ones(4)
    with untouched(
        nn.Linear(2, 2), CPU, TrialRun(lambda: loss(None, batch), loss), eagerly=eagerly
    ):
        loss(None, batch)
    # What is large and may be data is copied only where it is seen to be written to.
    stay = [0.0, 0.0, 1.0] if eagerly or not is_large else [1.0, 1.0, 0.5]
    assert [float(tensor[0]) for tensor in (CENTER, seen, batch)] == stay
    CENTER.zero_()
