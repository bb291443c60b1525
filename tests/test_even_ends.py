"""Ranks end an epoch together: as many steps on all of them, and never a hang."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

import ranks
from simulated_device import simulated
from torchfast import PrefetchingLoader, RankError
from torchfast._core.rank_group import RankGroup


class Stream(IterableDataset):
    def __init__(self, number, slow_s=0.0, breaks_at=None):
        self._number, self._slow_s, self._breaks_at = number, slow_s, breaks_at

    def __iter__(self):
        for number in range(self._number):
            time.sleep(self._slow_s)
            if number == self._breaks_at:
                raise KeyError("sample 3 is damaged")
            yield torch.tensor(number)


def batches_of(loader, **options):
    """Take all, with a step that needs every rank: it would wait for ever for a missing one."""
    found = []
    for batch in loader.iterate(**options):
        first = batch[0] if loader.accumulate > 1 else batch
        dist.all_reduce(torch.ones(1))
        found.append(first.sum().item())
    return found


def check(rank, group):
    def made(*arguments, **options):
        loader = DataLoader(Stream(*arguments), 2)
        return PrefetchingLoader(loader, "cpu", ranks=group, **options)

    # Ten batches on one, seven on the other; which of them is slow does not matter.
    for slow_s in (0.0, 0.003 * rank, 0.003 * (1 - rank)):
        loader = made((20, 14)[rank], slow_s)
        for _ in range(2):
            assert len(batches_of(loader)) == 7
            assert loader.epoch_ended
        loader.close()
    # Groups of micro-batches are as large on all ranks.
    with made((20, 14)[rank], accumulate=3) as loader:
        assert len(batches_of(loader)) == 3
    # Left in the middle, with more fetched ahead on one than on the other, and begun again.
    with made((20, 14)[rank], 0.003 * rank, depth=4) as loader:
        for _ in range(3):
            assert len(batches_of(loader, max_steps=4)) == 4
            assert not loader.epoch_ended
        assert len(batches_of(loader)) == 7
        assert len(batches_of(loader, max_steps=7)) == 7
    # Where only one of them can know that this was the last: both say so.
    sized = [torch.ones(2)] * (7 + rank)
    with PrefetchingLoader(sized, "cpu", ranks=group) as loader:
        assert len(batches_of(loader, max_steps=7)) == 7
        assert loader.epoch_ended
    # An epoch without a batch on one rank is one on all.
    with made(4 * rank) as loader:
        assert batches_of(loader) == []
    with made(4, across_epochs=True) as loader:
        batches_of(loader)
        assert "stepped aside: ranks end an epoch together" in str(loader.report())
    # An error on one is an error on all, at once, and it is its own on the rank that has it.
    for slow_s in (0.0, 0.003):
        loader = made(20, slow_s, 6 if rank == 1 else None)
        start = time.monotonic()
        with pytest.raises(KeyError if rank == 1 else RankError, match=r"sample 3|rank 1 raised"):
            batches_of(loader)
        assert time.monotonic() - start < 5
        loader.close()
    assert group.gather(rank) == [0, 1]  # and they still understand each other


def test_on_the_cpu():
    def work(rank):
        with RankGroup.join() as group:
            check(rank, group)

    ranks.run(work)


def test_through_the_ring():
    def work(rank):
        patch = pytest.MonkeyPatch()
        with RankGroup.join() as group, simulated(patch, 0.0):
            check(rank, group)
        patch.undo()

    ranks.run(work)


def test_a_batch_that_lies_ready_is_agreed_on_beside_the_step(monkeypatch):
    """In a steady state the ranks ask once a batch, and nobody waits for the answer."""
    asked = []
    least = RankGroup.least

    def counted(group, value):
        asked.append(value)
        return least(group, value)

    def work(rank):
        with RankGroup.join() as group, simulated(monkeypatch, 0.0):
            loader = DataLoader(Stream(60, 0.001), 2)
            with PrefetchingLoader(loader, "cpu", ranks=group, depth=3) as batches:
                monkeypatch.setattr(RankGroup, "least", counted)
                for _ in batches:
                    time.sleep(0.02)  # a step that takes longer than loading
                    dist.all_reduce(torch.ones(1))
        return asked

    for said in ranks.run(work):
        # 30 batches: the first few and the last are asked for again, the others once.
        assert 30 < len(said) < 52
