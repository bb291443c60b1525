"""On which cores the threads of this process run."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

import torch


def stay_on_cores(count: int) -> None:
    """Keep all threads of this process on the same few cores as every other method's.

    Cores of a shared machine are not alike: each has a neighbour of its own.
    """
    cores = sorted(os.sched_getaffinity(0))[-count:]
    for thread in _threads():
        _move(thread, cores)


@contextmanager
def pinned() -> Iterator[int]:
    """Run all threads of this process on one core, and return which.

    So nothing waits for another core to wake up where autograd's thread takes over and gives back.
    torch computes with one thread meanwhile: several would stand in each other's way.
    """
    everywhere = os.sched_getaffinity(0)
    core = max(everywhere)
    before = {thread: _affinity(thread) for thread in _threads()}
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for thread in before:
        _move(thread, {core})
    try:
        yield core
    finally:
        for thread in _threads():
            _move(thread, before.get(thread) or everywhere)
        torch.set_num_threads(num_threads)


def _threads() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/task")]


def _affinity(thread: int) -> set[int] | None:
    with suppress(ProcessLookupError):  # it may have ended
        return os.sched_getaffinity(thread)
    return None


def _move(thread: int, cores: Collection[int]) -> None:
    with suppress(ProcessLookupError):
        os.sched_setaffinity(thread, cores)
