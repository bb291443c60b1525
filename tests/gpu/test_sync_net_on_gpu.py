"""What a read of the device leaves to others while it waits, where a SyncGuard is entered."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from benchmarks.watching_within import guard_within, passed_calls
from torchfast import SyncGuard

# A name that was bound before any guard goes past it, to the kernel beneath.
early_item = torch.Tensor.item


@pytest.fixture
def ticks():
    """Return a list that another thread of Python adds to once a millisecond."""
    found, over = [], threading.Event()

    def tick():
        while not over.wait(1e-3):
            found.append(time.perf_counter())

    thread = threading.Thread(target=tick)
    thread.start()
    yield found
    over.set()
    thread.join()


@pytest.mark.parametrize("is_early", [False, True])
def test_other_threads_go_on_while_a_read_waits(ticks, is_early):
    x = torch.ones(3, device="cuda")
    with SyncGuard() as guard:
        x.sum().item()
        torch.cuda._sleep(200_000_000)  # some 100 ms
        total, begun = x.sum(), time.perf_counter()
        assert (early_item if is_early else torch.Tensor.item)(total) == 3.0
        ended = time.perf_counter()
    assert ended - begun > 0.02
    meanwhile = sum(begun < tick < ended for tick in ticks)
    assert meanwhile > (ended - begun) * 1e3 / 10
    assert [s.kind for s in guard.report().syncs] == ["item", "item"]


def test_a_read_waits_for_the_stream_that_it_is_on_only():
    x, other = torch.ones(3, device="cuda"), torch.cuda.Stream()
    with SyncGuard():
        x[:1].item()  # the first one allocates pinned memory, for which all may wait
        torch.cuda._sleep(200_000_000)  # some 100 ms
        behind = torch.cuda.Event()
        behind.record()
        with torch.cuda.stream(other):
            assert x[:1].item() == 1.0
        assert not behind.query()


def test_what_a_read_beneath_costs_is_measured_of_the_device():
    x = torch.ones(3, device="cuda")
    with SyncGuard() as guard, passed_calls() as passed:
        early_item(x[0])
    guard.close()
    assert passed.calls["below: _local_scalar_dense"] == 1
    found = guard_within(passed, "cuda")
    assert 2e-3 < found.watched_ms < 1.0  # a call of Python's from C++, at least
