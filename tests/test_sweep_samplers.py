"""What a sweep over numbers of workers leaves of samplers and data sets: all as it was."""

from __future__ import annotations

import copy
import random
import threading

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, Dataset, Sampler

from torchfast import sweep_workers
from worker_data import IN_MEMORY, let_torch_count, no_process_left


@pytest.fixture(autouse=True)
def no_process_is_left(monkeypatch):
    let_torch_count(monkeypatch, 64)
    with no_process_left():
        yield


class Shuffled(Sampler):
    """Draws with all kinds of generators, and counts its epochs."""

    def __init__(self, data):
        self.data = data
        self.rng = np.random.default_rng(0)
        self.others = [torch.Generator().manual_seed(1), {"python": random.Random(2)}]
        self.epoch = 0
        self.order = np.arange(len(data))

    def __iter__(self):
        self.epoch += 1
        self.rng.shuffle(self.order)
        torch.rand(1, generator=self.others[0])
        self.others[1]["python"].random()
        return iter(self.order.tolist())

    def __len__(self):
        return len(self.data)

    def state(self):
        drawn = copy.deepcopy((self.rng, self.others))
        return (
            self.epoch,
            self.order.tolist(),
            drawn[0].random(),
            float(torch.rand(1, generator=drawn[1][0])),
            drawn[1][1]["python"].random(),
        )


class Uncopied(Shuffled):
    """Cannot be copied, and has generators in its attributes only."""

    def __init__(self, data):
        super().__init__(data)
        self.lock = threading.Lock()

    def __iter__(self):
        return iter(self.rng.permutation(len(self.data)).tolist())


class Uncopyable(Dataset):
    """A data set that must not be copied: it may be as large as memory."""

    def __init__(self):
        self.samples = [torch.zeros(1)] * 12
        self.parts = self

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]

    def __deepcopy__(self, memo):
        raise AssertionError("copied")


class Drawing(Uncopyable):
    """Augments with a generator of its own, and can be made in this process only."""

    def __init__(self):
        super().__init__()
        self.rng = np.random.default_rng(3)
        self.lock = threading.Lock()

    def __getitem__(self, index):
        return torch.tensor(self.rng.random())


@pytest.mark.parametrize("in_batches", [False, True])
@pytest.mark.parametrize("dataset", [IN_MEMORY, Uncopyable()], ids=["tensors", "uncopyable"])
def test_samplers_are_left_as_they_were(dataset, in_batches):
    sampler = Shuffled(dataset)
    before = sampler.state()
    given = {"batch_sampler": BatchSampler(sampler, 4, False)} if in_batches else {}
    found = sweep_workers(
        dataset,
        1 if in_batches else 4,
        **(given or {"sampler": sampler}),
        max_workers=1,
        budget_s=1,
    )
    assert all(row.error is None for row in found.measurements)
    assert sampler.state() == before


def test_generators_of_what_cannot_be_copied_are_put_back():
    sampler = Uncopied(IN_MEMORY)
    before = sampler.rng.bit_generator.state
    sweep_workers(IN_MEMORY, 4, sampler=sampler, max_workers=1, budget_s=1)
    assert sampler.rng.bit_generator.state == before


def test_a_data_set_that_is_measured_here_draws_as_before():
    dataset = Drawing()
    before = dataset.rng.bit_generator.state
    found = sweep_workers(
        dataset, 4, max_workers=0, budget_s=0.5, multiprocessing_context="forkserver"
    )
    assert "in this process" in " ".join(found.notes)
    assert dataset.rng.bit_generator.state == before
