"""What settings of the allocators do on a real device, each beside a process without it.

That torch has taken a setting, which `test_allocator_on_gpu.py` reads back, does not say that it
goes by it.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Any

import pytest

from gpu.allocator_process import child, lacking
from torchfast import AllocatorConfig
from torchfast.memory.allocator_keys import KEYS

pytestmark = pytest.mark.requires(gpus=1)

BEGIN = """
import os, time

MB = 2**20

def room(megabytes):
    return torch.empty(int(megabytes * MB), dtype=torch.uint8, device="cuda")

def reserved():
    return torch.cuda.memory_reserved() // MB
"""


@dataclass(frozen=True)
class Effect:
    """What a setting changes.

    Attributes:
        value: Of the setting.
        code: Answers.
        without: What it answers without the setting.
        found: What it answers with it.
        beside: Settings of both.
    """

    value: Any
    code: str
    without: Any
    found: Any
    beside: tuple[tuple[str, Any], ...] = ()


# A hole of 128 MB, and then 80 MB of it, or 80 MB more.
HOLE = """
before = reserved()
hole = room(128)
del hole
held = room(80)
answer(reserved() - before)
"""
# Of what may be allocated, 0.3 are in use, 0.3 are free, and 0.31 are asked for, which no hole has.
COLLECTED = """
allowed = 0.01 * torch.cuda.get_device_properties(0).total_memory / MB
held, free = room(0.3 * allowed), room(0.3 * allowed)
del free
more = room(0.31 * allowed)
answer(round(reserved() / allowed, 1))
"""
# Another stream has used a tensor of the capture, and joins before there is another.
JOINED = """
torch.ones(1, device="cuda")
graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
with torch.cuda.graph(graph):
    home = torch.cuda.current_stream()
    first = room(32).zero_()
    side.wait_stream(home)
    with torch.cuda.stream(side):
        first.add_(1)
    first.record_stream(side)
    address = first.data_ptr()
    del first
    home.wait_stream(side)
    small = torch.zeros(8, device="cuda")
    second = room(32)
answer(second.data_ptr() == address)
"""
PINNED = """
torch.ones(1, device="cuda")
held = [torch.empty(size, dtype=torch.uint8).pin_memory() for size in (1 << 12, 1 << 16, 1 << 20)]
answer({answer})
"""
# Torch's own threads have this name; they give it to themselves.
THREADS = """
def threads():
    names = []
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/comm") as file:
            names.append(file.read().strip())
    return names.count("CaffeTaskThread")

before = threads()
held = torch.empty(1 << 20, dtype=torch.uint8).pin_memory()
time.sleep(1)
answer(threads() > before)
"""

EFFECTS = {
    "large_segment_size_mb": Effect(
        64, "before = reserved(); held = room(2); answer(reserved() - before)", 20, 64
    ),
    "max_split_size_mb": Effect(64, HOLE, 128, 208),
    "max_non_split_rounding_mb": Effect(64, HOLE, 208, 128, (("max_split_size_mb", 64),)),
    "garbage_collection_threshold": Effect(
        0.5, COLLECTED, 0.9, 0.6, (("per_process_memory_fraction", 0.01),)
    ),
    "roundup_power2_divisions": Effect(
        4,
        "held = room(1.25 + 1 / 16); answer(torch.cuda.memory_allocated() / MB)",
        1.25 + 1 / 16,
        1.5,
    ),
    "expandable_segments": Effect(
        True,
        "held = room(2); answer(torch.cuda.memory_snapshot()[0]['is_expandable'])",
        False,
        True,
    ),
    "per_process_memory_fraction": Effect(
        0.01,
        """
        total = torch.cuda.get_device_properties(0).total_memory
        try:
            answer(room(0.02 * total / MB).numel() > 0)
        except torch.OutOfMemoryError:
            answer(False)
        """,
        True,
        False,
    ),
    "graph_capture_record_stream_reuse": Effect(True, JOINED, False, True),
    "pinned_use_background_threads": Effect(True, THREADS, False, True),
    "pinned_num_register_threads": Effect(
        8, THREADS, False, True, (("pinned_use_cuda_host_register", True),)
    ),
    "pinned_reserve_segment_size_mb": Effect(
        64,
        PINNED.format(answer="torch.cuda.host_memory_stats()['host_alloc_time.count']"),
        3,  # calls of the driver
        1,
    ),
    "pinned_max_round_threshold_mb": Effect(
        1,
        "held = torch.empty(5 * MB, dtype=torch.uint8).pin_memory();"
        " answer(torch.cuda.host_memory_stats()['allocated_bytes.peak'] < 8 * MB)",
        False,
        True,
    ),
    "pinned_max_cached_size_mb": Effect(
        1,
        "torch.empty(4 * MB, dtype=torch.uint8).pin_memory();"
        " answer(torch.cuda.host_memory_stats()['allocated_bytes.current'] > 0)",
        True,
        False,
    ),
}
# What they do is when something happens, how fast, or what becomes of an error of the driver's.
NOT_SEEN = {
    "release_lock_on_cudamalloc",
    "pinned_use_cuda_host_register",
    "throw_on_cudamalloc_oom",
    "pinned_free_catch_all",
    "expandable_segments_reserve",
    "expandable_segments_reserve_by_class",
    "backend",  # which `test_allocator_on_gpu.py` asks torch for
}


def test_every_setting_has_an_effect_or_a_reason():
    assert set(EFFECTS) | NOT_SEEN == set(KEYS)
    assert not set(EFFECTS) & NOT_SEEN


@pytest.mark.parametrize("name", EFFECTS)
def test_what_a_setting_does(name):
    if reason := lacking(name):
        pytest.skip(reason)
    effect = EFFECTS[name]
    beside = AllocatorConfig(**dict(effect.beside))
    config = beside.merged(AllocatorConfig(**{name: effect.value}))
    answers = [
        child(BEGIN + textwrap.dedent(effect.code), **each.to_env()) for each in (beside, config)
    ]
    assert answers == [effect.without, effect.found]
