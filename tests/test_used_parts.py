"""Ranks that use different parts of a sharded model hear of it while they wait for each other."""

import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ranks
from parallel_training import OPTIMIZERS, batches, fresh, leaving_out, mean_loss
from torchfast import MicroBatches, Plan, RankError, Trainer
from torchfast.parallel import last_words
from torchfast.parallel.fully_sharded import ShardedModel
from torchfast.parallel.used_parts import Used, UsedParts


def skipping(rank, at):
    """In the third step the second rank leaves a block out."""
    loss_fn, steps = leaving_out(at, 3 if rank == 1 else 0)
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


LOOK_S = 0.1


@pytest.fixture
def often(monkeypatch):
    """Ranks that look often: to stand still a second is long."""
    monkeypatch.setattr(last_words, "_INTERVAL_S", LOOK_S)  # ranks are forks of this process


def trainer_of(model=None, loss_fn=mean_loss, **options):
    return Trainer(model or fresh(), OPTIMIZERS["sgd"], loss_fn, Plan(shard="fsdp"), **options)


def slow_start(rank):
    """As on a GPU, where the ranks' connections take seconds: no parts are there to be told yet."""
    apply = ShardedModel.apply

    def slow(self):
        time.sleep(1)
        apply(self)
        time.sleep(1)

    ShardedModel.apply = slow
    trainer = trainer_of()
    first, second, *_ = batches(rank)
    trainer.step(first)
    began = time.monotonic()
    with pytest.raises(ValueError if rank else RankError, match="too many values to unpack"):
        trainer.step(first[0] if rank else second)
    waited_s = time.monotonic() - began
    time.sleep(8 * rank)  # or the other would hear of the end of this process
    return waited_s


def test_a_start_that_takes_long_is_no_obstacle(often):
    assert max(ranks.run(slow_start)) < 6


def pretend(sharded, place, ran):
    """Let a rank believe that it ran something else in a step that is over."""
    if place is None:
        sharded._ran = ran(sharded._ran)
    else:
        number, was = sharded._before[place]
        sharded._before[place] = number, ran(was)


def until_it_is_found(trainer):
    words = trainer._step.ranks.last_words
    deadline = time.monotonic() + 20
    while not words.told() and time.monotonic() < deadline:
        time.sleep(0.05)


def between_two_steps(rank):
    """As where a device waits, and the host does not: the step is over when it is found out."""
    trainer = trainer_of()
    first, second, *_ = batches(rank)
    trainer.step(first)
    if rank == 1:
        pretend(trainer._step.sharding._sharded, None, lambda ran: ran[:1] + ran[2:])
    until_it_is_found(trainer)
    with pytest.raises(RankError, match=r"rank 0 has blocks\.1, rank 1 has blocks\.2"):
        trainer.step(second)


def one_step_ahead(rank):
    """The second rank is in the next step already, and waits there for the first, whose device
    waits for the second.
    """
    trainer = trainer_of()
    first, second, *_ = batches(rank)
    trainer.step(first)
    if rank == 1:
        pretend(trainer._step.sharding._sharded, None, lambda ran: ran[:1] + ran[2:])
    else:
        until_it_is_found(trainer)
    with pytest.raises(RankError, match=r"rank 0 has blocks\.1, rank 1 has blocks\.2"):
        trainer.step(second)


def some_steps_behind(rank):
    trainer = trainer_of()
    for batch in batches(rank) * 20:
        trainer.step(batch)
    sharded = trainer._step.sharding._sharded
    assert 1 < len(sharded._before) <= 64
    if rank == 1:
        pretend(sharded, -2, lambda ran: [*ran, *ran])
    until_it_is_found(trainer)
    with pytest.raises(RankError, match=r", rank 1 has .*, 2 steps ago"):
        trainer.step(batches(rank)[0])


@pytest.mark.parametrize("work", [between_two_steps, one_step_ahead, some_steps_behind])
def test_what_is_found_out_behind_a_step_ends_the_next_one(often, work):
    ranks.run(work)


def slow_words(rank):
    """The rank that finds it out ends as soon as it may."""
    leave = last_words.LastWords._leave

    def slow(self, *args, **options):
        time.sleep(1)
        leave(self, *args, **options)

    last_words.LastWords._leave = slow
    between_two_steps(rank)


def test_a_rank_that_ends_has_told_the_others(often):
    ranks.run(slow_words)


# -- What is no difference -------------------------------------------------------------------------


class Other(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.stages = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))

    def forward(self, x):
        for stage in self.stages:
            x = stage(x)
        return x


def square(model, x):
    return model(x).square().mean()


def two_models_in_turns(rank):
    one, other = trainer_of(), trainer_of(Other(), square)
    for number, batch in enumerate(batches(rank)):
        one.step(batch)
        if number == 1 and rank == 0:
            time.sleep(15 * LOOK_S)
        other.step(torch.ones(2, 4))


