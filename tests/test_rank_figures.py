"""What an arm of a benchmark takes of a GPU's memory, while others are in memory too."""

import pytest
import torch

from benchmarks.rank_figures import OwnMemory


class Played:
    """A GPU's allocator that tells what it was told."""

    def __init__(self):
        self.now = self.peak = 0

    def take(self, num_bytes):
        self.now += num_bytes
        self.peak = max(self.peak, self.now)

    def reset(self):
        self.peak = self.now


@pytest.fixture
def gpu(monkeypatch):
    played = Played()
    for name, call in (
        ("synchronize", lambda: None),
        ("reset_peak_memory_stats", played.reset),
        ("memory_allocated", lambda: played.now),
        ("max_memory_allocated", lambda: played.peak),
    ):
        monkeypatch.setattr(torch.cuda, name, call)
    return played


def test_a_peak_is_an_arms_own(gpu):
    gpu.take(1000)  # of an arm that is there already
    gpu.take(500)
    gpu.take(-500)
    first, second = OwnMemory(True), OwnMemory(True)
    with first.making():
        gpu.take(300)
        gpu.take(-100)
    assert first.peak_bytes == 300
    with second.making():
        gpu.take(50)
    assert second.peak_bytes == 50
    with first.turn():
        gpu.take(400)
        gpu.take(-400)
    assert first.peak_bytes == 600  # the 200 that it holds, and these
    with second.turn():
        gpu.take(10)
        gpu.take(-10)
    assert second.peak_bytes == 60
    assert second.peak_gb == 60e-9


def test_a_cpu_tells_nothing():
    memory = OwnMemory(False)
    with memory.making(), memory.turn():
        pass
    assert memory.peak_gb is None
