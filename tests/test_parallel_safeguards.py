"""What would train wrongly, or wait for ever, on several ranks, and does not."""

import os
import signal
import threading
import time
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import ranks
from parallel_training import OPTIMIZERS, Own, batches, fresh, mean_loss
from torchfast import (
    CompileOptions,
    MicroBatches,
    Plan,
    PlanError,
    RankError,
    ShardOptions,
    Trainer,
)
from torchfast._core import rank_group
from torchfast._core.rank_group import RankGroup
from torchfast.graphs.replay_check import find_mismatch
from torchfast.graphs.together import Together

WHOLE = ShardOptions(strategy="fsdp", reshard_after_forward=False)


def trainer_of(model, shard, loss_fn=mean_loss, **options):
    return Trainer(model, OPTIMIZERS["sgd"], loss_fn, Plan(shard=shard), **options)


def net_with(tie):
    model = fresh()
    tie(model)
    return model


def tie_blocks(model):
    model.blocks[2].up.weight = model.blocks[0].up.weight


def tie_head(model):
    model.head.weight = model.embedding.weight


def one_block(model):
    model.blocks = nn.ModuleList([model.blocks[0]] * 3)


def add_unused(model):
    model.extra = nn.Linear(3, 3)


def refused(call):
    with pytest.raises(PlanError) as caught:
        call()
    return str(caught.value)


def all_refusals(rank):
    other = nn.Parameter(torch.ones(7))
    step = trainer_of(net_with(add_unused), "ddp").step
    before = list(batches(rank))
    return {
        "blocks": refused(lambda: trainer_of(net_with(tie_blocks), "fsdp")),
        "head": refused(
            lambda: trainer_of(net_with(tie_head), ShardOptions(strategy="fsdp", blocks=("head",)))
        ),
        "others": refused(
            lambda: Trainer(
                fresh(),
                lambda ps: torch.optim.SGD([*ps, other], lr=0.1),
                mean_loss,
                Plan(shard="ddp"),
            )
        ),
        "unused": refused(lambda: step(before[0])),
    }


def test_what_would_train_wrongly_is_refused():
    for told in ranks.run(all_refusals):
        assert "'blocks.0.up.weight' and 'blocks.2.up.weight' are one parameter" in told["blocks"]
        assert "'embedding.weight' and 'head.weight' are one parameter" in told["head"]
        assert "1 parameters that are not the model's (of shape (7,))" in told["others"]
        assert "trained parameters (extra.weight, extra.bias)" in told["unused"]
        assert "unused_parameters=True" in told["unused"]


def test_a_search_that_each_rank_would_end_by_itself_is_refused():
    options = CompileOptions(mode="auto")
    with pytest.raises(PlanError, match=r"mode='auto'\) does not go with shard"):
        Plan(shard="ddp", compile=options)
    Plan(compile=options)
    Plan(shard="ddp", compile="auto")


def losses_of(trainer, rank):
    return [float(trainer.step(batch)) for batch in batches(rank)]


def all_trained(rank):
    found = {}
    for name, tie in (("tied", tie_head), ("one block", one_block)):
        for shard in ("ddp", "fsdp"):
            found[name, shard] = losses_of(trainer_of(net_with(tie), shard), rank)
    unused = trainer_of(net_with(add_unused), ShardOptions(unused_parameters=True))
    found["unused"] = losses_of(unused, rank)

    model = fresh()
    for _ in range(2):  # a second trainer of the same model
        trainer = trainer_of(model, "ddp")
        losses_of(trainer, rank)
        trainer.close()
    model.blocks[0].requires_grad_(False)
    losses_of(trainer_of(model, "ddp"), rank)
    found["weights"] = sum(p.sum().item() for p in model.parameters())
    return found


def test_tied_frozen_and_unused_parameters_and_a_second_trainer():
    first, second = ranks.run(all_trained)
    for found in (first, second):
        for name in ("tied", "one block"):
            assert found[name, "ddp"] == pytest.approx(found[name, "fsdp"], rel=1e-5)
    assert first["weights"] == second["weights"]
    for name, tie in (("tied", tie_head), ("one block", one_block)):
        alone = Trainer(net_with(tie), OPTIMIZERS["sgd"], mean_loss, "eager", accumulate=2)
        expected = [float(alone.step(batch)) for batch in batches(None)]
        pairs = zip(first[name, "ddp"], second[name, "ddp"], strict=True)
        assert [(a + b) / 2 for a, b in pairs] == pytest.approx(expected, rel=1e-5)


def averages(rank):
    """Evaluate the average in between, which leaves the model whole."""
    found = []
    for shard in ("ddp", WHOLE):
        trainer = trainer_of(fresh(), shard, ema=0.5)
        of_steps = []
        for batch in batches(rank):
            trainer.step(batch)
            of_steps.append(trainer.evaluate(Own([batch]), ema=True)["loss"])
            of_steps.append(trainer.evaluate(Own([batch]))["loss"])
        found.append(of_steps)
    return found


