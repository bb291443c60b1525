"""Batches dealt out whole: each once, as one process makes them, and as many on each rank."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SequentialSampler,
    Subset,
    TensorDataset,
)

from torchfast import build_dataloader, shard_loader
from torchfast.data.whole_batches import DealtBatches


class Stream(IterableDataset):
    def __iter__(self):
        return iter([random.random() for _ in range(7)])


class Drawn(Sampler):
    """Draws each sample when it is asked for it."""

    def __len__(self):
        return 7

    def __iter__(self):
        return (random.randrange(100) for _ in range(7))


class Endless(Sampler):
    def __iter__(self):
        return (random.randrange(100) for _ in itertools.count())


class Augmented(Dataset):
    """Draws from the generator that samplers may draw from."""

    def __len__(self):
        return 100

    def __getitem__(self, index):
        random.random()
        return index


class Cycled(DataLoader):
    """Has iterated when it is made, so its sampler is not asked again; several libraries do so."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.running = super().__iter__()

    def __iter__(self):
        return self.running


def generator():
    return torch.Generator().manual_seed(5)


MAKERS = {
    "in order": lambda: DataLoader(range(13), 3),
    "drop_last": lambda: DataLoader(range(13), 3, drop_last=True),
    "shuffle": lambda: DataLoader(range(13), 2, shuffle=True),
    "generator": lambda: DataLoader(range(13), 2, shuffle=True, generator=generator()),
    "sampler": lambda: DataLoader(Augmented(), 2, sampler=Drawn()),
    "batch sampler": lambda: DataLoader(range(9), batch_sampler=[[0, 1], [2], [3, 4, 5]]),
    "wrapped sampler": lambda: DataLoader(
        Augmented(), batch_sampler=BatchSampler(Drawn(), 2, drop_last=False)
    ),
    "no batches": lambda: DataLoader(range(5), batch_size=None),
    "stream": lambda: DataLoader(Stream(), 2),
    "own loop": lambda: Cycled(range(9), 2),
    "list": lambda: [torch.tensor(number) for number in range(5)],
    "iterator": lambda: iter(range(5)),
    "one": lambda: [torch.ones(2)],
    "none": list,
}


def plain(batches):
    return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in batches]


def of_rank(make, rank, size, seed=3):
    """Return what a rank gets, whether it ends with a stand-in, and what it tells."""
    random.seed(seed)
    torch.manual_seed(seed)
    dealt = DealtBatches(make(), rank, size)
    return plain(dealt.loader), dealt.ends_with_stand_in, dealt.told()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", MAKERS)
def test_the_ranks_together_have_each_batch_of_one_process_once(name, size):
    random.seed(3)
    torch.manual_seed(3)
    expected = plain(MAKERS[name]())
    if name in ("sampler", "wrapped sampler"):
        # One process draws an order between samples; ranks draw all of it first.
        expected = of_rank(MAKERS[name], 0, 1)[0]
        assert len(expected) == 4
    found = [of_rank(MAKERS[name], rank, size) for rank in range(size)]
    assert len({len(batches) for batches, _, _ in found}) == 1  # as many forwards
    counted = [batches[:-1] if padded else batches for batches, padded, _ in found]
    rounds = itertools.zip_longest(*counted)
    assert [batch for each in rounds for batch in each if batch is not None] == expected
    assert len({told for _, _, told in found}) == 1
    assert found[0][2][0] == len(expected)
    for batches, padded, _ in found:
        if padded:
            assert batches[-1] == found[0][0][-1]


def test_what_was_given_stays_and_keeps_its_workers_to_itself():
    given = DataLoader(TensorDataset(torch.arange(6)), 2, in_order=False, num_workers=0)
    before = dict(vars(given))
    dealt = DealtBatches(given, 1, 2)
    assert vars(given) == before
    assert type(dealt.loader) is DataLoader
    assert dealt.loader.dataset is given.dataset
    assert dealt.loader.in_order  # else a stand-in might not come last
    assert len(dealt.loader) == 2
    first, second = plain(each for (each,) in dealt.loader), plain(each for (each,) in dealt.loader)
    assert first == second == [[2, 3], [4, 5]]
    assert dealt.ends_with_stand_in


