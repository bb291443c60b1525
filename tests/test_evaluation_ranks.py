"""Evaluation on several ranks: each does its part, and all have what one process would have."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset, IterableDataset

import ranks
from parallel_training import OPTIMIZERS, Own, fresh, mean_loss, summed_loss
from torchfast import EmptyEpochError, Plan, PrefetchingLoader, RankError, Trainer, shard_loader

SHARDS = ["ddp", "fsdp"]


class Pairs(Dataset):
    """Thirteen samples: five batches of three, the last one of which is of one."""

    def __init__(self, count=13):
        drawn = torch.Generator().manual_seed(4)
        self.values = torch.randint(0, 7, (count, 2, 5), generator=drawn)

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        return tuple(self.values[index])


class Stream(IterableDataset):
    def __iter__(self):
        return iter(Pairs())


def with_metrics(model, batch):
    tokens, _ = batch
    held = {"late": tokens.float().mean()} if len(tokens) == 1 else {}
    # The sum of these, added up in another order, is another by rounding (before Python 3.12).
    wave = math.sin(4 * float(tokens.sum()))
    return mean_loss(model, batch), {"first": tokens[0].float().mean(), "wave": wave, **held}


LOSSES = {"mean": with_metrics, "sum": summed_loss}
LOADERS = {
    "loader": lambda: DataLoader(Pairs(), 3),
    "shuffle": lambda: DataLoader(Pairs(), 3, shuffle=True),
    "drop_last": lambda: DataLoader(Pairs(), 3, drop_last=True),
    "stream": lambda: DataLoader(Stream(), 3),
    "list": lambda: list(DataLoader(Pairs(), 3)),
    "iterator": lambda: iter(DataLoader(Pairs(), 3)),
    "one batch": lambda: DataLoader(Pairs(), 13),
}


class Counted:
    """A loss that knows how often it was asked."""

    def __init__(self, loss_fn):
        self.loss_fn, self.calls = loss_fn, 0

    def __call__(self, model, batch):
        self.calls += 1
        return self.loss_fn(model, batch)


def trainer_of(shard, loss_fn, model=None, **options):
    plan = Plan(shard=shard) if shard else "eager"
    return Trainer(model or fresh(), OPTIMIZERS["sgd"], loss_fn, plan, **options)


def evaluated(shard, loss, loader):
    torch.manual_seed(8)
    counted = Counted(LOSSES[loss])
    trainer = trainer_of(shard, counted)
    batches = LOADERS[loader]()
    before = torch.get_rng_state()
    values = [trainer.evaluate(batches)]
    assert torch.equal(before, torch.get_rng_state())
    trainer.step(next(iter(LOADERS["loader"]())))
    values.append(trainer.evaluate(LOADERS[loader]()))
    return values, counted.calls


def all_evaluated(rank):
    cases = [(loss, loader) for loss in LOSSES for loader in LOADERS]
    return {(s, *case): evaluated(s, *case) for s in SHARDS for case in cases}


@pytest.fixture(scope="module")
def found():
    return ranks.run(all_evaluated)


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("loss", LOSSES)
def test_two_ranks_have_what_one_process_has(shard, loss, loader, found):
    first, second = (of_rank[shard, loss, loader] for of_rank in found)
    expected, calls = evaluated(None, loss, loader)
    assert first[0] == second[0]  # to the bit: schedulers and whoever keeps the best decide by it
    assert list(first[0][0]) == list(expected[0])
    assert first[0][0] == pytest.approx(expected[0], rel=1e-6)
    assert first[0][1] == pytest.approx(expected[1], rel=1e-5)  # one update later
    if shard == "ddp":
        assert first[0][0] == expected[0]
    assert first[0][0].get("wave") == expected[0].get("wave")
    half = -(-(calls - 1) // 2 // 2)
    assert first[1] == second[1] == 1 + 2 * half  # a part each, and as many


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(5), nn.Linear(5, 1)

    def forward(self, batch):
        return self.head(self.norm(batch[0].float())).square().mean()


def the_rest(rank):
    """Run what needs few steps, one behind the other, in one start of the ranks."""
    return {work.__name__: {s: work(rank, s) for s in SHARDS} for work in WORKS}


def statistics(rank, shard):
    torch.manual_seed(0)
    model = Normed()
    model.norm.running_mean.fill_(rank)
    trainer = trainer_of(shard, lambda m, b: m(b), model)
    kept = {name: value.clone() for name, value in model.named_buffers()}
    trainer.evaluate(DataLoader(Pairs(), 3))
    return all(torch.equal(value, kept[name]) for name, value in model.named_buffers())


def own_parts(rank, shard):
    """Batches that ranks have divided by themselves, as many or not."""
    trainer = trainer_of(shard, mean_loss)
    batches = list(DataLoader(Pairs(), 3))
    expected = trainer.evaluate(batches)
    found = [trainer.evaluate(Own(batches[rank::2]))]
    found += [trainer.evaluate(Own(batches[:4] if rank else batches[4:]))]
    found += [trainer.evaluate(Own(batches if rank else []))]
    found += [trainer.evaluate(Own([] if rank else batches))]
    found += [trainer.evaluate(PrefetchingLoader(Own(batches[rank::2]), "cpu"))]
    whole = trainer.evaluate(PrefetchingLoader(batches, "cpu"))  # on each rank
    training = trainer.evaluate(trainer.prefetch(shard_loader(batches, rank=rank, world_size=2)))
    assert training == trainer.evaluate(batches[:4])
    return expected, [*found, whole]


def nothing(rank, shard):
    trainer = trainer_of(shard, mean_loss)
    for batches in ([], Own(), iter(())):
        with pytest.raises(EmptyEpochError, match="evaluation got no batch"):
            trainer.evaluate(batches)


def different(rank, shard):
    trainer = trainer_of(shard, mean_loss)
    batches = list(DataLoader(Pairs(), 3))
    for given, counts in (
        (batches[rank : rank + 2], "2, 2"),
        (batches[: 1 + 3 * rank], "1, 4"),
        (Own(batches) if rank else batches, "5, its own"),
        (DataLoader(Pairs(13 - rank), 3), "5, 4"),
    ):
        with pytest.raises(ValueError, match=rf"were given different batches .* {counts}\)"):
            trainer.evaluate(given)
    return trainer.evaluate(batches)


class Broken:
    """A loader that ends in an error on one rank."""

    is_sharded = True

    def __init__(self, rank, at):
        self.rank, self.at = rank, at

    def __iter__(self):
        for number, batch in enumerate(DataLoader(Pairs(), 3)):
            if self.rank == 1 and number == self.at:
                raise ZeroDivisionError("the loader")
            yield batch


def failures(rank, shard):
    """Fail on rank 1 in all places; the other is told, and both can go on."""
    own = ZeroDivisionError if rank == 1 else RankError
    fails = []

    def loss_fn(model, batch):
        loss = mean_loss(model, batch)
        if rank == 1 and fails and fails.pop() == 0:
            raise ZeroDivisionError("the metric")
        return loss

    def evaluation(model):
        if rank == 1:
            raise ZeroDivisionError("the callable")
        return {"loss": 1.0}

    batches = list(DataLoader(Pairs(), 3))
    trainer = trainer_of(shard, loss_fn)
    told = (
        r"rank 1: ZeroDivisionError: the \w+" if shard == "ddp" else "evaluation of rank 1 raised"
    )
    expected = trainer.evaluate(batches)
    with pytest.raises(TypeError if rank == 1 else RankError, match="loader must be an iterable"):
        trainer.evaluate(5 if rank == 1 else batches)
    for at in range(3):
        fails[:] = [0, *[1] * at]
        with pytest.raises(own, match=told if rank == 0 else "the metric"):
            trainer.evaluate(batches)
        assert not fails or rank == 0
        fails.clear()
    for at in (0, 3):
        with pytest.raises(own, match=told if rank == 0 else "the loader"):
            trainer.evaluate(Broken(rank, at))
    with pytest.raises(own, match="evaluation of rank 1" if rank == 0 else "the callable"):
        trainer.fit(DataLoader(Pairs(), 3), steps=1, evaluate=evaluation, progress=False)
    after = trainer.evaluate(batches)
    return expected["loss"] != after["loss"], after


def fitted(rank, shard):
    """A scheduler hears the evaluations, of which each rank does its part."""
    counted = Counted(mean_loss)
    trainer = trainer_of(
        shard, counted, lr_scheduler=lambda o: ReduceLROnPlateau(o, patience=0, threshold=0.5)
    )
    loader = DataLoader(Pairs(), 3)
    result = trainer.fit(Own(loader), steps=4, evaluate=loader, evaluate_every=1, progress=False)
    assert counted.calls == 4 + 4 * (3 if shard else 5)
    return result.evaluation, trainer.optimizer.param_groups[0]["lr"]


WORKS = (statistics, own_parts, nothing, different, failures, fitted)


@pytest.fixture(scope="module")
def rest():
    return ranks.run(the_rest)


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("work", WORKS)
def test_all_ranks_come_to_the_same(shard, work, rest):
    first, second = (of_rank[work.__name__][shard] for of_rank in rest)
    assert first == second


@pytest.mark.parametrize("shard", SHARDS)
def test_evaluation_moves_no_statistics(shard, rest):
    assert rest[0]["statistics"][shard]


@pytest.mark.parametrize("shard", SHARDS)
def test_what_ranks_divide_themselves_is_not_divided_again(shard, rest):
    expected, found = rest[0]["own_parts"][shard]
    assert all(values == pytest.approx(expected, rel=1e-6) for values in found)
    assert found[0] == expected


@pytest.mark.parametrize("shard", SHARDS)
def test_a_scheduler_heard_of_all_batches(shard, rest):
    evaluation, lr = rest[0]["fitted"][shard]
    expected, expected_lr = fitted(None, None)
    assert evaluation == pytest.approx(expected, rel=1e-4)
    assert lr == expected_lr < 0.1
