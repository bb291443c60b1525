"""What a trial of a model leaves behind: nothing."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from torchfast._core.generators import state_of
from torchfast._core.untouched import untouched

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


def test_plain_numbers_of_modules_are_put_back():
    model = nn.Sequential(Holder(None))
    model[0].calls, model[0].scale, model[0].is_first = 3, 0.5, True
    with untouched(model, CPU):
        model[0].calls += 1
        model[0].scale *= 2
        model[0].is_first = False
        model[0].generator = "mine"
    assert (model[0].calls, model[0].scale, model[0].is_first) == (3, 0.5, True)
    assert model[0].generator == "mine"
