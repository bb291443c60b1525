"""Workers that die while indices are put into their queues: torch's signal handler raises there.

It may do so where the queue's lock has just been taken, and then nobody gives it back. Here it
always does.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset

from torchfast import build_dataloader, sweep_workers
from worker_data import At, no_process_left

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def no_process_is_left():
    with no_process_left():
        yield


class Late(threading.Condition):
    """Keeps the main thread, once it has the lock for the n-th time, until a signal is handled."""

    def __init__(self, at):
        super().__init__(threading.Lock())
        self.at, self.count = at, 0

    def __enter__(self):
        is_main = threading.current_thread() is threading.main_thread()
        self.count += is_main
        is_due = is_main and self.count == self.at
        if is_due:
            time.sleep(0.1)  # the queue's thread, which needs the lock, sends what was put before
        entered = super().__enter__()
        if is_due:
            time.sleep(10)
        return entered


class Context(type(multiprocessing.get_context("fork"))):
    """Whose queues of indices are interrupted in their n-th put()."""

    def __init__(self, at):
        self.at, self.num_queues = at, 0

    def Queue(self, maxsize=0):  # noqa: N802
        made = multiprocessing.get_context("fork").Queue(maxsize)
        self.num_queues += 1
        if self.num_queues > 1:  # the first one is for what workers send
            made._notempty = Late(self.at)
        return made


def leave():
    time.sleep(0.3)
    os._exit(3)


class Turned(Dataset):
    """Ends its worker from the second epoch on."""

    def __init__(self):
        self.epoch = torch.zeros(1).share_memory_()

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if self.epoch:
            leave()
        return torch.tensor(index)


# Two indices are put before the first batch is asked for, then one behind each batch.
@pytest.mark.parametrize(("sample", "at"), [(0, 2), (4, 4)], ids=["as it starts", "later"])
@pytest.mark.parametrize("recycles", [True, False])
@pytest.mark.parametrize("pins", [True, False])
def test_a_worker_that_dies_amid_a_put_hangs_nothing(sample, at, recycles, pins, monkeypatch):
    if pins:
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
        monkeypatch.setattr(torch.utils.data._utils.pin_memory, "_pin_memory_loop", unpinned)
    loader = build_dataloader(
        At(leave, sample),
        2,
        num_workers=1,
        pin_memory=pins,
        recycle_memory=recycles,
        multiprocessing_context=Context(at),
    )
    start = time.monotonic()
    gc.disable()  # torch's handler could raise in a callback of the collector, which loses it
    try:
        with pytest.raises(RuntimeError, match=r"worker died: worker 0 .*, with exit code 3"):
            list(loader)
    finally:
        gc.enable()
    assert time.monotonic() - start < 8
    assert multiprocessing.active_children() == []
    wait_for_feeders()


def unpinned(in_queue, out_queue, device_id, done_event, device):
    while not done_event.is_set():
        out_queue.put(in_queue.get())


def wait_for_feeders():
    deadline = time.monotonic() + 5
    while any("QueueFeederThread" in thread.name for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_workers_that_stay_may_die_amid_a_put_of_a_later_epoch():
    dataset = Turned()
    loader = build_dataloader(
        dataset,
        1,
        num_workers=1,
        persistent_workers=True,
        multiprocessing_context=Context(7),  # four, what wakes the worker, and one of the next
    )
    assert len(list(loader)) == 4
    dataset.epoch.fill_(1)
    with pytest.raises(RuntimeError, match=r"worker died: worker 0 .*, with exit code 3"):
        list(loader)
    dataset.epoch.fill_(0)
    loader._DataLoader__multiprocessing_context = None
    assert len(list(loader)) == 4  # with new workers
    loader._iterator = None


def test_a_sweep_over_workers_that_die_at_once_comes_to_its_end():
    found = sweep_workers(
        At(leave, 0), 2, max_workers=1, budget_s=3, multiprocessing_context=Context(2)
    )
    assert "worker 0" in found.measurements[-1].error
    assert "exit code 3" in found.measurements[-1].error


SWEEP = """
import os
from torch.utils.data import Dataset
from torchfast import sweep_workers

class Crashes(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        os._exit(3)

for _ in range(3):
    print(sweep_workers(Crashes(), 2, max_workers=2, budget_s=3))
"""


def test_fresh_processes_that_sweep_such_workers_come_to_their_end():
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", SWEEP],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for _ in range(3)
    ]
    try:
        for run in runs:
            said, _ = run.communicate(timeout=50)
            assert run.returncode == 0, said
    finally:
        for run in runs:
            run.kill()


def test_torch_itself_hangs_there():
    code = f"""
import sys, threading, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from torch.utils.data import DataLoader
from test_interrupted_workers import At, Context, leave
try:
    list(DataLoader(At(leave, 0), 2, num_workers=1, multiprocessing_context=Context(2)))
except RuntimeError as error:
    print("raised", flush=True)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run([sys.executable, "-c", code], env=environment, timeout=5, check=False)
