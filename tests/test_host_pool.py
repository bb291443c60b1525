"""Ranges never overlap, fit, and are joined again."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchfast._core import cgroups
from torchfast.memory import host_pool
from torchfast.memory.host_pool import ALIGNMENT, HostPool, default_host_bytes
from torchfast.memory.sources import ProcessMemory

SLAB = 1 << 14


def pool(max_bytes=1 << 30):
    sizes = []

    def allocate(num_bytes):
        sizes.append(num_bytes)
        return torch.zeros(num_bytes, dtype=torch.uint8)

    made = HostPool(allocate, max_bytes)
    made.sizes = sizes
    return made


@settings(max_examples=40)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40_000)), max_size=40))
def test_ranges_do_not_overlap_and_all_comes_back(actions):
    host_pool.SLAB_BYTES, before = SLAB, host_pool.SLAB_BYTES
    try:
        made, held = pool(), []
        for number, (takes, value) in enumerate(actions, 1):
            if takes or not held:
                taken = made.take(value)
                assert taken.memory.numel() >= value
                assert taken.memory.data_ptr() % 64 == 0
                assert not taken.memory.any()  # nobody else's
                taken.memory.fill_(number)
                held.append((taken, number))
            else:
                taken, number = held.pop(value % len(held))
                assert (taken.memory == number).all()
                taken.memory.zero_()
                made.give(taken)
        for taken, number in held:
            assert (taken.memory == number).all()
            taken.memory.zero_()
            made.give(taken)
        assert made.used_bytes == 0
        assert len(made._free) == made.num_slabs  # one range a slab
        assert made.num_bytes == sum(made.sizes)
    finally:
        host_pool.SLAB_BYTES = before


def test_the_same_sizes_again_ask_for_nothing(monkeypatch):
    monkeypatch.setattr(host_pool, "SLAB_BYTES", SLAB)
    made = pool()
    for _ in range(4):
        held = [made.take(size) for size in (600, 9000, 5000, 20_000, 1, 700)]
        for taken in held[::-1]:
            made.give(taken)
    assert sum(made.sizes) <= 4 * SLAB
    assert len(made.sizes) == made.num_slabs <= 3


def test_the_limit_holds_and_a_capture_may_not_grow(monkeypatch):
    monkeypatch.setattr(host_pool, "SLAB_BYTES", SLAB)
    made = pool(max_bytes=2 * SLAB)
    assert made.take(10, may_grow=False) is None
    first = made.take(SLAB)
    assert made.take(SLAB, may_grow=False) is None
    assert made.take(SLAB) is not None
    assert made.take(1) is None
    made.give(first)
    assert made.take(SLAB - ALIGNMENT + 1, may_grow=False) is not None


def test_ranks_share_the_machine(monkeypatch):
    alone = default_host_bytes()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert default_host_bytes() == alone // 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "many")
    assert default_host_bytes() == alone


def test_a_container_has_less_than_its_machine(monkeypatch, tmp_path):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    alone, machine = default_host_bytes(), ProcessMemory().limit_bytes
    for number, (name, text) in enumerate(
        [("memory.max", "4096\n"), ("memory.limit_in_bytes", "4096\n"), ("memory.max", "max\n")]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / name).write_text(text)
        folders = [tmp_path / "none", folder]
        monkeypatch.setattr(cgroups, "cgroup_folders", lambda _, found=folders: iter(found))
        is_limited = text != "max\n"
        assert default_host_bytes() == (2048 if is_limited else alone)
        assert ProcessMemory().limit_bytes == (4096 if is_limited else machine)
