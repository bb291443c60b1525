"""Data sets for loaders with workers, what they do to a worker, and what torch sees of cores."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import time
import types

import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset, dataloader

IN_MEMORY = TensorDataset(torch.arange(64.0).reshape(32, 2))


class Slow(Dataset):
    """5 ms a sample; counts what was drawn in this process."""

    drawn = 0

    def __len__(self):
        return 24

    def __getitem__(self, index):
        self.drawn += 1
        time.sleep(0.005)
        return torch.tensor(float(index))


class Quick(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return {"x": torch.tensor(float(index)), "threads": torch.get_num_threads()}


class At(Quick):
    """Does something to its process at one sample."""

    def __init__(self, what, sample=5):
        self.what, self.sample = what, sample

    def __getitem__(self, index):
        if index == self.sample:
            self.what()
        return torch.tensor(float(index))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(12.0))


def kill_itself():
    os.kill(os.getpid(), signal.SIGKILL)


def hang():
    time.sleep(1000)


def fail():
    raise KeyError("sample 5 is broken")


@contextlib.contextmanager
def no_process_left():
    """Behind it there are no more worker processes than before it."""
    before = set(multiprocessing.active_children())
    yield
    gc.collect()  # an error of torch's holds its iterator in a cycle
    left = set(multiprocessing.active_children()) - before
    for process in left:
        process.kill()  # or the tests that follow fail too
        process.join()
    assert left == set()


def let_torch_count(monkeypatch, cores):
    """Let torch believe in so many cores; everyone else, torchfast too, sees the machine's."""
    counted = {"sched_getaffinity": lambda _: set(range(cores)), "cpu_count": lambda: cores}
    seen = types.SimpleNamespace(**vars(os) | counted)
    for module in (torch._utils, dataloader):  # where it counts them now, and where until 2.11
        monkeypatch.setattr(module, "os", seen)
