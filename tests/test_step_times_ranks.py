"""What fit tells of the collectives of two ranks, and that it changes none of them."""

from __future__ import annotations

import io
import itertools
import time
import traceback
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

import ranks
from parallel_training import OPTIMIZERS, Own, batches, fresh, full_state, mean_loss, packed
from torchfast import Float8Options, Plan, ShardOptions, Trainer
from torchfast._core.fsdp_pieces import pieces_of
from torchfast._core.reading import Marks
from torchfast.parallel import observed_shards
from torchfast.profiling.step_timer import StepTimer

STEPS = 12
LATE_S = 0.06
# Three blocks and the rest, each gathered in the forward, the blocks again in the backward.
GATHERS, REDUCES = 4 + 3, 4

SHARDS = {
    "ddp": ShardOptions(strategy="ddp", bucket_mb=0.001),  # of which the model fills several
    "fsdp": "fsdp",
    "fsdp prefetch 2": ShardOptions(strategy="fsdp", prefetch=2),
    "fsdp kept whole": ShardOptions(strategy="fsdp", reshard_after_forward=False),
    "hsdp": "hsdp",
    "hsdp of whole copies": ShardOptions(strategy="hsdp", num_replicas=2),
}
PLANS = {name: Plan(shard=shard) for name, shard in SHARDS.items()} | {
    "ddp skip": Plan(shard="ddp", nonfinite="skip"),
    "fsdp skip": Plan(shard="fsdp", nonfinite="skip"),
    "ddp unused": Plan(shard=ShardOptions(unused_parameters=True)),
    "fsdp bf16": Plan(shard="fsdp", precision="bf16"),
    "fsdp float8": Plan(
        shard="fsdp",
        precision=Float8Options(recipe="tensorwise", smallest=16, all_gather=True, emulate=True),
    ),
}


def trainer_for(plan, loss_fn=mean_loss, width=8, **options):
    options = {"max_grad_norm": 0.5, **options}
    return Trainer(fresh(width), OPTIMIZERS["adamw"], loss_fn, plan, **options)


