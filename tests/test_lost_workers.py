"""Workers that are killed, hang or fail: what the error says, and that nothing of them is left."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import multiprocessing
import os
import signal
import sys
import termios
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from torchfast import build_dataloader
from worker_data import At, Quick, fail, hang, kill_itself, let_torch_count, no_process_left


@pytest.fixture(autouse=True)
def no_process_is_left():
    with no_process_left():
        yield


@pytest.fixture(autouse=True)
def many_cores_for_torch(monkeypatch):
    # It warns of more workers than cores, whatever machine the tests are on.
    let_torch_count(monkeypatch, 64)


def stop_itself():
    os.kill(os.getpid(), signal.SIGSTOP)


@contextlib.contextmanager
def no_garbage_collection():
    """Keep torch's signal handler from raising in a callback of the collector, which loses it."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def lose(what, **given):
    dataset = At(what)
    loader = build_dataloader(dataset, 2, num_workers=2, **{"timeout": 1, **given})
    pids, batches, iterator = [], [], iter(loader)
    pids += [child.pid for child in multiprocessing.active_children()]
    start = time.monotonic()
    with no_garbage_collection():
        with pytest.raises(RuntimeError) as caught:
            batches.extend(iterator)
        if str(caught.value).startswith("DataLoader worker (pid "):
            # torch's signal handler raises wherever this thread is, between two batches too.
            with pytest.raises(RuntimeError) as caught:
                batches.extend(iterator)
    assert time.monotonic() - start < 5
    assert list(iterator) == []
    assert multiprocessing.active_children() == []
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    dataset.what = print  # the data are mended
    assert len(list(loader)) == 8
    loader._iterator = None
    return str(caught.value), pids


@pytest.mark.parametrize("persistent", [True, False])
def test_a_killed_worker_is_named(persistent):
    said, pids = lose(kill_itself, persistent_workers=persistent)
    assert any(f"(pid {pid}), by SIGKILL" in said for pid in pids)


@pytest.mark.parametrize(
    ("what", "state"), [(stop_itself, "is stopped"), (hang, "waits for something")]
)
def test_a_worker_that_hangs_is_named(what, state):
    said, pids = lose(what)
    # Sample 5 is in the third batch, which is the first worker's.
    assert said.startswith("no batch for 1 s from DataLoader worker 0 (pid ")
    assert f", {state})" in said
    assert sum(f"(pid {pid}, " in said for pid in pids) == 1


def wait_until(true, seconds=20):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Large(Quick):
    def __getitem__(self, index):
        return bytes(2**20)


def sent(dataset, num_bytes, **given):
    """Return an iterator and its worker, which has sent so much of a batch."""
    # Pinned, the batch would be taken from the pipe by a thread.
    loader = build_dataloader(dataset, 1, num_workers=1, timeout=1, pin_memory=False, **given)
    iterator = iter(loader)
    (worker,) = multiprocessing.active_children()
    pipe = iterator._iterator._worker_result_queue._reader.fileno()

    def waiting_bytes():
        return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)

    wait_until(lambda: waiting_bytes() >= num_bytes)
    return iterator, worker


# The tensors of a batch that was sent are fetched from its process, which no longer answers.
@pytest.mark.parametrize(
    ("dataset", "num_bytes"),
    [pytest.param(Quick(), 1, id="after"), pytest.param(Large(), 2**15, id="amid")],
)
def test_a_worker_that_was_stopped_when_it_sent_a_batch_is_named(dataset, num_bytes):
    iterator, worker = sent(dataset, num_bytes, collate_fn=list)
    os.kill(worker.pid, signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=rf"no batch for 1 s .* 0 \(pid {worker.pid}, is stop"):
        next(iterator)
    assert time.monotonic() - start < 5
    assert list(iterator) == []


def test_a_worker_that_was_killed_when_it_had_sent_a_batch_is_named():
    iterator, worker = sent(Tensors(), 1)
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()
    with pytest.raises(RuntimeError, match=rf"worker 0 \(pid {worker.pid}\), by SIGKILL"):
        next(iterator)
    assert list(iterator) == []


@pytest.mark.parametrize("kind", [EOFError, FileNotFoundError, ConnectionResetError])
def test_such_errors_of_the_data_set_itself_go_through(kind):
    loader = build_dataloader(Raises(kind), 1, num_workers=1, timeout=1)
    start = time.monotonic()
    with pytest.raises(kind, match="its own"):
        next(iter(loader))
    assert time.monotonic() - start < 5


class Tensors(Quick):
    def __getitem__(self, index):
        return torch.ones(1000)


class Raises(Quick):
    def __init__(self, kind):
        self.kind = kind

    def __getitem__(self, index):
        raise self.kind("its own")


def test_the_watch_over_workers_ends_with_them():
    def watches():
        return [t for t in threading.enumerate() if t.name == "torchfast-worker-watch"]

    loader = build_dataloader(Quick(), 2, num_workers=1, timeout=1)
    assert len(list(loader)) == 8
    wait_until(lambda: not watches())
    iterator = iter(loader)
    next(iterator)
    assert len(watches()) == 1
    del iterator
    wait_until(lambda: not watches())


def test_a_slow_consumer_is_not_taken_for_a_slow_worker():
    iterator = iter(build_dataloader(Quick(), 2, num_workers=1, timeout=1))
    next(iterator)
    time.sleep(2.2)  # the step, longer than any patience
    assert len(list(iterator)) == 7


def test_torch_itself_does_not_name_a_worker_that_hangs():
    iterator = iter(DataLoader(At(hang), 2, num_workers=1, timeout=0.5))
    with pytest.raises(RuntimeError, match=r"timed out after 0\.5 seconds$"):
        list(iterator)
    for worker in iterator._workers:
        worker.terminate()
    iterator._shutdown_workers()


def test_an_error_of_the_data_set_goes_through():
    batches = []
    loader = build_dataloader(At(fail), 2, num_workers=1, persistent_workers=False)
    with pytest.raises(KeyError, match="sample 5 is broken"):
        batches.extend(loader)
    assert len(batches) == 2


def test_an_error_of_the_data_set_does_not_hold_the_workers():
    gc.disable()
    try:
        with contextlib.suppress(KeyError):
            list(build_dataloader(At(fail), 2, num_workers=1, persistent_workers=False))
        assert multiprocessing.active_children() == []
    finally:
        gc.enable()
