"""A pool on the CPU is none, and says so; the rest is in tests/gpu."""

from __future__ import annotations

import pytest
import torch

from torchfast._core.errors import UnsupportedDeviceError
from torchfast.memory import MemoryPool, PoolStatistics


def test_on_the_cpu_it_steps_aside():
    pool = MemoryPool("cache", device="cpu")
    for _ in range(2):
        with pool:
            assert torch.ones(3).sum() == 3
    assert pool.decision.outcome == "stepped aside"
    assert pool.statistics() == PoolStatistics(name="cache")
    assert repr(pool) == "MemoryPool('cache', device='cpu')"


def test_it_is_entered_once_at_a_time_and_left_by_an_error_too():
    pool = MemoryPool("cache", device="cpu")
    with pool, pytest.raises(RuntimeError, match="'cache' is entered already"), pool:
        pass
    with pytest.raises(ZeroDivisionError), pool:
        raise ZeroDivisionError
    with pool:
        pass


def test_arguments():
    with pytest.raises(TypeError, match="name must be a string"):
        MemoryPool(3)
    with pytest.raises(ValueError, match="did you mean 'cuda'"):
        MemoryPool("cache", device="gpu")
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedDeviceError, match="has no cuda"):
            MemoryPool("cache", device="cuda")


def test_fragmentation():
    assert PoolStatistics(name="a").fragmentation == 0.0
    assert PoolStatistics(name="a", reserved_bytes=8, allocated_bytes=6).fragmentation == 0.25
