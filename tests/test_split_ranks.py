"""One rank runs out of memory: all drop the step, and do it again in equally many parts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ranks
from parallel_training import Block, Own, full_state, mean_loss, summed_loss
from planting import BackwardPlant, Planted
from torchfast import (
    CUDAGraphOptions,
    MicroBatches,
    OutOfMemoryError,
    OutOfMemoryOptions,
    Plan,
    PlanError,
    RankError,
    ShardOptions,
    Trainer,
)
from torchfast._core.rank_group import RankGroup
from torchfast.graphs.together import Together
from torchfast.memory.split_ranks import SplitRanks
from torchfast.parallel import replicated
from torchfast.parallel.shared_try import SharedTry

SHARDS = {
    "ddp": ShardOptions(strategy="ddp"),
    "fsdp": ShardOptions(strategy="fsdp"),
    "hsdp": ShardOptions(strategy="hsdp", num_replicas=2),
}
SPLIT = OutOfMemoryOptions(action="split")
ALL = pytest.mark.parametrize("strategy", SHARDS)


class PlantedBlock(Block):
    plant = None

    def forward(self, x):
        if self.plant is None:
            return super().forward(x)
        out = super().forward(BackwardPlant.apply(x, self.plant, self.training))
        if self.training:
            self.plant.check(len(x), "forward")
        return out


class Net(nn.Module):
    """Plants by block; -1 is the head's, behind whose weight nothing is gathered any more."""

    def __init__(self, plants, *, with_norm=False):
        super().__init__()
        self.embedding = nn.Embedding(7, 8)
        self.norm = nn.BatchNorm1d(8) if with_norm else nn.Identity()
        self.blocks = nn.ModuleList(PlantedBlock(8) for _ in range(3))
        self.head = nn.Linear(8, 7, bias=False)
        self.unused = nn.Parameter(torch.zeros(8))
        self.unused.requires_grad_(False)
        for index, plant in plants.items():
            self.blocks[index].plant = plant

    def forward(self, tokens):
        x = self.norm(self.embedding(tokens).transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch_of(rank, size=4, seed=0):
    generator = torch.Generator().manual_seed(10 * seed + rank)
    return tuple(torch.randint(0, 7, (2, size, 5), generator=generator))


def make(strategy, plants, *, options=None, loss_fn=mean_loss, with_norm=False, **more):
    torch.manual_seed(0)
    # Without plants it is what others are compared with, and as it always was.
    options = options or (SPLIT if plants else OutOfMemoryOptions())
    plan = Plan(shard=SHARDS[strategy], out_of_memory=options)
    net = Net(plants, with_norm=with_norm)
    return Trainer(
        net, lambda p: torch.optim.AdamW(p, lr=0.01), loss_fn, plan, max_grad_norm=1.0, **more
    )


def assert_same(trainer, twin):
    mine, expected = full_state(trainer.model), full_state(twin.model)
    for name, value in expected.items():
        torch.testing.assert_close(mine[name], value, rtol=1e-4, atol=1e-6, msg=name)


PLACES = [(0, "forward"), (1, "forward"), (2, "forward"), (0, "backward"), (2, "backward")]


def trained_alike(rank, strategy):
    """Train with each plant on rank 1, and with none: the same weights."""
    for loss_fn in (mean_loss, summed_loss):
        twin = make(strategy, {}, loss_fn=loss_fn)
        expected = [twin.step(batch_of(rank, seed=seed)) for seed in range(4)]
        for index, where in PLACES:
            plant = Planted(2 if rank == 1 else 99, where)
            trainer = make(strategy, {index: plant}, loss_fn=loss_fn)
            losses = [trainer.step(batch_of(rank, seed=seed)) for seed in range(4)]
            torch.testing.assert_close(torch.stack(losses), torch.stack(expected))
            assert_same(trainer, twin)
            counters = trainer.report().counters
            told = {name: counters[name] for name in ("out_of_memory", "split_steps", "most_parts")}
            assert told == {"out_of_memory": 1, "split_steps": 4, "most_parts": 2}
            if rank == 1:
                assert plant.sizes == [4, *[2] * 8]
            trainer.close()


@ALL
def test_the_gradient_is_that_of_the_whole_step(strategy):
    ranks.run(trained_alike, 2, strategy)


def both_at_once(rank, strategy):
    twin = make(strategy, {})
    trainer = make(strategy, {0: Planted(1, "backward")} if rank else {2: Planted(2)})
    for seed in range(3):
        for each in (trainer, twin):
            each.step(batch_of(rank, seed=seed))
    assert_same(trainer, twin)
    assert trainer.report().counters["most_parts"] == 4
    assert trainer.report().counters["out_of_memory"] == 2


@ALL
def test_both_ranks_run_out_at_different_places(strategy):
    ranks.run(both_at_once, 2, strategy)


def never(rank, strategy):
    plant = Planted(0 if rank == 1 else 99)
    trainer = make(strategy, {1: plant})
    before = full_state(trainer.model)
    with pytest.raises(OutOfMemoryError, match="rank 1: a single sample does not fit") as caught:
        trainer.step(batch_of(rank))
    assert "rank 1: cpu is out of memory in the forward" in str(caught.value)
    assert (caught.value.account is None) == (rank == 0)
    for name, value in full_state(trainer.model).items():
        assert torch.equal(value, before[name])
    plant.fits, twin = 99, make(strategy, {})
    for seed in range(3):
        for each in (trainer, twin):
            each.step(batch_of(rank, 2, seed))
    assert_same(trainer, twin)
    assert "split_steps" not in trainer.report().counters or (
        trainer.report().counters["split_steps"] == 0
    )


@ALL
def test_what_never_fits_raises_on_all_ranks_and_they_go_on(strategy):
    ranks.run(never, 2, strategy)


def with_buffers(rank, strategy):
    trainer = make(strategy, {1: Planted(2 if rank == 1 else 99)}, with_norm=True)
    twin = make(strategy, {}, with_norm=True, options=SPLIT)
    twin._step.memory._guard._limit = 4 * 5 * 2  # begins in parts
    for seed in range(3):
        torch.manual_seed(seed)
        for each in (trainer, twin):
            each.step(batch_of(rank, seed=seed))
        # Those of two parts in each step, and not of the try that was dropped.
        assert int(trainer.model.norm.num_batches_tracked) == 2 * (seed + 1)
        for buffer, expected in zip(trainer.model.buffers(), twin.model.buffers(), strict=True):
            torch.testing.assert_close(buffer, expected)
    assert "out_of_memory" not in twin.report().counters
    assert_same(trainer, twin)


@ALL
def test_buffers_are_put_back(strategy):
    ranks.run(with_buffers, 2, strategy)


def of_other_sizes(rank, strategy):
    """Rank 0 has more samples than rank 1, in groups of two micro-batches."""
    sizes = (6, 3) if rank == 0 else (5, 4)
    plants = {1: Planted(3 if rank == 0 else 99)}
    trainer, twin = make(strategy, plants, accumulate=2), make(strategy, {}, accumulate=2)
    for seed in range(3):
        group = MicroBatches([batch_of(rank, size, seed) for size in sizes])
        losses = [each.step(group) for each in (trainer, twin)]
        torch.testing.assert_close(*losses)
    assert_same(trainer, twin)
    assert trainer.report().counters["split_steps"] == 3
    if rank == 0:
        assert plants[1].sizes == [6, *[3, 3, 3] * 3]


@ALL
def test_ranks_with_other_batches_and_accumulation(strategy):
    ranks.run(of_other_sizes, 2, strategy)


def one_too_small(rank, strategy):
    trainer = make(strategy, {1: Planted(1 if rank == 1 else 99)})
    with pytest.raises(OutOfMemoryError, match="would take 4 parts, and rank 0 has 2 to make"):
        trainer.step(batch_of(rank, 2 if rank == 0 else 4))
    trainer.step(batch_of(rank, 1))
    few = OutOfMemoryOptions(action="split", max_parts=2)
    trainer = make(strategy, {1: Planted(1 if rank == 0 else 99)}, options=few)
    with pytest.raises(OutOfMemoryError, match="it would take 4 parts, and max_parts=2"):
        trainer.step(batch_of(rank))


@ALL
def test_what_a_rank_cannot_make_raises_on_all(strategy):
    ranks.run(one_too_small, 2, strategy)


def sum_on_one(model, batch):
    tokens, targets = batch
    loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
    return loss if torch.distributed.get_rank() == 0 else loss / targets.numel()


def without_eval(model, batch):
    if not model.training and torch.distributed.get_rank() == 0:
        raise RuntimeError("no loss in eval mode")
    return mean_loss(model, batch)


def draws_on_one(model, batch):
    if torch.distributed.get_rank() == 1:
        torch.rand(1)
    return mean_loss(model, batch)


def checked(rank, strategy):
    trainer = make(strategy, {1: Planted(2 if rank == 1 else 99)}, loss_fn=sum_on_one)
    with pytest.raises(OutOfMemoryError, match="neither a mean over samples nor"):
        trainer.step(batch_of(rank))
    for loss_fn in (without_eval, draws_on_one):
        trainer = make(strategy, {1: Planted(2 if rank == 1 else 99)}, loss_fn=loss_fn)
        trainer.step(batch_of(rank))
        assert trainer.report().counters["split_steps"] == 1
        assert "which could not be tried out" in str(trainer.report())


@ALL
def test_what_one_rank_finds_of_the_loss_holds_for_all(strategy):
    ranks.run(checked, 2, strategy)


def known(rank, strategy):
    """Sizes that have fitted are not asked about, and one that fails then raises as ever."""
    plant = Planted(99)
    trainer = make(strategy, {1: plant})
    shared = trainer._step.sharding.shared
    asked = []
    on = shared.on
    shared.on = lambda: asked.append(len(plant.sizes)) or on()
    twin = make(strategy, {})
    for seed, size in enumerate((4, 4, 4, 2, 4, 2, 4)):
        for each in (trainer, twin):
            each.step(batch_of(rank, size, seed))
    assert asked == [0, 1, 3]  # the first one made the optimizer's state
    assert_same(trainer, twin)


@ALL
def test_a_size_that_has_fitted_is_not_asked_about(strategy):
    ranks.run(known, 2, strategy)


def with_unused(rank):
    def loss_fn(model, batch):
        extra = model.extra.sum() if torch.distributed.get_rank() == 0 else 0.0
        return mean_loss(model, batch) + extra

    made = []
    for options in (SPLIT, OutOfMemoryOptions()):
        torch.manual_seed(0)
        fits = 2 if rank == 1 and options.action == "split" else 99
        model = Net({1: Planted(fits)})
        model.extra = nn.Parameter(torch.ones(3))
        shard = ShardOptions(strategy="ddp", unused_parameters=True)
        plan = Plan(shard=shard, out_of_memory=options)
        trainer = Trainer(model, lambda p: torch.optim.SGD(p, lr=0.1), loss_fn, plan)
        for seed in range(3):
            trainer.step(batch_of(rank, seed=seed))
        made.append(trainer)
    assert_same(*made)


def test_replicas_that_do_not_use_all():
    ranks.run(with_unused)


def unused_on_one(rank):
    def loss_fn(model, batch):
        extra = model.extra.sum() if rank == 0 else 0.0
        return mean_loss(model, batch) + extra

    model = Net({})
    model.extra = nn.Parameter(torch.ones(3))
    plan = Plan(shard="ddp", out_of_memory="split")
    trainer = Trainer(model, lambda p: torch.optim.SGD(p, lr=0.1), loss_fn, plan)
    with pytest.raises(ValueError, match="the loss did not use all trained parameters"):
        trainer.step(batch_of(rank))


def test_replicas_that_have_to():
    ranks.run(unused_on_one)


def failing(model, batch):
    if torch.distributed.get_rank() == 1:
        raise KeyError("not memory")
    return mean_loss(model, batch)


def with_another_error(rank, strategy):
    trainer = make(strategy, {}, loss_fn=failing, options=SPLIT)
    with pytest.raises(KeyError if rank == 1 else RankError, match="not memory"):
        trainer.step(batch_of(rank))


def with_a_known_size(rank, strategy):
    plant = Planted(99)
    trainer = make(strategy, {1: plant})
    for seed in range(3):
        trainer.step(batch_of(rank, seed=seed))
    plant.fits = 2 if rank == 1 else 99
    said = "could not be told, since a step of this size has fitted"
    if rank == 0:
        with pytest.raises(RankError, match="rank 1: OutOfMemoryError: cpu is out of memory"):
            trainer.step(batch_of(rank))
    else:
        with pytest.raises(OutOfMemoryError, match=said):
            trainer.step(batch_of(rank))


@pytest.mark.parametrize("work", [with_another_error, with_a_known_size])
def test_what_ranks_cannot_begin_again_ends_all_of_them(work):
    ranks.run(work, 2, "fsdp")


def synced(rank):
    model = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))
    with pytest.raises(PlanError, match=r"does not go with nn.SyncBatchNorm \('1'\)"):
        Trainer(
            model,
            lambda p: torch.optim.SGD(p, lr=0.1),
            mean_loss,
            Plan(shard="ddp", out_of_memory="split"),
        )