def test_an_average_that_was_evaluated_moves_on():
    for replicated, sharded in ranks.run(averages):
        assert sharded == pytest.approx(replicated, rel=1e-5)


def clipped(rank):
    """Gradients of which each rank has all count once, beside shards."""
    model = fresh()
    trainer = trainer_of(
        model, ShardOptions(strategy="fsdp", ignored=("head",)), max_grad_norm=0.01
    )
    trainer.step(batches(rank)[0])
    return float(trainer.metrics["grad_norm"])


def buffers(rank):
    model = fresh()
    model.register_buffer("expanded", torch.full((1, 4), float(rank)).expand(512, 4))
    model.register_buffer("strided", torch.full((4, 2), float(rank))[:, 0])
    trainer_of(model, "fsdp")
    return model.expanded.sum().item(), model.strided.sum().item()


def metrics(rank):
    def loss_fn(model, batch):
        told = OrderedDict(a=torch.tensor(1.0), b=torch.tensor(9.0))
        if rank == 1:
            told.move_to_end("a")
        return mean_loss(model, batch), told

    trainer = trainer_of(fresh(), "ddp", loss_fn)
    loader = DataLoader(Pairs(), batch_size=2)
    return trainer.fit(loader, steps=1, log_every=1, progress=False).history[-1]["metrics"]


