"""Generators of a loader that the training draws from, too: a break repeats none of its numbers."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from simulated_device import Prompt, wait_until
from torchfast import PrefetchingLoader
from torchfast.data.drawn_ahead import Draw, DrawnAhead, states_of

COUNT = 24
MAKERS = {
    "torch": lambda: torch.Generator().manual_seed(0),
    "NumPy": lambda: np.random.default_rng(0),
    "Python": lambda: random.Random(0),
}


def drawn(generator):
    if isinstance(generator, torch.Generator):
        return torch.rand((), generator=generator).item()
    return generator.random()


class Numbers(Dataset):
    """Holds a generator, and draws from it for each sample if told to."""

    def __init__(self, rng, draws=False):
        self.rng, self.draws = rng, draws

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        return torch.tensor([float(index), drawn(self.rng) if self.draws else 0.0])


def shuffled(generator):
    return DataLoader(TensorDataset(torch.arange(COUNT)), 2, shuffle=True, generator=generator)


LOADERS = {
    "shuffled": (shuffled, ["torch"]),
    "held": (lambda g: DataLoader(Numbers(g), 2), MAKERS),
}
CASES = [(name, kind) for name, (_, kinds) in LOADERS.items() for kind in kinds]


def trained(loader, generator, draws, stops=(2, 5, 3)):
    """Return what a loop sees and draws: ``draws`` says behind which batches."""
    log = []
    for stop in stops:
        for number, batch in enumerate(loader, start=1):
            log.append(str(batch))
            if draws(number):
                log.append(drawn(generator))
            if number == stop:
                break
        log.append(drawn(generator))
    return log


@pytest.mark.usefixtures("every_way")
@pytest.mark.parametrize("draws", [lambda _: True, lambda n: n == 1, lambda _: False])
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_what_the_training_drew_does_not_come_again_behind_a_break(name, kind, draws):
    make = LOADERS[name][0]
    ours, plain = MAKERS[kind](), MAKERS[kind]()
    loader = PrefetchingLoader(make(ours), "cpu", depth=3)
    assert trained(loader, ours, draws) == trained(make(plain), plain, draws)


@pytest.mark.usefixtures("every_way")
@pytest.mark.parametrize("stop", [1, 3, 10, 11, 12])
@pytest.mark.parametrize("kind", MAKERS)
def test_what_was_drawn_ahead_is_taken_back(kind, stop):
    ours, plain = MAKERS[kind](), MAKERS[kind]()
    loader = PrefetchingLoader(DataLoader(Numbers(ours, draws=True), 2), "cpu", depth=3)
    seen = trained(loader, ours, lambda _: False, (stop, 2))
    assert seen == trained(
        DataLoader(Numbers(plain, draws=True), 2), plain, lambda _: False, (stop, 2)
    )


def test_a_break_that_drops_an_epoch_begun_ahead_leaves_what_the_training_drew(device):
    device.kind = Prompt
    generator = MAKERS["torch"]()
    loader = PrefetchingLoader(shuffled(generator), "cpu", depth=32, across_epochs=True)
    for number, _ in enumerate(loader, start=1):
        if number == 2:
            wait_until(lambda: loader._feed.num_ahead is not None)
        if number == 6:
            assert loader._ahead.has_begun
            # Of a draw in the middle of a fetch nobody could tell whose it was.
            wait_until(lambda: loader._ahead.feed.num_ahead is not None)
            drawn(generator)
            left = generator.get_state()
            break
    assert torch.equal(generator.get_state(), left)
    loader.close()


def test_only_the_last_draws_are_taken_back_and_none_that_others_made():
    generator = MAKERS["Python"]()
    ahead, states = DrawnAhead(0, []), states_of([generator])
    for number in (1, 2, 3, 4):
        drawn(generator)
        states += states_of([generator])
        ahead.note(Draw(number, [generator], [states[-2]], [states[-1]], is_alone=False))
    ahead.take_back(2)
    assert generator.getstate() == states[2]
    drawn(generator)
    ahead.take_back(0)
    assert generator.getstate() == states[3]  # somebody's draw, so it stays