def test_norms_that_meet_other_ranks_are_refused():
    ranks.run(synced)


def with_unequal_groups(rank):
    """Replicas may take other numbers of micro-batches."""
    trainer, twin = (
        make("ddp", {1: Planted(fits)}, accumulate=2, with_norm=True)
        for fits in (2 if rank == 1 else 99, 99)
    )
    trainer.model.norm.eval()
    twin.model.norm.eval()
    for seed in range(3):
        group = MicroBatches([batch_of(rank, 4, seed + k) for k in range(2 - rank)])
        for each in (trainer, twin):
            each.step(group)
    assert_same(trainer, twin)
    assert trainer.report().counters["split_steps"] == 3


def test_replicas_with_other_numbers_of_micro_batches():
    ranks.run(with_unequal_groups)


def timed(rank, strategy):
    """A timer of steps notes the collectives that are asked about, too."""
    trainer = make(strategy, {1: Planted(2 if rank == 1 else 99)})
    twin = make(strategy, {})
    batches = [batch_of(rank, seed=seed) for seed in range(4)]
    for each in (trainer, twin):
        each.fit(Own(batches), epochs=1)
    assert_same(trainer, twin)
    assert trainer.report().counters["split_steps"] == 4


@ALL
def test_in_fit_whose_steps_are_timed(strategy):
    ranks.run(timed, 2, strategy)