def one_model_behind_another(rank):
    one = trainer_of()
    for batch in batches(rank):
        one.step(batch)
    time.sleep(15 * LOOK_S)
    one.close()
    other = trainer_of(Other(), square)
    for number in range(3):
        other.step(torch.ones(2, 4))
        time.sleep(15 * LOOK_S * (number == 1 and rank == 1))


def gradients_that_are_values(rank):
    """Behind each backward torch forgets what has been gathered.

    The first rank looks less often, so what it has told last is what it had before.
    """
    last_words._INTERVAL_S = LOOK_S * (1 if rank else 4)
    calls = []

    def loss_fn(model, batch):
        tokens, targets = batch
        calls.append(batch)
        x = model.embedding(tokens)
        for block in model.blocks:
            x = block(x)
        loss = F.cross_entropy(model.head(x).flatten(0, 1), targets.flatten())
        if len(calls) == 3 and rank == 0:
            time.sleep(22 * LOOK_S)
        inner = x.detach().requires_grad_(True)
        (found,) = torch.autograd.grad(model.blocks[0](inner).square().sum(), [inner])
        z = model.blocks[1](x.detach() + found)
        if len(calls) == 3 and rank == 1:
            time.sleep(10 * LOOK_S)
        return loss + 0.1 * z.square().mean()

    trainer = trainer_of(loss_fn=loss_fn)
    for batch in batches(rank):
        trainer.step(batch)


def a_failure_in_other_places(rank):
    """A capture that the first rank gave up in a micro-batch, and the second behind the next."""
    calls = []

    def loss_fn(model, batch):
        calls.append(batch)
        x = model.embedding(batch[0])
        blocks = list(model.blocks)
        for block in blocks if len(calls) % 2 else blocks[::-1]:  # not alike in both micro-batches
            x = block(x)
        return F.cross_entropy(model.head(x).flatten(0, 1), batch[1].flatten())

    trainer = trainer_of(loss_fn=loss_fn, accumulate=2)
    batch = MicroBatches([batches(rank)[0]] * 2)
    trainer.step(batch)
    sharding = trainer._step.sharding
    sharded = sharding._sharded
    begin_step = sharded.begin_step

    def begin_and_fail(number):
        begin_step(number)
        if number == 2:
            for _ in range(1 + rank):
                model, step, forward = sharded._number
                sharded._begin_forward((model, step, forward + 1))
            sharding.after_failure()

    sharded.begin_step = begin_and_fail
    for _ in range(3):
        trainer.step(batch)
    time.sleep(15 * LOOK_S)
    trainer.step(batch)


@pytest.mark.parametrize(
    "work",
    [
        two_models_in_turns,
        one_model_behind_another,
        gradients_that_are_values,
        a_failure_in_other_places,
    ],
)
def test_ranks_that_train_alike_go_on(often, work):
    ranks.run(work)


# -- The comparison --------------------------------------------------------------------------------


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
    first, second = [Ran(*each) for each in first], [Ran(*each) for each in second]
    for parts, models in ((one, first), (other, second)):
        for model in models:
            parts.begin(model)
    assert other.difference(store) == ""  # nothing there yet
    assert one.difference(store) == ""
    return other.difference(store)


def used(step, parts, is_over=False, model=0):
    return Used((model, step, 1), list(parts), is_over)


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        ([used(4, "ab")], [used(4, "a")], ""),  # the beginning of the same
        ([used(4, "ab")], [used(4, "ac")], "rank 0 has b, rank 1 has c"),
        ([used(4, "ab")], [used(4, "a", True)], "rank 0 has b, rank 1 has nothing more"),
        ([used(4, "a", True)], [used(4, "ab")], "rank 0 has nothing more, rank 1 has b"),
        ([used(4, "a", True)], [used(4, "")], ""),
        ([used(5, "ab")], [used(4, "ac")], ""),  # of another step
        ([used(4, "ab")], [used(4, "ac", model=1)], ""),  # of another model
        (
            [used(9, "ab"), used(8, "ab", True), used(7, "ab", True)],
            [used(8, "b", True), used(7, "a", True), used(6, "x", True)],
            "rank 0 has b, rank 1 has nothing more, a step ago",
        ),
    ],
)
def test_what_is_compared(first, second, told):
    assert compared([first], [second]) == told


def test_models_that_are_trained_in_turns_are_compared_each():
    one, other = [used(3, "ab", True)], [used(2, "x", model=1)]
    assert compared([one, other], [[used(3, "ac", True)], other]) == "rank 0 has b, rank 1 has c"
    # One rank is with the other model still.
    assert compared([other, one], [other, [used(3, "ac")]]) == "rank 0 has b, rank 1 has c"
    assert compared([one], [other]) == ""


def test_where_nothing_is_in_shards_nothing_is_compared():
    store, one, other = Store(), UsedParts(0), UsedParts(1)
    other.begin(None)
    assert one.number() is None
    assert one.difference(store) == other.difference(store) == ""
    one.begin(source := Ran(used(4, "ab")))
    assert one.number() == (0, 4, 1)  # asked behind the step too
    del source
    assert one.number() is None
    assert store == {}
