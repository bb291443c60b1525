"""Loaders that draw random numbers, and a loop over one that draws too."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from torchfast import PrefetchingLoader
from torchfast._core.rng import get_rng_state, seed_everything

CPU = torch.device("cpu")


class Plain(Dataset):
    def __len__(self):
        return 23

    def __getitem__(self, index):
        return torch.tensor(float(index))


class Augmented(Plain):
    def __getitem__(self, index):
        return index + torch.rand(()) + random.random() + np.random.rand()


class Stream(IterableDataset):
    def __iter__(self):
        order = torch.randperm(23)
        return iter(order.float())


LOADERS = {
    "in order": lambda: DataLoader(Plain(), 2),
    "shuffled": lambda: DataLoader(Plain(), 2, shuffle=True),
    "augmented": lambda: DataLoader(Augmented(), 2, shuffle=True),
    "iterable": lambda: DataLoader(Stream(), 2),
    "workers": lambda: DataLoader(Augmented(), 2, shuffle=True, num_workers=2),
    "workers that stay": lambda: DataLoader(
        Augmented(), 2, shuffle=True, num_workers=1, persistent_workers=True
    ),
}


def trained(make, device, epochs=3, training_draws=True, **options):
    """Return what a loop saw and drew, and where the generators are in the end."""
    seed_everything(5)
    loader = make()
    if device is not None:
        loader = PrefetchingLoader(loader, "cpu", **options)
    log = []
    for _ in range(epochs):
        for batch in loader:
            if device is not None:
                device.transports[0].consumer.synchronize()
            log.append(batch.tolist())
            if training_draws:
                log.append((torch.rand(()).item(), random.random()))
    return log, get_rng_state(CPU), loader
