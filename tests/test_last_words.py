"""What one rank raises, the others raise at once, though its process lives on."""

import atexit
import gc
import os
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import ranks
from parallel_training import OPTIMIZERS, Own, batches, fresh, mean_loss
from tape import taped
from torchfast import Plan, RankError, Trainer, start_ranks
from torchfast._core.errors import ClosedError
from torchfast.graphs.engine import GraphEngine
from torchfast.parallel.ranks import _end_group

FAILS = 1


class BrokenError(Exception):
    pass


def trainer_of(shard, loss_fn=mean_loss, **options):
    return Trainer(fresh(), OPTIMIZERS["sgd"], loss_fn, Plan(shard=shard), **options)


def failing_loss(rank, at):
    calls = []

    def loss_fn(model, batch):
        calls.append(batch)
        if rank == FAILS and len(calls) == at:
            raise BrokenError("sample 17 is empty")
        return mean_loss(model, batch)

    return loss_fn


def stepping(shard):
    def work(rank):
        trainer = trainer_of(shard, failing_loss(rank, 2))
        for batch in batches(rank):
            trainer.step(batch)

    return work


def updating(rank):
    """Fail behind the last collective of a step; the others fail in the next one."""
    trainer = trainer_of("ddp")

    def hook(*_):
        raise BrokenError("sample 17 is empty")

    if rank == FAILS:
        trainer.optimizer.register_step_post_hook(hook)
    for batch in batches(rank):
        trainer.step(batch)


def evaluating(rank):
    trainer = trainer_of("fsdp", failing_loss(rank, 2))
    trainer.evaluate(Own(batches(rank)))


def calling_back(rank):
    def callback(event):
        if rank == FAILS and event.kind == "step":
            raise BrokenError("sample 17 is empty")

    tokens = torch.arange(96).reshape(32, 3) % 7
    data = TensorDataset(tokens, tokens)
    trainer_of("ddp").fit(DataLoader(data, 2), steps=4, callbacks=[callback], progress=False)


def loading(rank):
    """The other rank waits between its steps, for its loader."""

    def hook(*_):
        raise BrokenError("sample 17 is empty")

    trainer = trainer_of("ddp")
    if rank == FAILS:
        trainer.optimizer.register_step_post_hook(hook)

    with trainer.prefetch(Own(batches(rank))) as loader:
        for batch in loader:
            trainer.step(batch)


def building(rank):
    def optimizer(parameters):
        if rank == FAILS:
            raise BrokenError("sample 17 is empty")
        return torch.optim.SGD(parameters, lr=0.1)

    trainer = Trainer(fresh(), optimizer, mean_loss, Plan(shard="ddp"))
    trainer.step(batches(rank)[0])


def caught(rank):
    """The rank that fails goes on with its next batch."""
    trainer = trainer_of("ddp", failing_loss(rank, 2))
    for batch in batches(rank):
        try:
            trainer.step(batch)
        except BrokenError:
            continue


JOBS = {
    "step under ddp": stepping("ddp"),
    "step under fsdp": stepping("fsdp"),
    "update": updating,
    "evaluation": evaluating,
    "callback": calling_back,
    "loader": loading,
    "construction": building,
    "caught": caught,
}


def all_jobs(rank, folder):
    """Do each in a process group of its own; the rank that fails waits until the other has."""
    told = {}
    for name, work in JOBS.items():
        ranks.join(rank, 2, f"{folder}/{name}")
        store = dist.distributed_c10d._get_default_store()
        began = time.monotonic()
        try:
            work(rank)
        except (BrokenError, RankError) as error:
            told[name] = type(error).__name__, str(error), time.monotonic() - began
        store.set(str(rank), "")
        store.get(str(1 - rank))  # waits
        dist.destroy_process_group()
    told["threads"] = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
    return told


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores")
    return ranks.run(all_jobs, 2, str(folder), joined=False, timeout_s=120)


@pytest.mark.parametrize("name", [name for name in JOBS if name != "caught"])
def test_the_others_say_what_a_rank_raised_that_lives_on(name, told):
    waiting, failed = (of_rank[name] for of_rank in told)
    assert failed[:2] == ("BrokenError", "sample 17 is empty")
    assert waiting[0] == "RankError"
    assert "so no rank can go on: rank 1: BrokenError: sample 17 is empty, at " in waiting[1]
    assert "test_last_words.py:" in waiting[1]
    assert waiting[2] < ranks.GROUP_TIMEOUT_S / 2


def test_a_rank_that_fails_alone_cannot_go_on(told):
    waiting, failed = (of_rank["caught"] for of_rank in told)
    assert "sample 17 is empty" in waiting[1]
    assert failed[0] == "RankError"
    assert "rank 1 raised an error that not all ranks raised" in failed[1]


