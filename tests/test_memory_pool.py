"""A pool on the CPU is none, and says so; and what says whose memory is whose names pools.

Torch's pools are played here, by their numbers and segments; the real ones are in tests/gpu.
"""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from allocator_blocks import FAR, MB, block, moment_of, segment
from torchfast._core.errors import UnsupportedDeviceError
from torchfast.memory import MemoryPool, PoolStatistics
from torchfast.memory.account import CACHED, GRAPHS, GRAPHS_KEPT, POOLS_KEPT, REST, look
from torchfast.memory.advice import advice
from torchfast.memory.failure import AccountTaker
from torchfast.memory.memory_pool import living_pools
from torchfast.memory.out_of_memory_options import OutOfMemoryOptions
from torchfast.memory.owners import Owner
from torchfast.memory.sources import CUDAMemory


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
    both = PoolStatistics(name="a", reserved_bytes=8, allocated_bytes=6, num_segments=1)
    assert both + both == PoolStatistics(
        name="a", reserved_bytes=16, allocated_bytes=12, num_segments=2
    )


# --- whose memory is whose ----------------------------------------------------------------------


def at(number, *sizes, pool=(0, 0), free=0):
    """Return a segment with blocks in use and a free one, far from all others."""
    address, blocks = FAR + number * 2**40, []
    for size in sizes:
        blocks.append(block(address, size))
        address += size
    if free:
        blocks.append(block(address, free, "inactive"))
    told = {"total_size": sum(sizes) + free, "allocated_size": sum(sizes)}
    return segment(*blocks, pool=pool) | told


SEGMENTS = [
    at(0, 3 * MB),
    at(1, free=2 * MB),
    at(2, 5 * MB, 7 * MB, pool=(0, 7), free=11 * MB),  # of a graph
    at(3, 13 * MB, 17 * MB, pool=(0, 9), free=19 * MB),  # of a pool
]
MOMENT = moment_of(*SEGMENTS)


def used(name, number):
    """Return a pool as it is after its first use."""
    pool = MemoryPool(name, device="cpu")
    pool._pool = SimpleNamespace(id=(0, number))
    return pool


def sizes(lines):
    return {line.name: line.num_bytes / MB for line in lines}


def test_an_account_tells_pools_from_graphs():
    cache = used("cache", 9)
    known = [Owner(FAR + 3 * 2**40, 13 * MB, "parameters", "weight", "")]
    taker = AccountTaker(
        nn.Identity(),
        torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1),
        torch.device("cpu"),
        OutOfMemoryOptions(),
        SimpleNamespace(take=lambda: MOMENT),
        stages={},
        facts={},
        others=dict,
    )
    account = taker.take(torch.OutOfMemoryError("no"), ())
    assert sizes(account.in_use) == {"pool 'cache'": 30, GRAPHS: 12, REST: 3}
    assert sizes(account.not_in_use) == {POOLS_KEPT: 19, GRAPHS_KEPT: 11, CACHED: 2}
    assert sum(sizes(account.in_use).values()) * MB == account.allocated_bytes
    assert any("let go of one" in text for text in account.advice)
    # What has a category of its own keeps it, wherever it lies.
    found = look(MOMENT, known, [], nn.Identity(), {(0, 9): cache.name})
    assert sizes(found.in_use) == {"pool 'cache'": 17, "parameters": 13, GRAPHS: 12, REST: 3}


def test_a_pool_that_nobody_has_is_no_pool():
    gc.collect()  # those of other tests
    cache = used("cache", 9)
    assert [pool.name for pool in living_pools().values()] == ["cache"]
    del cache
    gc.collect()
    MemoryPool("unused", device="cpu")
    assert living_pools() == {}
    found = look(MOMENT, [], [], nn.Identity())
    assert sizes(found.in_use) == {GRAPHS: 42, REST: 3}
    assert not any("let go of one" in text for text in advice(found, MOMENT, "forward", {}))


def test_a_device_tells_what_its_pools_hold(monkeypatch):
    cache = used("cache", 9)

    def snapshot(mempool_id=None, include_traces=True):
        assert not include_traces  # or a recorded history would be copied each time
        return [s for s in SEGMENTS if mempool_id in (None, s["segment_pool_id"])]

    monkeypatch.setattr(torch.cuda, "memory_snapshot", snapshot)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * MB)
    )
    source = CUDAMemory(torch.device("cuda", 0))
    assert source.pools() == {}  # that one is of the CPU
    cache.device = torch.device("cuda", 0)
    elsewhere = used("elsewhere", 11)
    elsewhere.device = torch.device("cuda", 1)
    expected = PoolStatistics(
        name="cache", reserved_bytes=49 * MB, allocated_bytes=30 * MB, num_segments=1
    )
    assert source.pools() == {"cache": expected}
    assert source.private_bytes() == 23 * MB
    other = used("cache", 7)
    other.device = torch.device("cuda", 0)
    assert source.pools()["cache"].reserved_bytes == 72 * MB
    assert source.private_bytes() == 0