def fitted(trainer, rank, accumulate=1):
    groups = batches(rank, accumulate=accumulate) * (STEPS // 4)
    loader = [each for group in groups for each in group] if accumulate > 1 else groups
    return trainer.fit(Own(loader), steps=STEPS, progress="off", log_every=4)


def caught(work):
    def told(rank):
        try:
            return packed(work(rank))
        except Exception:
            return packed(traceback.format_exc())

    return told


def on_two_ranks(work, **options):
    results = [torch.load(io.BytesIO(told)) for told in ranks.run(caught(work), **options)]
    for result in results:
        assert not isinstance(result, str), result
    return results


# --- it changes nothing ---------------------------------------------------------------------------


@contextmanager
def counted():
    """Yield what fills with how many collectives, waits and phases of that name each step has."""
    counts, read = [], StepTimer._read

    def counting(self, sample, *more):
        seen = sample.collectives
        parts = [part.name for part in sample.parts].count("communication")
        counts.append((len(seen.collectives), len(seen.waits), parts))
        read(self, sample, *more)

    StepTimer._read = counting
    try:
        yield counts
    finally:
        StepTimer._read = read


def timed_and_not(rank):
    with counted() as counts:
        return trained_both_ways(rank, counts)


def trained_both_ways(rank, counts):
    found = {}
    begin_step = StepTimer.begin_step
    for name, plan in PLANS.items():
        for is_timed in (True, False):
            StepTimer.begin_step = begin_step if is_timed else lambda self: None
            torch.manual_seed(1)
            trainer = trainer_for(plan, width=16 if "float8" in name else 8)
            result = fitted(trainer, rank)
            found[name, is_timed] = {
                "state": full_state(trainer.model),
                "losses": torch.tensor([r["loss"] for r in result.history if "loss" in r]),
                "times": result.step_times.to_dict(),
                "report": str(trainer.report()),
                "counts": counts[-1],
            }
            trainer.close()
    return found


@pytest.fixture(scope="module")
def trained():
    return on_two_ranks(timed_and_not, timeout_s=240)


@pytest.mark.parametrize("name", PLANS)
def test_looking_at_collectives_changes_no_bit(name, trained):
    for of_rank in trained:
        timed, plain = of_rank[name, True], of_rank[name, False]
        assert timed["times"]["communication"]["num_samples"] >= 7
        assert plain["times"].keys() == {"step"}
        assert torch.equal(timed["losses"], plain["losses"])
        for key, value in plain["state"].items():
            assert torch.equal(timed["state"][key], value), key


@pytest.mark.parametrize("name", PLANS)
def test_collectives_are_told_with_what_of_them_is_exposed(name, trained):
    for of_rank in trained:
        times = of_rank[name, True]["times"]
        total, exposed = times["communication"], times["exposed_communication"]
        assert total["source"] == "beside the step"
        assert exposed["source"] == "measured"
        assert total["num_samples"] == exposed["num_samples"] == times["forward"]["num_samples"]
        assert 0 < total["p50_ms"] < 1.5 * times["step"]["p99_ms"]
        for percentile in ("p50_ms", "p90_ms", "p99_ms"):
            assert 0 <= exposed[percentile] <= total[percentile]
            if name.startswith(("fsdp", "hsdp")):  # on the CPU nothing of it runs beside the step
                assert exposed[percentile] == total[percentile]
        assert "beside the step" in of_rank[name, True]["report"]


# --- what it tells --------------------------------------------------------------------------------


class Sparse(torch.nn.Module):
    """With buffers that are sent in each forward, and a gradient that is sparse."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(7, 8, sparse=True)
        self.norm = torch.nn.BatchNorm1d(8)
        self.head = torch.nn.Linear(8, 7)

    def forward(self, tokens):
        return self.head(self.norm(self.embedding(tokens).transpose(1, 2)).transpose(1, 2))


def sparse_and_buffers(rank):
    found = []
    begin_step = StepTimer.begin_step
    for is_timed in (True, False):
        StepTimer.begin_step = begin_step if is_timed else lambda self: None
        torch.manual_seed(0)
        plan = Plan(shard=ShardOptions(bucket_mb=0.0001))
        trainer = Trainer(Sparse(), lambda ps: torch.optim.SGD(ps, lr=0.1), mean_loss, plan)
        times = fitted(trainer, rank).step_times.to_dict()
        found.append((full_state(trainer.model), times))
    return found


def test_buffers_and_sparse_gradients_go_the_same_way():
    for of_rank in on_two_ranks(sparse_and_buffers):
        (timed, times), (plain, _) = of_rank
        assert 0 < times["exposed_communication"]["p50_ms"] <= times["communication"]["p50_ms"]
        for key, value in plain.items():
            assert torch.equal(timed[key], value), key


def one_is_late(rank):
    def loss_fn(model, batch):
        loss = mean_loss(model, batch)
        if rank == 1:
            time.sleep(LATE_S)  # at the end of its forward
        return loss

    found = {}
    for name in ("ddp", "fsdp", "hsdp", "hsdp of whole copies"):
        result = fitted(trainer_for(PLANS[name], loss_fn), rank)
        found[name] = {row.name: row.p50_ms for row in result.step_times.phases}
    return found


def test_a_rank_that_is_late_is_waited_for_in_collectives_by_the_others():
    first, late = on_two_ranks(one_is_late)
    for name, times in first.items():
        for row in ("communication", "exposed_communication"):
            assert times[row] - late[name][row] > 0.6e3 * LATE_S, (name, row, times, late[name])
        assert times["step"] > times["exposed_communication"]


def accumulated(rank):
    found = {}
    with counted() as counts:
        for name, norm in {"ddp": 0.5, "fsdp": None}.items():
            fitted(trainer_for(PLANS[name], accumulate=3, max_grad_norm=norm), rank, accumulate=3)
            found[name] = counts[-1]
    return found


def test_micro_batches_gather_each_and_reduce_once(trained):
    first, second = on_two_ranks(accumulated)
    assert first == second
    assert first["ddp"] == trained[0]["ddp", True]["counts"]
    assert first["fsdp"] == (3 * GATHERS + REDUCES, 0, 0)


def test_each_collective_is_noted_once(trained):
    first, second = ({n: r[n, True]["counts"] for n in PLANS} for r in trained)
    assert first == second
    num_buckets, num_waits, _ = first["ddp"]
    assert num_buckets > 1
    assert num_waits == 1
    # On the CPU shards are waited for where they are issued, so there are no waits by themselves.
    assert first["fsdp"] == (GATHERS + REDUCES, 0, 1)
    assert first["fsdp prefetch 2"] == first["fsdp"]
    assert first["fsdp bf16"] == first["fsdp"]
    assert first["fsdp kept whole"] == (4 + REDUCES, 0, 1)
    # One process group for the shards of each replica, of one rank each, and one for replicas.
    assert first["hsdp"] == (GATHERS + 2 * REDUCES, 0, 1)
    assert first["hsdp of whole copies"] == (REDUCES, 0, 1)
    assert first["fsdp float8"] == (GATHERS + REDUCES, 0, 2)
    num_collectives, _, num_parts = first["ddp skip"]
    assert num_collectives == 1  # one bucket of the usual size
    assert num_parts > 0
    assert first["fsdp skip"][2] > 1


def waited_for(rank):
    """Run as on a device, where what shards issue has queues of its own."""
    found = {}
    read, queue = StepTimer._read, Marks.queue

    def looking(self, sample, *more):
        seen = sample.collectives
        waited = [id(each) for wait in seen.waits for each in wait.collectives]
        counts.append((len(seen.collectives), len(waited), len(set(waited)), len(seen.waits)))
        read(self, sample, *more)

    StepTimer._read = looking
    numbers = itertools.count()
    Marks.queue = lambda self: next(numbers)
    for name in ("fsdp", "fsdp prefetch 2", "fsdp kept whole", "hsdp", "hsdp of whole copies"):
        counts = []
        times = fitted(trainer_for(PLANS[name]), rank).step_times
        found[name] = counts[-1]
        assert times["exposed_communication"].p50_ms < times["communication"].p50_ms
    StepTimer._read, Marks.queue = read, queue
    return found


def test_beside_the_step_each_collective_of_shards_is_waited_for_once():
    first, second = on_two_ranks(waited_for)
    assert first == second
    for name, (num_collectives, num_waited_for, num_different, num_waits) in first.items():
        assert num_collectives == num_waited_for == num_different, name
        assert num_waits > 0, name
    # A wait for each gather, for each reduction before the next one, and for the rest at the end.
    assert first["fsdp"][3] == 7 + 3 + 1
    assert first["hsdp of whole copies"][3] == 1  # nothing to gather, nothing before the next


# --- it leaves nothing behind ---------------------------------------------------------------------


def left_behind(rank):
    found = {}
    for name in ("ddp", "fsdp", "hsdp"):
        trainer = trainer_for(PLANS[name])
        fitted(trainer, rank)
        sharding = trainer._step.sharding
        if name == "ddp":
            wrapped = sharding._replicated._wrapped
            found[name] = wrapped.process_group is dist.group.WORLD
            continue
        pieces = list(pieces_of(trainer.model))
        found[name] = (
            len(pieces) == 4
            and all(hasattr(piece, each) for piece in pieces for each in observed_shards._WAITS)
            and not any(each in vars(piece) for piece in pieces for each in observed_shards._WAITS)
            and all(type(p._all_gather_comm).__name__ == "DefaultAllGather" for p in pieces)
            and all(type(p._reduce_scatter_comm).__name__ == "DefaultReduceScatter" for p in pieces)
            and all(piece._all_reduce_hook is None for piece in pieces)
        )
    return found


def test_behind_a_step_that_is_looked_at_all_is_as_it_was():
    for of_rank in on_two_ranks(left_behind):
        assert of_rank == {"ddp": True, "fsdp": True, "hsdp": True}


def failing(rank):
    """A loss that fails in a step that is looked at, once, and training that goes on."""
    found = {}
    for name in ("ddp", "fsdp"):
        calls = []

        def loss_fn(model, batch):
            calls.append(batch)  # noqa: B023
            if len(calls) == 4:  # noqa: B023
                raise ArithmeticError("once")
            return mean_loss(model, batch)

        trainer = trainer_for(PLANS[name], loss_fn)
        with pytest.raises(ArithmeticError):
            fitted(trainer, rank)
        for batch in batches(rank):
            trainer.step(batch)
        result = fitted(trainer, rank)
        found[name] = result.step_times["communication"].num_samples
    return found


def test_a_step_that_fails_leaves_it_to_the_next():
    for of_rank in on_two_ranks(failing):
        assert min(of_rank.values()) >= 7


@pytest.mark.parametrize("shard", [None, "ddp", "fsdp"])
def test_one_process_has_no_such_rows(shard):
    trainer = trainer_for(Plan(shard=shard))
    times = fitted(trainer, 0).step_times.to_dict()
    assert "forward" in times
    assert not times.keys() & {"communication", "exposed_communication"}


def other_torch(rank):
    """A torch whose pieces wait by other methods."""
    observed_shards._WAITS = (*observed_shards._WAITS, "a_method_of_a_later_torch")
    return fitted(trainer_for(PLANS["fsdp"]), rank).step_times.to_dict()


def test_where_the_waits_are_not_known_only_the_collectives_are_told():
    for times in on_two_ranks(other_torch):
        assert times["communication"]["p50_ms"] > 0
        assert "exposed_communication" not in times


def replicas(rank):
    trainer = trainer_for(PLANS["ddp"])
    for batch in batches(rank) * 26:
        trainer.step(batch)
    wrapped = trainer._step.sharding._replicated._wrapped
    return wrapped._get_ddp_logging_data()["iteration"]  # the last one of which it has kept times


def test_torch_waits_for_no_times_of_its_own_behind_the_first_steps():
    """It does in the first ten and in each hundredth, and on a GPU the host waits for them."""
    for iteration in on_two_ranks(replicas):
        assert iteration <= 10