def test_a_stream_has_the_order_of_its_workers_not_of_their_haste():
    given = DataLoader(Stream(), 2, num_workers=2, in_order=False)
    dealt = DealtBatches(given, 0, 2)
    assert dealt.loader._items.in_order
    assert not given.in_order
    given = DataLoader(Stream(), 2, num_workers=2)
    assert DealtBatches(given, 0, 2).loader._items is given  # whose worker processes may stay


def test_a_loader_of_our_own_loads_only_its_batches():
    loaded = []

    class Counted(Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            loaded.append(index)
            return index

    given = build_dataloader(Counted(), 2, num_workers=0, device="cpu")
    assert plain(DealtBatches(given, 1, 2).loader) == [[2, 3], [6, 7]]
    assert loaded == [2, 3, 6, 7]


def test_what_is_divided_already_is_taken_as_it_is():
    data = list(range(8))

    class Own(list):
        is_sharded = True

    for batches in (
        DataLoader(data, 2, sampler=DistributedSampler(data, 2, 1)),
        shard_loader(DataLoader(data, 2), rank=1, world_size=2),
        Own([1, 2]),
    ):
        dealt = DealtBatches(batches, 1, 2)
        assert dealt.loader is batches
        assert not dealt.is_dealt
        assert not dealt.ends_with_stand_in
        assert dealt.told() == (0, "")
    with pytest.raises(ValueError, match="divides the data by 3, and there are 2 ranks"):
        DealtBatches(DataLoader(data, sampler=DistributedSampler(data, 3, 1)), 0, 2)


def half(rank):
    return Subset(range(8), range(rank, 8, 2))


DIFFERENT = {
    "length": lambda rank: [torch.ones(2)] * (2 + rank),
    "values": lambda rank: [{"x": torch.full((2,), float(rank))}] * 2,
    "numbers": lambda rank: [("a", rank)],
    "order": lambda rank: DataLoader(range(99), 2, sampler=torch.randperm(99).tolist()),
    "halves": lambda rank: DataLoader(half(rank), 2),
    "tensors": lambda rank: DataLoader(TensorDataset(torch.arange(4) + rank), 2),
    "half a length": lambda rank: DataLoader(range(8 - rank), 2, sampler=SequentialSampler([1])),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_differs_between_ranks_is_seen(name):
    told = [of_rank(lambda r=r: DIFFERENT[name](r), r, 2, seed=r)[2] for r in range(2)]
    assert told[0] != told[1]
    again = [of_rank(lambda: DIFFERENT[name](0), r, 2, seed=0)[2] for r in range(2)]
    assert again[0] == again[1]


def test_batches_that_tell_nothing_are_no_hindrance():
    odd = [
        torch.zeros(0),
        torch.tensor(1.0),
        torch.zeros(2, dtype=torch.complex64),
        torch.zeros(3, 2).to_sparse(),
        torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)], layout=torch.jagged),
        torch.zeros(2, device="meta"),
        torch.zeros(4, 4, dtype=torch.bfloat16).t(),
        object(),
        None,
    ]
    first, second = (of_rank(lambda: [odd], rank, 2)[2] for rank in range(2))
    assert first == second
    assert first[0] == 1


def test_a_sampler_without_an_end(monkeypatch):
    from torchfast.data import sharded

    monkeypatch.setattr(sharded, "_MOST_DRAWN", 100)
    with pytest.raises(ValueError, match=r"the sampler \(Endless\) has no end after 100 samples"):
        of_rank(lambda: DataLoader(range(100), 2, sampler=Endless()), 0, 2)
