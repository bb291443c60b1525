"""Loaders of each kind, and runs over them that end and go on."""

from __future__ import annotations

import io
import random

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler

from torchfast import MicroBatches, PrefetchingLoader
from torchfast._core.rng import get_rng_state, seed_everything, set_rng_state

CPU = torch.device("cpu")
NUM_SAMPLES, BATCH_SIZE = 11, 2
NUM_BATCHES = 6  # an epoch, the last one smaller


class Augmented(Dataset):
    """Samples of their number and of noise from every generator that a user may draw from."""

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        noise = torch.rand(()) + np.random.rand() + random.random()
        return torch.tensor(float(index)), noise.double()


class Counted(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(NUM_SAMPLES, dtype=torch.float64) + random.random())


def own_generator(**options):
    return DataLoader(
        Augmented(), BATCH_SIZE, shuffle=True, generator=torch.Generator().manual_seed(7), **options
    )


def batch_sampler():
    sampler = RandomSampler(Augmented(), generator=torch.Generator().manual_seed(5))
    return DataLoader(Augmented(), batch_sampler=BatchSampler(sampler, BATCH_SIZE, drop_last=False))


LOADERS = {
    "in order": lambda: DataLoader(Augmented(), BATCH_SIZE),
    "global shuffle": lambda: DataLoader(Augmented(), BATCH_SIZE, shuffle=True),
    "own generator": own_generator,
    "batch sampler": batch_sampler,
    "iterable data set": lambda: DataLoader(Counted(), BATCH_SIZE),
    "list": lambda: [torch.full((2,), float(i)) for i in range(NUM_BATCHES)],
}
WITH_WORKERS = {
    "workers, global shuffle": lambda: DataLoader(
        Augmented(), BATCH_SIZE, shuffle=True, num_workers=2
    ),
    "workers, own generator": lambda: own_generator(num_workers=2),
    "workers that stay": lambda: own_generator(num_workers=2, persistent_workers=True),
}


def flat(batch):
    if isinstance(batch, MicroBatches):
        return [value for part in batch for value in flat(part)]
    parts = batch if isinstance(batch, list | tuple) else [batch]
    return [value for part in parts for value in part.flatten().tolist()]


def drain(loader, log, stop_after=None):
    """Train for an epoch: note each batch, and what the training draws meanwhile."""
    for number, batch in enumerate(loader, start=1):
        log.append((flat(batch), torch.rand(()).item(), random.random()))
        if number == stop_after:
            return


def saved(loader):
    """Return what a file would hold of a run, through the file."""
    file = io.BytesIO()
    torch.save({"loader": loader.state_dict(), "rng": get_rng_state(CPU)}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def resumed(make, state, **options):
    """Return the loader of another process, which has gone its own way before."""
    seed_everything(99)
    loader = PrefetchingLoader(make(), CPU, **options)
    torch.rand(13)
    set_rng_state(state["rng"], CPU)
    loader.load_state_dict(state["loader"])
    return loader


def begun(make, **options):
    """Return the loader of a run that begins."""
    seed_everything(1)
    return PrefetchingLoader(make(), CPU, **options)


def uninterrupted(make, epochs=3, **options):
    loader, log = begun(make, **options), []
    for _ in range(epochs):
        drain(loader, log)
    return log


class Stateful:
    """What torchdata's StatefulDataLoader promises, and a state that it goes on changing."""

    def __init__(self):
        self.state = {"next": 0, "epochs": 0}

    def __iter__(self):
        while self.state["next"] < NUM_BATCHES:
            self.state["next"] += 1
            yield torch.tensor([float(self.state["next"]), float(self.state["epochs"])])
        self.state.update(next=0, epochs=self.state["epochs"] + 1)

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = dict(state)
