"""A DataLoader that carries its state as torchdata's StatefulDataLoader does, in one process.

What it draws, and when, is what matters here. An iteration begins with an order of its own and a
seed for workers, both from the loader's generator. Its state names where the generator stood before
the order was drawn, and how many samples have come. Given a state, it begins in the same way, sets
the generator back, and draws the order again, but no seed: so from then on its generator stands
elsewhere than in a run that was never interrupted. A state from the end of an epoch is taken up
first, and a new iteration begins behind it.
"""

from __future__ import annotations

import copy

import torch
from torch.utils.data import DataLoader


class Order:
    """Which samples come, drawn when it is made; or with the first sample, if ``late``."""

    def __init__(self, loader):
        self.generator, self.size, self.late = loader.generator, len(loader.dataset), loader.late
        self.start, self.num_yielded = self.generator.get_state(), 0
        self.indices = None if self.late else self.draw()

    def draw(self):
        return torch.randperm(self.size, generator=self.generator).tolist()

    def load(self, state):
        self.start, self.num_yielded = state["start"], state["num_yielded"]
        self.generator.set_state(self.start)
        self.indices = None if self.late else self.draw()

    def take(self, count):
        if self.indices is None:
            self.indices = self.draw()
        taken = self.indices[self.num_yielded : self.num_yielded + count]
        self.num_yielded += len(taken)
        return taken


class Iteration:
    def __init__(self, loader, state):
        self.loader, self.order, self.finished = loader, Order(loader), False
        if not loader.late:  # the seed for workers
            generator = None if loader.seeds_globally else loader.generator
            torch.empty((), dtype=torch.int64).random_(generator=generator)
        if state is not None:
            self.order.load(state)
            self.finished = state["finished"]

    def __iter__(self):
        return self

    def __next__(self):
        indices = self.order.take(self.loader.batch_size)
        if not indices:
            self.finished = True
            raise StopIteration
        return self.loader.collate_fn([self.loader.dataset[index] for index in indices])

    def state_dict(self):
        order = self.order
        return {
            "start": order.start,
            "num_yielded": order.num_yielded,
            "finished": self.finished,
        }


class StatefulLoader(DataLoader):
    """Shuffles by a generator of its own, and knows where it is.

    Args:
        dataset: Of known length.
        batch_size: Samples in a batch.
        seed: Of its generator.
        seeds_globally: Draw the workers' seed from the global generator, as without ``generator=``.
        late: Draw the order with the first sample, and no seed: then its own state is exact.
    """

    def __init__(self, dataset, batch_size, seed=7, *, seeds_globally=False, late=False):
        generator = torch.Generator().manual_seed(seed)
        super().__init__(dataset, batch_size, shuffle=True, generator=generator)
        self.seeds_globally, self.late = seeds_globally, late
        self.iteration = self.loaded = None
        self.has_begun_for_state = False

    def begin(self):
        loaded, self.loaded = self.loaded, None
        self.iteration = Iteration(self, loaded)

    def __iter__(self):
        if not self.has_begun_for_state:
            self.begin()
        self.has_begun_for_state = False
        if self.iteration.finished:
            self.begin()
        return self.iteration

    def state_dict(self):
        if self.iteration is None:
            self.begin()
            self.has_begun_for_state = True
        return self.iteration.state_dict()

    def load_state_dict(self, state):
        self.iteration, self.has_begun_for_state = None, False
        self.loaded = copy.deepcopy(state)
