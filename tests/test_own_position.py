"""Loaders that go on where they are, and others that look alike and begin each epoch anew."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader

from fitting import fit
from models import make_batches
from torchfast import PrefetchingLoader, shard_loader

pytestmark = [
    pytest.mark.usefixtures("every_way"),
    pytest.mark.filterwarnings("ignore:.* is used up:UserWarning"),
]

COUNT = 12


def batches():
    return [torch.tensor([i]) for i in range(COUNT)]


class Stream:
    """Goes on from its own position, which its state tells."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        while self.at < COUNT:
            self.at += 1
            yield torch.tensor([self.at - 1])

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Endless(Stream):
    """Begins again from the start when it has come to the end, and counts how often."""

    def __init__(self):
        super().__init__()
        self.round = 0

    def __iter__(self):
        yield from super().__iter__()
        self.at, self.round = 0, self.round + 1

    def state_dict(self):
        return {"at": self.at, "round": self.round}

    def load_state_dict(self, state):
        self.at, self.round = state["at"], state["round"]


class Anew(Stream):
    """Begins each epoch anew unless it was given a state, as torchdata's do."""

    given = None

    def __iter__(self):
        self.at, self.given = self.given or 0, None
        yield from super().__iter__()

    def load_state_dict(self, state):
        self.given = state["at"]


class AnewAtOnce(Anew):
    """Begins anew in ``iter()``, whose one iterator it keeps, and tells more than its place."""

    def __init__(self):
        super().__init__()
        self.num_begun = 0

    def __iter__(self):
        self.at, self.given = self.given or 0, None
        self.num_begun += 1
        return Stream.__iter__(self)

    def state_dict(self):
        return {"at": self.at, "num_begun": self.num_begun}


class Shared:
    """Hands out one iterator."""

    def __init__(self, kind=iter):
        self.rest = kind(batches())

    def __iter__(self):
        return self.rest


class Kept:
    """Keeps the iterator that it makes for each epoch."""

    rest = None

    def __iter__(self):
        self.rest = iter(batches())
        return self.rest


class Restarting:
    """Is its own iterator, which begins again with each ``iter()``."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        self.at = 0
        return self

    def __next__(self):
        if self.at >= COUNT:
            raise StopIteration
        self.at += 1
        return torch.tensor([self.at - 1])


class GoingOn(Restarting):
    """Is its own iterator, and goes on."""

    def __iter__(self):
        """Return the rest."""
        return self


class Inherited(Restarting, Iterator):
    __iter__ = Iterator.__iter__


KINDS = {
    "restarting": Restarting,
    "going on": GoingOn,
    "going on, as inherited": Inherited,
    "a stream": Stream,
    "an endless stream": Endless,
    "anew": Anew,
    "anew at once": AnewAtOnce,
    "a shared iterator": Shared,
    "a shared generator": lambda: Shared(lambda items: (item for item in items)),
    "a shared iterator of a DataLoader": lambda: Shared(lambda x: iter(DataLoader(x, None))),
    "a kept iterator": Kept,
}


def broken_off(loader, *stops):
    """Return what loops see that end behind so many batches each; None is a whole epoch."""
    seen = []
    for stop in stops:
        seen.append([])
        for batch in loader:
            seen[-1].append(batch.item())
            if len(seen[-1]) == stop:
                break
    return seen


@pytest.mark.parametrize("stops", [(3, None), (3, 2, None, None), (COUNT - 1, 3, None), (COUNT, 2)])
@pytest.mark.parametrize("name", KINDS)
def test_a_loop_behind_a_break_gets_what_a_plain_loop_gets(name, stops):
    loader = PrefetchingLoader(KINDS[name](), "cpu", depth=3)
    assert broken_off(loader, *stops) == broken_off(KINDS[name](), *stops)


@pytest.mark.parametrize("name", ["a stream", "an endless stream"])
def test_its_position_behind_a_break_is_that_of_the_last_batch(name):
    loader = PrefetchingLoader(KINDS[name](), "cpu", depth=3)
    broken_off(loader, 3, 2)
    other = PrefetchingLoader(KINDS[name](), "cpu", depth=3)
    other.load_state_dict(loader.state_dict())
    assert broken_off(other, 2) == [[5, 6]]


def test_a_stream_that_is_told_another_epoch_begins_that():
    class Told(Anew):
        epoch = 0

        def set_epoch(self, epoch):
            self.epoch = epoch

        def state_dict(self):
            return {"at": self.at, "epoch": self.epoch}

    loader = PrefetchingLoader(Told(), "cpu", depth=3)
    loader.set_epoch(0)
    broken_off(loader, 3)
    loader.set_epoch(1)
    assert broken_off(loader, None) == [list(range(COUNT))]


class RestartingPairs(Restarting):
    def __next__(self):
        if self.at >= 4:
            raise StopIteration
        self.at += 1
        return make_batches(4)[self.at - 1]


def test_what_restarts_serves_several_epochs():
    assert fit(RestartingPairs(), epochs=2).num_steps == 8


def test_an_epoch_begins_once():
    class Shuffling(Restarting):
        def __iter__(self):
            torch.rand(())
            return super().__iter__()

    torch.manual_seed(0)
    broken_off(Shuffling(), None)
    expected = torch.get_rng_state()
    torch.manual_seed(0)
    broken_off(PrefetchingLoader(Shuffling(), "cpu"), None)
    assert torch.equal(torch.get_rng_state(), expected)


def test_what_restarts_does_so_on_each_rank_too():
    loader = PrefetchingLoader(shard_loader(Restarting(), rank=1, world_size=2), "cpu")
    assert broken_off(loader, 2, None) == [[1, 3], [1, 3, 5, 7, 9, 11]]
