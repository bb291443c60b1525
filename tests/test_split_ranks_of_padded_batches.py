"""Ranks of which one has samples whose parts do not make the whole: none of them splits those."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import ranks
from planting import Planted
from test_split_ranks import ALL, assert_same, batch_of, make
from torchfast import MicroBatches, OutOfMemoryError


def mean_of_tokens(model, batch):
    flat = 1e-3 * model(batch[0])  # whose losses are about equal, as of a fresh model
    return F.cross_entropy(flat.flatten(0, 1), batch[1].flatten(), ignore_index=-100)


def sum_of_tokens(model, batch):
    loss = F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="sum")
    num = (batch[1] >= 0).sum()
    return loss, {}, num


def even(rank, size=4, seed=0):
    """Samples that have the same counts of everything."""
    tokens, _ = batch_of(rank, size, seed)
    tokens = torch.arange(5).roll(rank + seed).expand(size, 5) + 1
    return tokens.clone(), tokens.roll(1, 1).clone()


def padded(rank, size=4, seed=0):
    tokens, targets = even(rank, size, seed)
    targets[0, 1:] = -100
    return tokens, targets


def found_later(rank, strategy):
    """Rank 0 alone has padding, and rank 1 alone runs out of memory."""
    trainer = make(strategy, {1: Planted(2 if rank else 99)}, loss_fn=mean_of_tokens, accumulate=2)
    twin = make(strategy, {}, loss_fn=mean_of_tokens, accumulate=2)
    for seed in range(2):
        group = MicroBatches([even(rank, seed=seed), even(rank, seed=seed + 1)])
        for each in (trainer, twin):
            each.step(group)
    other = padded if rank == 0 else even
    with pytest.raises(OutOfMemoryError, match=r"the gradient of some samples .* apart"):
        trainer.step(MicroBatches([even(rank), other(rank)]))
    # One group that is of no use ends nothing; what is even goes on in parts.
    group = MicroBatches([even(rank, seed=3), even(rank, seed=4)])
    for each in (trainer, twin):
        each.step(group)
    assert_same(trainer, twin)
    assert trainer.report().counters["split_steps"] == 3


def test_what_a_later_batch_of_one_rank_shows_holds_for_all():
    ranks.run(found_later, 2, "ddp")


def told_of_shards(rank, strategy):
    """Nobody can tell of a fresh model, whose gradients are spread over the ranks; it says so."""
    trainer = make(strategy, {1: Planted(2 if rank else 99)}, loss_fn=mean_of_tokens)
    for seed in range(3):
        trainer.step((even if rank else padded)(rank, seed=seed))
    assert "gradients of shards are not compared" in str(trainer.report())


@pytest.mark.parametrize("strategy", ["fsdp", "hsdp"])
def test_where_gradients_are_sharded_it_is_said(strategy):
    ranks.run(told_of_shards, 2, strategy)


def weighted(rank, strategy):
    trainer = make(strategy, {1: Planted(2 if rank else 99)}, loss_fn=sum_of_tokens)
    twin = make(strategy, {}, loss_fn=sum_of_tokens)
    for seed, batch in enumerate((even, padded, even, padded)):
        for each in (trainer, twin):
            each.step(batch(rank, seed=seed))
    assert_same(trainer, twin)
    assert trainer.report().counters["split_steps"] == 4
    assert "tried out" not in str(trainer.report())


@ALL
def test_sums_with_their_weights_are_padded_as_they_like(strategy):
    ranks.run(weighted, 2, strategy)
