"""What two ranks train on: each sample of an epoch once, or an error that says why not."""

from __future__ import annotations

import itertools
import os
import random
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    get_worker_info,
)

import ranks
from torchfast import Plan, RankError, Trainer, shard_loader
from torchfast.data import even_ends, sharded_batches

SAMPLES = torch.arange(12.0).unsqueeze(1)


class Shuffled(IterableDataset):
    def __iter__(self):
        return iter(random.sample(list(SAMPLES), len(SAMPLES)))


class ByWorker(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        return iter(SAMPLES[info.id :: info.num_workers])


class ByRank(IterableDataset):
    """Divides itself, and does not say so."""

    def __iter__(self):
        return iter(SAMPLES[int(os.environ["RANK"]) :: 2])


class Divided(ByRank):
    is_sharded = True


class Cycled(DataLoader):
    """Asks its sampler once for all epochs."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.running = itertools.chain.from_iterable(DataLoader.__iter__(self) for _ in range(9))

    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.running)


def generator(seed):
    return torch.Generator().manual_seed(seed)


# Of the number of the rank.
RIGHT = {
    "in order": lambda _: DataLoader(SAMPLES, 2),
    "shuffle": lambda _: DataLoader(SAMPLES, 2, shuffle=True),
    "generator": lambda _: DataLoader(SAMPLES, 2, shuffle=True, generator=generator(5)),
    "sampler": lambda _: DataLoader(SAMPLES, 2, sampler=SubsetRandomSampler(range(12))),
    "batch sampler": lambda _: DataLoader(
        SAMPLES, batch_sampler=BatchSampler(RandomSampler(SAMPLES), 2, drop_last=False)
    ),
    "own batch sampler": lambda _: DataLoader(SAMPLES, batch_sampler=torch.arange(12).split(3)),
    "no batches": lambda _: DataLoader(SAMPLES, batch_size=None, shuffle=True),
    "divided": lambda rank: DataLoader(
        SAMPLES, 2, sampler=DistributedSampler(SAMPLES, 2, rank, shuffle=True)
    ),
    "divided before": lambda rank: shard_loader(DataLoader(SAMPLES, 2), rank=rank, world_size=2),
    "stream": lambda _: DataLoader(Shuffled(), 2),
    "workers": lambda _: DataLoader(ByWorker(), 2, num_workers=2, in_order=False),
    "divided stream": lambda _: DataLoader(Divided(), 2),
    "own loop": lambda _: Cycled(SAMPLES, 2, shuffle=True),
    "list": lambda _: SAMPLES.split(3),
}

WRONG = {
    "generators differ": lambda rank: DataLoader(
        SAMPLES, 2, shuffle=True, generator=generator(rank)
    ),
    "orders differ": lambda _: DataLoader(SAMPLES, 2, sampler=torch.randperm(12).tolist()),
    "divided by hand": lambda rank: DataLoader(Subset(SAMPLES, range(rank, 12, 2)), 2),
    "other tensors": lambda rank: DataLoader(TensorDataset(SAMPLES[rank::2]), 2),
    "other lengths": lambda rank: DataLoader(SAMPLES[rank:], 2),
    "divided stream": lambda _: DataLoader(ByRank(), 2),
    "other batches": lambda rank: (batch for batch in SAMPLES[rank::2].split(1)),
    "one is divided": lambda rank: DataLoader((ByRank, Divided)[rank](), 2),
}


def trainer():
    model = nn.Linear(1, 1)
    return Trainer(
        model,
        partial(torch.optim.SGD, lr=0.01),
        lambda model, batch: model(batch).sum(),
        plan=Plan(shard="ddp"),
    )


def run(work):
    """Run it on two ranks that begin with the same random numbers, as a script's do."""

    def seeded(rank):
        torch.manual_seed(0)
        random.seed(rank)
        return work(rank, trainer())

    return ranks.run(seeded)


def test_each_sample_of_an_epoch_comes_once_and_on_one_rank():
    def work(rank, training):
        found = {}
        for name, make in RIGHT.items():
            batches = training.prefetch(make(rank))
            found[name] = [[b.flatten().tolist() for b in batches] for _ in range(2)]
        return found

    first, second = run(work)
    for name in RIGHT:
        for one, two in zip(first[name], second[name], strict=True):
            assert len(one) == len(two), name
            samples = itertools.chain(*one, *two)
            assert sorted(samples) == SAMPLES.flatten().tolist(), name


def test_ranks_that_were_given_different_data_hear_of_it():
    def work(rank, training):
        for name, make in WRONG.items():
            with pytest.raises(ValueError, match="given different data to train on") as caught:
                training.fit(make(rank), steps=1, progress=False)
            texts = training._step.ranks.group.gather(str(caught.value))
            assert texts[0] == texts[1], name
            assert "is_sharded = True on what holds a rank's own" in texts[0]
            told = texts[0].partition("(by rank: ")[2].partition(")")[0].split(", ")
            assert len(told) == 2, name
            assert (told[1] == "DataLoader as it is") == (name == "one is divided")
        return training.fit(DataLoader(SAMPLES, 2), steps=1, progress=False).num_steps

    assert run(work) == [1, 1]


def test_streams_that_begin_to_differ_are_noticed(monkeypatch):
    """One that is shuffled again and again in one epoch, each rank by itself."""
    monkeypatch.setattr(sharded_batches, "EVERY", 8)
    monkeypatch.setattr(even_ends, "EVERY", 8)

    class Again(IterableDataset):
        def __iter__(self):
            while True:
                yield from random.sample(list(SAMPLES), len(SAMPLES))

    class Alike(Again):
        def __iter__(self):
            draws = random.Random(5)
            while True:
                yield from draws.sample(list(SAMPLES), len(SAMPLES))

    def work(rank, training):
        alike = training.fit(DataLoader(Alike()), steps=20, progress=False).num_steps
        batches = training.prefetch(DataLoader(Again()))
        with pytest.raises(ValueError, match="given different data to train on"):
            (seen := []).extend(itertools.islice(batches, 20))
        return alike, len(seen)

    assert run(work) == [(20, 8), (20, 8)]


def test_a_loader_that_fails_is_told_before_data_are_compared():
    class Failing(IterableDataset):
        def __iter__(self):
            raise KeyError("no such file")

    def work(rank, training):
        given = DataLoader(Failing() if rank else Shuffled(), 2)
        with pytest.raises(KeyError if rank else RankError):
            training.fit(given, steps=1, progress=False)
        return training.fit(DataLoader(SAMPLES, 2), epochs=1, progress=False).num_steps

    assert run(work) == [3, 3]


@pytest.mark.parametrize("name", ["stream", "own batch sampler"])
def test_a_run_over_them_goes_on_exactly(name, tmp_path):
    """Stopped in the middle of the second epoch."""

    def fitted(rank, folder, *stops):
        for steps in stops:
            torch.manual_seed(1)
            training = trainer()
            options = {"checkpoint": tmp_path / folder, "progress": False}
            training.fit(RIGHT[name](rank), steps=steps, **options)
            random.seed(99)  # none of which is to be seen
        return training.model.state_dict()

    def work(rank, _):
        whole, parts = fitted(rank, "whole", 7), fitted(rank, "parts", 2, 5, 7)
        return all(torch.equal(whole[key], parts[key]) for key in whole)

    assert run(work) == [True, True]


def test_ragged_ends():
    """By sample the first ones come again, of whole batches the rest is left out."""

    def work(rank, training):
        given = [DataLoader(SAMPLES[:7], 2), list(SAMPLES[:7])]
        return [[b.flatten().tolist() for b in training.prefetch(each)] for each in given]

    first, second = run(work)
    assert [first[0], second[0]] == [[[0, 2], [4, 6]], [[1, 3], [5, 0]]]
    assert [first[1], second[1]] == [[[0], [2], [4]], [[1], [3], [5]]]
