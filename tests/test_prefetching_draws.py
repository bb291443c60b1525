"""Whose draw it was, when a generator of the host moves while a batch is fetched ahead."""

from __future__ import annotations

import random
import threading

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from simulated_device import Prompt, wait_until
from torchfast import PrefetchingLoader

SIZE = 40
THREAD = "torchfast-stager"


@pytest.fixture(autouse=True)
def prompt(device, monkeypatch):
    device.kind = Prompt
    monkeypatch.setattr("torchfast.data.stager.LOOKS_EVERY", 1)


class Samples(Dataset):
    """Notes which thread fetches; in the staging thread, one may wait for a draw of the training.

    Args:
        draws: Which samples draw.
        held: Which one waits, in the thread.
    """

    def __init__(self, draws=lambda _: False, held=None):
        self.draws, self.held = draws, held
        self.threads = []
        self.asked, self.drawn = threading.Event(), threading.Event()

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        name = threading.current_thread().name
        self.threads.append(name)
        if index == self.held and name == THREAD:
            self.asked.set()
            assert self.drawn.wait(20)
            self.drawn.clear()
        return torch.tensor(index + (random.random() if self.draws(index) else 0.0))

    def num_here(self, epoch):
        """Return how many samples of an epoch were fetched in the caller's thread."""
        names = self.threads[epoch * SIZE : (epoch + 1) * SIZE]
        assert len(names) == SIZE
        return SIZE - names.count(THREAD)


def draw_amid_a_fetch(samples, loader):
    assert samples.asked.wait(20)
    samples.asked.clear()
    torch.rand(())
    samples.drawn.set()
    wait_until(lambda: loader._feed._stager.suspects)


def run(loader, samples, epochs, *, amid=lambda _: False):
    """Draw amid the fetch that is held, in the epochs ``amid``, or else let it go on."""
    for epoch in range(epochs):
        if not amid(epoch):
            samples.drawn.set()
        for number, _ in enumerate(loader):
            if amid(epoch) and number == samples.held - 2:
                draw_amid_a_fetch(samples, loader)
    return str(loader.report())


def test_training_that_draws_once_is_not_taken_for_fetching():
    samples = Samples(held=5)
    loader = PrefetchingLoader(DataLoader(samples, 1), "cpu")
    report = run(loader, samples, 3, amid=lambda epoch: epoch == 0)
    assert loader._fetching.where == "thread"
    assert not loader._fetching.training_draws  # nobody knows; it is looked at further
    # The two at the beginning, and those that were watched.
    assert [samples.num_here(epoch) for epoch in range(3)] == [2 + 32, 1, 1]
    assert "runs ahead in a thread" in report
    assert "generators moved meanwhile (seen 1x), but by none" in report
    assert "keeps its turn" not in report


def test_training_that_draws_once_an_epoch_does_not_end_fetching_ahead(monkeypatch):
    monkeypatch.setattr("torchfast.data.stager.WATCHED", (2, 4, 8))
    samples = Samples(held=5)
    loader = PrefetchingLoader(DataLoader(samples, 1), "cpu")
    report = run(loader, samples, 5, amid=lambda epoch: epoch < 3)
    assert loader._fetching.where == "thread"
    assert loader._fetching.training_draws  # three times are enough to believe it
    assert [samples.num_here(epoch) for epoch in range(5)] == [2 + 2, 1 + 4, 1 + 8, 1, 1]
    assert "generators moved meanwhile (seen 3x), but by none" in report


def test_a_watch_goes_on_in_the_next_epoch(monkeypatch):
    monkeypatch.setattr("torchfast.data.stager.WATCHED", (50,))
    samples = Samples(held=5)
    loader = PrefetchingLoader(DataLoader(samples, 1), "cpu")
    report = run(loader, samples, 1, amid=lambda epoch: epoch == 0)
    assert "until it is known whose draw that was" in report
    assert [decision.lever for decision in loader.report().stepped_aside] == ["prefetch"]
    report = run(loader, samples, 2)
    # 34 were watched in the first epoch; each begins with one that is not.
    assert [samples.num_here(epoch) for epoch in range(3)] == [2 + 34, 1 + 16, 1]
    assert loader._fetching.where == "thread"
    assert "runs ahead in a thread" in report


@pytest.mark.parametrize("across_epochs", [True, False])
def test_a_suspicion_outlives_a_break(across_epochs):
    samples = Samples(held=5)
    loader = PrefetchingLoader(DataLoader(samples, 1), "cpu", across_epochs=across_epochs)
    for number, _ in enumerate(loader):
        if number == 3:
            draw_amid_a_fetch(samples, loader)
            break
    samples.threads.clear()
    run(loader, samples, 1)
    assert samples.num_here(0) == 1 + 32
    assert loader._fetching.where == "thread"
    loader.close()


def test_training_that_draws_at_each_step_is_known_soon():
    samples = Samples(held=5)
    loader = PrefetchingLoader(DataLoader(samples, 1), "cpu")
    for number, _ in enumerate(loader):
        if number == 3:
            draw_amid_a_fetch(samples, loader)
        elif number > 3:
            torch.rand(())
    assert loader._fetching.where == "thread"
    assert loader._fetching.training_draws
    assert samples.num_here(0) == 2 + 4