def graphed(rank):
    """Ranks that agree, and do not train together: no tape holds what they do together."""
    plan = Plan(out_of_memory="split", cuda_graph=CUDAGraphOptions(warm_up_steps=1))
    torch.manual_seed(0)
    trainer = Trainer(
        Net({1: Planted(2 if rank == 1 else 99)}),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        mean_loss,
        plan,
    )
    step, group = trainer._step, RankGroup.join(timeout_s=20)
    shared = step.sharding.shared = SharedTry(group)
    step.memory._guard._ranks = SplitRanks(shared)
    step._graph._graph._together = step._graph._together = Together(group)
    torch.manual_seed(0)
    twin = Trainer(Net({}), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), mean_loss, "eager")
    for seed in range(8):
        for each in (trainer, twin):
            each.step(batch_of(rank, seed=seed))
    assert_same(trainer, twin)
    counters = trainer.report().counters
    trainer.close()
    return counters


@pytest.mark.usefixtures("tape")
def test_steps_of_a_size_that_has_fitted_are_captured():
    for counters in ranks.run(graphed):
        assert counters["split_steps"] == 8
        assert counters["graphs"] == 1
        assert counters["replays"] >= 3


def built_on(rank):
    """A step that is asked about is begun outside of what runs it, which makes the wrapper."""
    seen, make_wrapper = [], replicated.DistributedDataParallel

    def watched(*arguments, **named):
        seen.append(trainer._step._graph._graph.backend.on_side_stream)
        return make_wrapper(*arguments, **named)

    replicated.DistributedDataParallel = watched
    plan = Plan(shard="ddp", out_of_memory="split", cuda_graph=True)
    trainer = Trainer(Net({}), lambda p: torch.optim.SGD(p, lr=0.1), mean_loss, plan)
    trainer.step(batch_of(rank))
    assert seen == [1]


@pytest.mark.usefixtures("tape")
def test_what_averages_gradients_is_built_on_the_stream_of_the_capture():
    ranks.run(built_on)
