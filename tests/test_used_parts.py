"""Ranks that use different parts of a sharded model hear of it while they wait for each other."""

import time

import pytest
from torch.nn import functional as F

import ranks
from parallel_training import OPTIMIZERS, batches, fresh, mean_loss
from torchfast import Plan, RankError, Trainer
from torchfast.parallel.used_parts import UsedParts


def skipping(rank, at):
    """From the third step on the second rank leaves a block out."""
    steps = []

    def loss_fn(model, batch):
        tokens, targets = batch
        steps.append(batch)
        x = model.embedding(tokens)
        for number, block in enumerate(model.blocks):
            if not (rank == 1 and number == at and len(steps) == 3):
                x = block(x)
        return F.cross_entropy(model.head(x).flatten(0, 1), targets.flatten())

    trainer = Trainer(fresh(), OPTIMIZERS["sgd"], loss_fn, Plan(shard="fsdp"))
    began = time.monotonic()
    first, *rest = batches(rank)
    trainer.step(first)
    trainer.step(rest[0])
    with pytest.raises(RankError, match=f"rank 0 has blocks.{at}, rank 1 has ") as caught:
        trainer.step(rest[1])
    assert len(steps) == 3
    return str(caught.value), time.monotonic() - began


@pytest.mark.parametrize("at", [0, 1])
def test_a_block_that_one_rank_leaves_out_is_told_at_once(at):
    for told, seconds in ranks.run(skipping, 2, at):
        assert "the ranks used different parts of the model in a step" in told
        assert seconds < ranks.GROUP_TIMEOUT_S / 2


def slow(rank):
    """A rank that is late has the beginning of what the others have, in the forward and behind."""
    trainer = Trainer(fresh(), OPTIMIZERS["sgd"], mean_loss, Plan(shard="fsdp"))
    first, second, *_ = batches(rank)
    trainer.step(first)
    hook = trainer.model.blocks[1].register_forward_pre_hook(lambda *_: time.sleep(3 * rank))
    trainer.step(second)
    hook.remove()
    time.sleep(3 - 3 * rank)
    return float(trainer.step(second))


def test_a_rank_that_is_late_is_waited_for():
    assert all(loss > 0 for loss in ranks.run(slow))


class Ran:
    def __init__(self, number, names):
        self.now = (1, number), names

    def used(self):
        return self.now


class Store(dict):
    set = dict.__setitem__

    def check(self, keys):
        return all(key in self for key in keys)


def test_what_is_compared():
    store, first, second = Store(), UsedParts(0), UsedParts(1)
    assert first.difference(store, 1) == second.difference(store, 1) == ""
    assert first.number() is None
    with first.told_by(Ran(4, ["a", "b"])), second.told_by(ran := Ran(4, ["a"])):
        assert second.difference(store, 1) == ""  # nothing there yet
        assert first.difference(store, 1) == ""
        assert second.difference(store, 1) == ""  # the beginning of the same
        ran.now = (1, 4), ["a", "c"]
        assert second.difference(store, 1) == "rank 0 has b, rank 1 has c"
        assert second.difference(store, 2) == ""  # of another body
        ran.now = (2, 4), ["a", "c"]
        assert second.difference(store, 1) == ""  # of another forward
        ran.now = None
        assert second.number() is None
    assert second.difference(store, 1) == ""