@pytest.mark.parametrize("training_draws", [True, False])
def test_a_data_set_that_draws_rarely_keeps_its_turn(training_draws):
    """One draw of the training is no proof that it drew amid the fetch, nor is none."""
    samples = Samples(draws=lambda index: index % 10 == 9)
    loader = PrefetchingLoader(DataLoader(samples, 1), "cpu")
    for number, _ in enumerate(loader):
        if number == 7:  # of those ahead, the one that draws is the last
            wait_until(lambda: loader._feed._stager.suspects)
        elif number == 8 and training_draws:
            torch.rand(())
    report = str(loader.report())
    assert loader._fetching.where == "caller"
    assert samples.threads == [threading.main_thread().name] * 2 + [THREAD] * 8 + [
        threading.main_thread().name
    ] * (SIZE - 10)
    assert "keeps its turn with the training" in report
    assert "8 batches had been fetched ahead before that was seen" in report


def test_a_data_set_that_draws_more_rarely_is_watched_longer(monkeypatch):
    monkeypatch.setattr("torchfast.data.stager.WATCHED", (4, 16))
    samples = Samples(draws=lambda index: index % 10 == 9)
    loader = PrefetchingLoader(DataLoader(samples, 1), "cpu")
    report = run(loader, samples, 1)
    assert loader._fetching.where == "caller"
    # Two, four behind sample 9, and all behind sample 19.
    assert samples.num_here(0) == 2 + 4 + 20
    assert "14 batches had been fetched ahead before that was seen" in report


def test_a_data_set_that_draws_is_found_in_a_training_that_draws():
    samples = Samples(draws=lambda index: index % 3 == 2)
    loader = PrefetchingLoader(DataLoader(samples, 1), "cpu")
    for _ in loader:
        torch.rand(())
    report = str(loader.report())
    assert loader._fetching.where == "caller"
    assert "1 batches had been fetched ahead before that was seen" in report


# -- Transforms --------------------------------------------------------------------------------


class Mixed:
    """A transform that draws from some batch on, as one does behind a warm-up, up to some batch."""

    def __init__(self, first, last=SIZE):
        self.first, self.last, self.by_number = first, last, {}

    def __call__(self, batch):
        number = int(batch)
        self.by_number.setdefault(number, threading.current_thread().name)
        return batch + (torch.rand(()) if self.first <= number <= self.last else 0)

    @property
    def threads(self):
        """The threads in which batches were transformed, in their order."""
        return [self.by_number[number] for number in sorted(self.by_number)]


def test_a_transform_that_draws_late_takes_its_turn_from_then_on():
    # A later draw, in the loop's thread, may fall into a fetch and be suspected as well.
    samples, mixed = Samples(), Mixed(5, last=6)
    loader = PrefetchingLoader(DataLoader(samples, 1), "cpu", transform=mixed)
    for number, _ in enumerate(loader):
        if number == 3:
            wait_until(lambda: loader._feed._stager.suspects)
    # The first two, and all but the one by which it was noticed.
    main = threading.main_thread().name
    assert mixed.threads == [main] * 2 + [THREAD] * 4 + [main] * (SIZE - 6)
    # Fetching itself goes on ahead.
    assert loader._fetching.where == "thread"
    assert not loader._fetching.is_suspect
    assert samples.num_here(0) == 2 + 1
    (decision,) = loader.report().stepped_aside
    assert decision.lever == "transform"
    assert "draws random numbers" in decision.detail
    assert "before that was seen" in decision.detail


def test_where_nothing_runs_ahead_a_transform_draws_as_in_a_plain_loop():
    def run(batches, mixed=lambda batch: batch):
        torch.manual_seed(0)
        return [float(mixed(batch)) + float(torch.rand(())) for batch in batches]

    data = DataLoader(Samples(), 1)
    expected = run(data, Mixed(5))
    loader = PrefetchingLoader(data, "cpu", background=False, transform=Mixed(5))
    assert run(loader) == expected


def test_training_that_draws_amid_a_fetch_leaves_the_transform_ahead():
    samples, plain = Samples(held=5), Mixed(SIZE)
    loader = PrefetchingLoader(DataLoader(samples, 1), "cpu", transform=plain)
    report = run(loader, samples, 1, amid=lambda epoch: epoch == 0)
    assert not loader._ring.finishes_late
    assert "transform" not in report
    assert THREAD in plain.threads


def test_training_that_draws_amid_staging_is_not_taken_for_the_transform():
    asked, drawn = threading.Event(), threading.Event()

    def held(batch):
        if float(batch) == 5 and threading.current_thread().name == THREAD:
            asked.set()
            assert drawn.wait(20)
        return batch + 1

    samples = Samples()
    loader = PrefetchingLoader(DataLoader(samples, 1), "cpu", transform=held)
    for number, _ in enumerate(loader):
        if number == 3:
            assert asked.wait(20)
            torch.rand(())
            drawn.set()
            wait_until(lambda: loader._feed._stager.suspects)
    assert not loader._ring.finishes_late
    assert loader._fetching.where == "thread"
    assert loader._fetching.num_cleared == 1
    assert samples.num_here(0) == 2 + 32
