"""When torch's cache is emptied around a capture, with an allocator that only tells what it has."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import optim

from both_ways import alike, trained
from models import mean_loss
from tape import TapeBackend, counts, reasons
from torchfast import CUDAGraphOptions
from torchfast.graphs import engine
from torchfast.graphs.backend import RoomMadeError
from torchfast.graphs.cached_memory import CachedMemory, has_plenty

GB = 2**30
DEVICE = torch.device("cuda", 0)
ADAMW = partial(optim.AdamW, lr=0.01, fused=True)


class Allocator:
    """A device of 80 GB with 10 in tensors and 5 in the cache, and how often that was emptied."""

    def __init__(self):
        self.total, self.reserved, self.allocated, self.peak = 80 * GB, 15 * GB, 10 * GB, 14 * GB
        self.of_others, self.fraction, self.name = 0, 1.0, "native"
        self.num_emptied = 0

    def memory_stats(self, device):
        found = {"reserved_bytes": self.reserved, "allocated_bytes": self.allocated}
        found = {f"{name}.all.current": value for name, value in found.items()}
        return {**found, "allocated_bytes.all.peak": self.peak}

    def mem_get_info(self, device):
        return self.total - self.reserved - self.of_others, self.total

    def get_per_process_memory_fraction(self, device):
        return self.fraction

    def get_allocator_backend(self):
        return self.name

    def empty_cache(self):
        self.num_emptied += 1
        self.reserved = self.allocated


@pytest.fixture
def allocator(monkeypatch):
    made = Allocator()
    for name in (
        *("memory_stats", "mem_get_info", "get_per_process_memory_fraction"),
        *("get_allocator_backend", "empty_cache"),
    ):
        monkeypatch.setattr(torch.cuda, name, getattr(made, name))
    return made


def test_beside_plenty_it_is_emptied_behind_the_check_and_once(allocator):
    cache = CachedMemory(DEVICE)
    cache.before_capture()
    assert allocator.num_emptied == 0
    cache.after_check()
    cache.after_check()
    assert allocator.num_emptied == 1


@pytest.mark.parametrize(
    "lack",
    [
        {"of_others": 55 * GB},
        {"fraction": 0.3},
        {"reserved": 40 * GB},  # of which 30 are in the cache
        {"peak": 50 * GB},  # of a step whose memory somebody has let go of
        {"name": "cudaMallocAsync"},  # which does not tell
    ],
)
def test_where_there_is_less_it_is_emptied_before(allocator, lack):
    vars(allocator).update(lack)
    cache = CachedMemory(DEVICE)
    cache.before_capture()
    assert allocator.num_emptied == 1
    cache.after_check()
    assert allocator.num_emptied == 1


def test_plenty_is_twice_what_a_step_needs_and_a_gigabyte(allocator):
    allocator.of_others = allocator.mem_get_info(DEVICE)[0] - 11 * GB
    assert has_plenty(DEVICE)
    allocator.of_others += 1
    assert not has_plenty(DEVICE)


def test_what_ran_out_beside_a_cache_is_captured_without_one(allocator):
    cache = CachedMemory(DEVICE)
    cache.before_capture()
    assert cache.has_run_out()
    assert allocator.num_emptied == 0  # the step that follows runs eagerly
    cache.before_capture()
    assert allocator.num_emptied == 1
    assert not cache.has_run_out()
    cache.before_capture()
    assert allocator.num_emptied == 1  # of others, or of another shape


# -- With a step around it -------------------------------------------------------------------------


def without_memory(monkeypatch, num_times):
    """Let so many captures run out of memory, the first of them beside a cache."""
    capture, ran_out = TapeBackend.capture, []

    def running_out(self, body, generators):
        if len(ran_out) == num_times:
            return capture(self, body, generators)

        def to_its_end():
            body()
            ran_out.append(1)
            raise torch.OutOfMemoryError("CUDA out of memory.")

        try:
            capture(self, to_its_end, generators)
        except torch.OutOfMemoryError as error:
            if len(ran_out) == 1:
                raise RoomMadeError("the next capture finds more memory") from error
            raise

    monkeypatch.setattr(TapeBackend, "capture", running_out)


@pytest.mark.parametrize("num_times", [1, 2])
def test_a_capture_that_ran_out_is_tried_once_more(tape, monkeypatch, num_times):
    without_memory(monkeypatch, num_times)
    step = alike(partial(trained, mean_loss, 12, ADAMW))
    if num_times == 1:
        assert counts(step) == (1, 8, 4, 1)
        assert not reasons(step)
    else:
        assert counts(step) == (0, 0, 12, 0)
        assert "memory ran out: a graph keeps what a step needs" in reasons(step)[0]


def with_check(check, *, cuda_graph):
    return trained(mean_loss, 6, ADAMW, cuda_graph=cuda_graph and CUDAGraphOptions(check=check))


@pytest.mark.parametrize("check", [True, False])
def test_what_eager_steps_have_left_goes_behind_the_check(tape, monkeypatch, check):
    """Without one it goes before the first replay, as ever."""
    told = []
    mismatch, release = engine.find_mismatch, TapeBackend.release_scratch
    monkeypatch.setattr(
        engine, "find_mismatch", lambda *a, **k: (mismatch(*a, **k), told.append("check"))[0]
    )
    monkeypatch.setattr(
        TapeBackend, "release_scratch", lambda self: (told.append("release"), release(self))[1]
    )
    alike(partial(with_check, check))
    assert told == ["check", "release"][not check :]
