"""A run over a loader like torchdata's StatefulDataLoader goes on as if nobody had stopped it."""

from __future__ import annotations

import copy
import io
from functools import partial

import pytest
import torch
from torch.utils.data import Dataset

from stateful_loader import StatefulLoader
from torchfast import PrefetchingLoader
from torchfast._core.rng import get_rng_state, seed_everything, set_rng_state

pytestmark = pytest.mark.usefixtures("every_way")

CPU = torch.device("cpu")
NUM_SAMPLES, BATCH_SIZE, NUM_BATCHES, NUM_EPOCHS = 11, 2, 6, 4


class Numbered(Dataset):
    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        return torch.tensor(float(index))


class Drawing:
    """Draws each batch from a generator, with which its state goes on exactly."""

    def __init__(self):
        self.generator, self.number = torch.Generator().manual_seed(4), 0

    def __iter__(self):
        while self.number < NUM_BATCHES:
            self.number += 1
            yield torch.rand(BATCH_SIZE, generator=self.generator)
        self.number = 0

    def state_dict(self):
        return {"number": self.number, "generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.number = state["number"]
        self.generator.set_state(state["generator"])


LOADERS = {
    "own generator": partial(StatefulLoader, Numbered(), BATCH_SIZE),
    "seeds drawn globally": partial(StatefulLoader, Numbered(), BATCH_SIZE, seeds_globally=True),
    "order drawn late": partial(StatefulLoader, Numbered(), BATCH_SIZE, late=True),
    "draws each batch": Drawing,
}


def train(loader, log, stop_after=None):
    """Note each batch of an epoch, and what the training draws."""
    for number, batch in enumerate(loader, start=1):
        log.append((batch.tolist(), torch.rand(()).item()))
        if number == stop_after:
            return


def in_a_plain_loop(make):
    seed_everything(1)
    loader, log = make(), []
    for _ in range(NUM_EPOCHS):
        train(loader, log)
    return log


def through_a_file(loader):
    file = io.BytesIO()
    torch.save({"loader": loader.state_dict(), "rng": get_rng_state(CPU)}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def go_on(make, state):
    """Return the loader of another process, which has gone its own way before."""
    seed_everything(99)
    loader = make()
    loader.load_state_dict(state["loader"])
    set_rng_state(state["rng"], CPU)
    return loader


def interrupted(make, epochs_done, stop_after):
    """Stop a run after a batch of an epoch, or before its first, and go on with another loader."""
    seed_everything(1)
    loader, log = make(), []
    for _ in range(epochs_done):
        train(loader, log)
    if stop_after:
        train(loader, log, stop_after)
    other = go_on(make, through_a_file(loader))
    for _ in range(NUM_EPOCHS - epochs_done):
        train(other, log)
    return log


def prefetched(make):
    return PrefetchingLoader(make(), CPU)


@pytest.mark.parametrize("name", LOADERS)
def test_epochs_are_those_of_a_plain_loop(name):
    seed_everything(1)
    loader, log = prefetched(LOADERS[name]), []
    for _ in range(NUM_EPOCHS):
        loader.state_dict()  # from which it begins, the first time
        train(loader, log)
    assert log == in_a_plain_loop(LOADERS[name])


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("epochs_done", [0, 1])
@pytest.mark.parametrize("stop_after", [0, 1, 4, NUM_BATCHES])
def test_a_run_goes_on_for_all_its_epochs(name, epochs_done, stop_after):
    log = interrupted(partial(prefetched, LOADERS[name]), epochs_done, stop_after)
    assert log == in_a_plain_loop(LOADERS[name])


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("first", [1, NUM_BATCHES])
def test_a_run_goes_on_twice(name, first):
    make = partial(prefetched, LOADERS[name])
    seed_everything(1)
    loader, log = make(), []
    train(loader, log, first)
    loader = go_on(make, through_a_file(loader))
    train(loader, log, 2)
    loader = go_on(make, through_a_file(loader))
    # At the end of an epoch, the one that goes on yields nothing and the next one begins.
    for _ in range(NUM_EPOCHS - (first == NUM_BATCHES)):
        train(loader, log)
    assert log == in_a_plain_loop(LOADERS[name])[: len(log)]
    assert len(log) >= NUM_BATCHES * (NUM_EPOCHS - 1)


def test_the_loaders_own_state_is_not_enough():
    """The negative control: alone, it goes on with the epoch, and not with the epochs behind it."""
    log = interrupted(LOADERS["own generator"], 1, 3)
    expected = in_a_plain_loop(LOADERS["own generator"])
    assert log[: 2 * NUM_BATCHES] == expected[: 2 * NUM_BATCHES]
    assert log != expected


def test_an_epoch_that_goes_on_and_breaks_off_has_drawn_what_a_plain_loop_has():
    make = LOADERS["own generator"]
    seed_everything(1)
    loader, expected = make(), []
    train(loader, expected, 4)
    train(loader, expected)
    seed_everything(1)
    loader, log = prefetched(make), []
    train(loader, log, 2)
    loader = go_on(partial(prefetched, make), through_a_file(loader))
    train(loader, log, 2)
    train(loader, log)
    assert log == expected


def test_a_loader_that_was_built_with_other_generators_is_left_to_its_state():
    loader = prefetched(LOADERS["own generator"])
    train(loader, [], 2)
    state = loader.state_dict()
    assert [state["num_batches"], len(state["generators"])] == [2, 1]
    other = LOADERS["own generator"]()
    other.sampler.generator = torch.Generator().manual_seed(3)
    kept = other.sampler.generator.get_state()
    again = PrefetchingLoader(other, CPU)
    again.load_state_dict(copy.deepcopy(state))
    log = []
    train(again, log)
    assert len(log) == NUM_BATCHES - 2
    assert torch.equal(other.sampler.generator.get_state(), kept)