def without_store(rank, folder):
    """Train until the rank dies that holds the store, as it does where no launcher holds it."""
    finder, timeout = dist.FileStore(f"{folder}/port", 2), timedelta(seconds=ranks.GROUP_TIMEOUT_S)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, 2, True, timeout, wait_for_workers=False)
        finder.set("port", str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(finder.get("port")), 2, False, timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)

    def loss_fn(model, batch):
        if rank == 0 and len(taken) == 2:
            os._exit(3)
        return mean_loss(model, batch)

    taken = []
    trainer = trainer_of("ddp", loss_fn)
    for batch in batches(rank):
        began = time.monotonic()
        taken.append(batch)
        try:
            trainer.step(batch)
        except RuntimeError:
            break
    told = len(taken), time.monotonic() - began
    dist.destroy_process_group()
    return told


def test_an_error_does_not_wait_for_a_store_that_is_gone(tmp_path):
    """A new connection to it is tried for as long as groups wait."""
    ends, longest_s = {0: 3}, 3 * ranks.GROUP_TIMEOUT_S
    told = ranks.run(without_store, 2, str(tmp_path), ends=ends, joined=False, timeout_s=longest_s)
    number, waited_s = told[1]
    assert number == 2
    assert waited_s < ranks.GROUP_TIMEOUT_S / 2


class Asked:
    """A store that notes which keys are asked for."""

    def __init__(self, store):
        self.store, self.keys = store, []
        self.looked_often = threading.Event()

    def check(self, keys):
        self.keys += keys
        if self.keys.count("any") > 3:
            self.looked_often.set()
        return self.store.check(keys)

    def get(self, key):
        return self.store.get(key)


def failing_alike(rank):
    """Return how often a rank asks for the other's word, behind an error of both."""
    trainer = trainer_of("ddp", failing_loss(FAILS, 1))
    first, second, *_ = batches(rank)
    with pytest.raises(BrokenError):
        trainer.step(first)
    trainer.step(second)
    words = trainer._step.ranks.last_words
    words._store = asked = Asked(words._store)
    assert asked.looked_often.wait(ranks.TIMEOUT_S / 2)
    return asked.keys.count(str(1 - rank))


def test_words_that_were_left_once_are_not_read_again_and_again():
    assert max(ranks.run(failing_alike)) <= 1


class Stuck:
    """A thread whose abort does not end."""

    def join(self, timeout_s):
        assert timeout_s > 0

    def is_alive(self):
        return True


def no_threads():
    raise RuntimeError("can't create new thread at interpreter shutdown")


def at_exit(rank, monkeypatch):
    """End as start_ranks has it done: once with steps that went well, then with one that failed."""
    calls, threads, at_end = [], [], []
    monkeypatch.setattr(atexit, "register", at_end.append)
    monkeypatch.setattr(
        "torchfast.parallel.ranks.abort_groups", lambda: calls.append("abort") or threads
    )
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append("destroy"))
    trainer = trainer_of("ddp", failing_loss(rank, 2))
    first, second, *_ = batches(rank)
    trainer.step(first)
    _end_group()
    words = trainer._step.ranks.last_words
    assert words._thread.is_alive()
    with pytest.raises(BrokenError if rank == FAILS else RankError):
        trainer.step(second)
    _end_group()
    threads.append(Stuck())
    _end_group()
    monkeypatch.setattr("torchfast.parallel.ranks.abort_groups", no_threads)
    _end_group()
    for each in at_end:
        each()
    assert not words._thread.is_alive()
    monkeypatch.undo()
    return calls


def test_the_end_of_a_process_that_failed_does_not_wait_for_others(monkeypatch):
    """To destroy a group of NCCL is to wait for its kernels, which wait for other ranks."""
    expected = ["destroy", "abort", "destroy", "abort"]
    assert ranks.run(at_exit, 2, monkeypatch) == [expected] * 2


def at_exit_with_graphs(rank, monkeypatch):
    """End with a trainer that nobody has closed, well and after a failure, and without it."""
    calls = []
    for place, name in (
        ("torchfast.parallel.ranks.abort_groups", "abort"),
        ("torch.distributed.destroy_process_group", "destroy"),
    ):
        monkeypatch.setattr(place, lambda name=name: calls.append(name) or [])
    with taped(monkeypatch):
        plan = Plan(shard="ddp", cuda_graph=True)
        trainer = Trainer(fresh(), OPTIMIZERS["fused"], mean_loss, plan)
    words, graph = trainer._step.ranks.last_words, trainer._step._graph
    monkeypatch.setattr(GraphEngine, "close", lambda engine: calls.append("graphs"))
    _end_group()
    words._heard = "rank 7: it failed"
    _end_group()
    words._heard = ""
    monkeypatch.undo()
    graph.close()
    with pytest.raises(ClosedError):
        graph._graph.run()
    del trainer, graph
    gc.collect()
    assert not list(start_ranks().group._graphed)
    return calls


def test_graphs_with_collectives_go_before_the_groups_that_they_are_of(monkeypatch):
    """NCCL ends a communicator once no graph of it is left, and waits for that."""
    expected = ["graphs", "destroy", "abort", "graphs", "destroy"]
    assert ranks.run(at_exit_with_graphs, 2, monkeypatch) == [expected] * 2