class Pairs(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor([index % 7, 1]), torch.tensor([index % 5, 2])


class Interrupted(Pairs):
    def __getitem__(self, index):
        if index >= 4:  # as when Ctrl-C reaches the workers of a loader too
            os.kill(os.getpid(), signal.SIGINT)
            raise RuntimeError("a worker is gone")
        return super().__getitem__(index)


def interrupted(rank):
    trainer = trainer_of(fresh(), "ddp")
    with trainer.prefetch(DataLoader(Interrupted(), batch_size=1), background=False) as loader:
        result = trainer.fit(loader, epochs=2, progress=False)
    found = [(result.num_steps, result.num_epochs, result.stopped_by)]
    result = trainer.fit(
        DataLoader(Pairs(), batch_size=2),
        epochs=2,
        evaluate=DataLoader(Interrupted(), batch_size=1),
        progress=False,
    )
    return [*found, (result.num_steps, result.num_epochs, result.stopped_by)]


def test_an_epoch_that_a_signal_cuts_is_not_counted():
    first, second = ranks.run(interrupted)
    assert first == second == [(2, 0, "SIGINT"), (3, 1, "SIGINT")]


def all_alike(rank):
    return clipped(rank), buffers(rank), metrics(rank)


def test_ranks_come_to_the_same():
    first, second = ranks.run(all_alike)
    assert first == second
    assert first[1] == (0.0, 0.0)
    assert first[2] == {"a": 1.0, "b": 9.0}


def uneven_groups(rank, monkeypatch):
    """Two micro-batches on rank 0 and three on rank 1; then three on both."""
    told = {}
    for shard in ("ddp", "fsdp"):
        trainer = trainer_of(fresh(), shard, accumulate=3)
        own = [tuple(group) for group in batches(rank, accumulate=3)]
        try:
            trainer.step(MicroBatches(own[0][: 2 + rank]))
        except ValueError as error:
            told[shard] = str(error)
        told[shard, "loss"] = float(trainer.step(MicroBatches(own[1])))
    for _ in range(4):  # behind the first steps, in which ranks compare what they have used
        trainer.step(MicroBatches(own[1]))
    asked = counted_questions(monkeypatch)
    told["of one's own"] = asked(lambda: trainer.step(MicroBatches(own[2])))
    single = [pair for group in own for pair in group][:7]
    with trainer.prefetch(Own(single)) as loader:  # the last group has one
        groups = iter(loader)
        told["dealt out"] = [asked(lambda batch=b: trainer.step(batch)) for b in groups]
    return told


def counted_questions(monkeypatch):
    """Return what counts how many collectives of the host a call begins, and how many it awaits."""
    counts = []
    begin, wait = RankGroup._begin, rank_group._Arrival.wait
    monkeypatch.setattr(RankGroup, "_begin", lambda *a: counts.append("begun") or begin(*a))
    monkeypatch.setattr(rank_group._Arrival, "wait", lambda a: counts.append("awaited") or wait(a))

    def asked(call):
        counts.clear()
        call()
        return counts.count("begun"), counts.count("awaited")

    return asked


def test_ranks_with_different_numbers_of_micro_batches_raise(monkeypatch):
    """Shards are gathered in each: the rank that has more would wait for ever."""
    for told in ranks.run(uneven_groups, 2, monkeypatch):
        assert told["of one's own"] == (1, 1)
        assert told["dealt out"] == [(1, 0)] * 3  # nobody waits for what a loader sees to
        assert "numbers of micro-batches for a step (by rank: 2, 3)" in told["fsdp"]
        assert "ddp" not in told  # replicas meet once a step
        assert 0 < told["fsdp", "loss"] < 10


def failing(rank, shard):
    """Rank 1 raises in its second forward, and its process ends."""
    calls = []

    def loss_fn(model, batch):
        calls.append(batch)
        if rank == 1 and len(calls) == 2:
            raise ValueError("sample 17 is empty")
        return mean_loss(model, batch)

    trainer = trainer_of(fresh(), shard, loss_fn)
    first, second, *_ = batches(rank)
    trainer.step(first)
    began = time.monotonic()
    with pytest.raises((ValueError, RankError)) as caught:
        trainer.step(second)
    return type(caught.value).__name__, str(caught.value), time.monotonic() - began


@pytest.mark.parametrize("shard", ["ddp", "fsdp"])
def test_an_error_of_one_rank_is_told_by_the_others(shard):
    waiting, failed = ranks.run(failing, 2, shard)
    assert failed[:2] == ("ValueError", "sample 17 is empty")
    assert waiting[0] == "RankError"
    assert "so no rank can go on: rank 1: ValueError: sample 17 is empty" in waiting[1]
    assert waiting[2] < ranks.GROUP_TIMEOUT_S / 2


def failing_after_another(rank):
    """All ranks raise in one training and go on with another; in that rank 1 is gone in silence."""

    def bad(model, batch):
        raise ValueError("of the first training")

    with pytest.raises(ValueError, match="first training"):
        trainer_of(fresh(), "ddp", bad).step(batches(rank)[0])
    trainer = trainer_of(fresh(), "ddp")
    first, second, *_ = batches(rank)
    trainer.step(first)
    if rank == 1:
        os._exit(3)
    with pytest.raises(RuntimeError) as caught:
        trainer.step(second)
    return type(caught.value).__name__, str(caught.value)


def test_an_error_of_an_earlier_training_is_not_told():
    waiting = ranks.run(failing_after_another, 2, ends={1: 3})[0]
    assert waiting[0] != "RankError", waiting
    assert "of the first training" not in waiting[1]


def failing_alike(rank):
    """All ranks raise, one of them when it has heard of the other's error, and all go on."""
    calls, has_heard = [], threading.Event()

    def loss_fn(model, batch):
        calls.append(batch)
        if len(calls) == 2:
            assert rank == 0 or has_heard.wait(20)
            raise ValueError("a bad batch")
        return mean_loss(model, batch)

    trainer = trainer_of(fresh(), "ddp", loss_fn)
    words = trainer._step.ranks.last_words
    look = words._pending

    def pending(found):
        seen = look(found)
        if seen:
            has_heard.set()
        return seen

    words._pending = pending
    first, second, *rest = batches(rank)
    trainer.step(first)
    with pytest.raises(ValueError, match="a bad batch"):
        trainer.step(second)
    return [float(trainer.step(batch)) for batch in rest]


def test_ranks_that_fail_alike_have_errors_of_their_own():
    for losses in ranks.run(failing_alike):
        assert all(0 < loss < 10 for loss in losses)


class Alone:
    """A device's state that nothing changes."""

    parameters: tuple = ()
    generators: tuple = ()
    everything = staticmethod(list)
    names_of = staticmethod(list)  # of nothing


def checks(rank, monkeypatch):
    """Check a graph whose replays are eager steps to the bit on the first rank only."""
    together = Together(RankGroup.join(20))
    together.begin()
    runs = []

    def step(kind):
        runs.append(kind)
        noise = 0.0 if rank == 0 else 1e-6 * len(runs)
        return torch.ones(3) + noise

    class Saved:
        def __init__(self, *_):
            pass

        def tensors(self):
            return []

        def put_back(self):
            pass

    monkeypatch.setattr("torchfast.graphs.replay_check.SavedNamedState", Saved)
    verdict = find_mismatch(
        Alone,
        torch.device("cpu"),
        replay=lambda: step("replay"),
        eager=lambda: step("eager"),
        any_says=together.any_says,
    )
    agreed = together.all_agree(verdict is None)
    together.begin()
    if rank == 0:
        together.fail()
        return runs, agreed, None
    with pytest.raises(Exception, match="another rank could not capture"):
        together.any_says(True)
    return runs, agreed, together.is_open


def test_ranks_check_a_graph_with_as_many_steps(monkeypatch):
    (first, agreed, _), (second, agreed_too, is_open) = ranks.run(checks, 2, monkeypatch)
    assert first == second
    assert len(first) > 4, "the second rank needs more than the first round"
    assert agreed == agreed_too
    assert is_open is False
