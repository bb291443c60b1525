"""Ranks that use different parts of a sharded model hear of it while they wait for each other."""

import time

import pytest
from torch.nn import functional as F

import ranks
from parallel_training import OPTIMIZERS, batches, fresh, mean_loss
from torchfast import Plan, RankError, Trainer
from torchfast.parallel.fully_sharded import ShardedModel
from torchfast.parallel.used_parts import Used, UsedParts


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


@pytest.mark.parametrize("at", [0, 1, 2])
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


def slow_start(rank):
    """As on a GPU, where the ranks' connections take seconds: no parts are there to be told yet."""
    apply = ShardedModel.apply

    def slow(self):
        time.sleep(3)
        apply(self)
        time.sleep(3)

    ShardedModel.apply = slow
    trainer = Trainer(fresh(), OPTIMIZERS["sgd"], mean_loss, Plan(shard="fsdp"))
    first, second, *_ = batches(rank)
    trainer.step(first)
    began = time.monotonic()
    with pytest.raises(ValueError if rank else RankError, match="too many values to unpack"):
        trainer.step(first[0] if rank else second)
    waited_s = time.monotonic() - began
    time.sleep(9 * rank)  # or the other would hear of the end of this process
    return waited_s


def test_a_start_that_takes_long_is_no_obstacle():
    assert max(ranks.run(slow_start)) < 6


def between_two_steps(rank):
    """As where a device waits, and the host does not: the step is over when it is found out."""
    trainer = Trainer(fresh(), OPTIMIZERS["sgd"], mean_loss, Plan(shard="fsdp"))
    first, second, *_ = batches(rank)
    trainer.step(first)
    sharded = trainer._step.sharding._sharded
    if rank == 1:
        sharded._ran = sharded._ran[:1] + sharded._ran[2:]
    time.sleep(3)
    with pytest.raises(RankError, match=r"rank 0 has blocks\.1, rank 1 has blocks\.2"):
        trainer.step(second)
    assert len(sharded._before) == 0


def one_step_ahead(rank):
    """The second rank is in the next step already, and waits there for the first, whose device
    waits for the second.
    """
    trainer = Trainer(fresh(), OPTIMIZERS["sgd"], mean_loss, Plan(shard="fsdp"))
    first, second, *_ = batches(rank)
    trainer.step(first)
    sharded = trainer._step.sharding._sharded
    if rank == 1:
        sharded._ran = sharded._ran[:1] + sharded._ran[2:]
    began = time.monotonic()
    time.sleep(0 if rank else 12)
    with pytest.raises(RankError, match=r"rank 0 has blocks\.1, rank 1 has blocks\.2"):
        trainer.step(second)
    return time.monotonic() - began


def test_a_rank_that_is_a_step_ahead_ends_the_wait_of_both():
    _, waited_s = ranks.run(one_step_ahead)
    assert waited_s < 8


def some_steps_behind(rank):
    trainer = Trainer(fresh(), OPTIMIZERS["sgd"], mean_loss, Plan(shard="fsdp"))
    for batch in batches(rank) * 20:
        trainer.step(batch)
    sharded = trainer._step.sharding._sharded
    assert 1 < len(sharded._before) <= 64
    if rank == 1:
        number, ran = sharded._before[-2]
        sharded._before[-2] = number, [*ran, *ran]
    time.sleep(3)
    with pytest.raises(RankError, match=r", rank 1 has .*, 2 steps ago"):
        trainer.step(batches(rank)[0])


@pytest.mark.parametrize("work", [between_two_steps, some_steps_behind])
def test_what_is_found_out_behind_a_step_ends_the_next_one(work):
    ranks.run(work)


class Ran:
    def __init__(self, *used):
        self.all = list(used)

    def used(self):
        return self.all

    def number(self):
        return self.all[0].number


class Store(dict):
    set = dict.__setitem__

    def check(self, keys):
        return all(key in self for key in keys)


def compared(first, second):
    store, one, other = Store(), UsedParts(0), UsedParts(1)
    first, second = Ran(*first), Ran(*second)
    with one.told_by(first), other.told_by(second):
        assert other.difference(store) == ""  # nothing there yet
        assert one.difference(store) == ""
        return other.difference(store)


def used(number, parts, is_over=False):
    return Used((number, 1), list(parts), is_over)


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        ([used(4, "ab")], [used(4, "a")], ""),  # the beginning of the same
        ([used(4, "ab")], [used(4, "ac")], "rank 0 has b, rank 1 has c"),
        ([used(4, "ab")], [used(4, "a", True)], "rank 0 has b, rank 1 has nothing more"),
        ([used(4, "a", True)], [used(4, "ab")], "rank 0 has nothing more, rank 1 has b"),
        ([used(4, "a", True)], [used(4, "")], ""),
        ([used(5, "ab")], [used(4, "ac")], ""),  # of another forward
        (
            [used(9, "ab"), used(8, "ab", True), used(7, "ab", True)],
            [used(8, "b", True), used(7, "a", True), used(6, "x", True)],
            "rank 0 has b, rank 1 has nothing more, a step ago",
        ),
    ],
)
def test_what_is_compared(first, second, told):
    assert compared(first, second) == told


def test_where_nothing_is_in_shards_nothing_is_compared():
    store, one, other = Store(), UsedParts(0), UsedParts(1)
    assert one.number() is None
    assert one.difference(store) == other.difference(store) == ""
    with one.told_by(source := Ran(used(4, "ab"))):
        assert one.number() == (4, 1)
    assert one.number() == (4, 1)  # asked behind the step too
    del source
    assert one.number() is None
    assert store == {}
