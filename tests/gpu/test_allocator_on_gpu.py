"""Allocator settings on a real device: each is read back, or its effect is; and the monitor.

Settings belong to the process, so each test of one has a process of its own. What settings do, each
beside a process without it, is in `test_allocator_effects_on_gpu.py`.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

from benchmarks import fragmentation
from gpu.allocator_process import MB, TORCH, child, lacking
from gpu.syncs import forbid_syncs
from torchfast import AllocatorConfig, MemoryMonitor, Trainer
from torchfast.memory.allocator_keys import KEYS
from torchfast.memory.sources import CUDAMemory

pytestmark = pytest.mark.requires(gpus=1)

# Where torch tells the setting, that is read; elsewhere what it does, or that torch takes it.
READ_BACK = {
    "backend": ("cudaMallocAsync", "torch.cuda.memory.get_allocator_backend()", "cudaMallocAsync"),
    "large_segment_size_mb": (
        64,
        "torch.empty(2**21, dtype=torch.uint8, device='cuda').size(0)"
        " and torch.cuda.memory_reserved()",
        66 * MB,  # and 2 MB of the small tensor's
    ),
    "max_split_size_mb": (64, "settings()['max_split_size']", 64 * MB),
    "max_non_split_rounding_mb": (64, "torch.cuda.memory_allocated()", 512),
    "garbage_collection_threshold": (0.5, "settings()['garbage_collection_threshold']", 0.5),
    "roundup_power2_divisions": (
        {256: 2, 512: 4, ">": 8},
        "[settings()['roundup_power2_divisions'][str(n)] for n in (1, 256, 2048)]",
        [2, 2, 8],
    ),
    "expandable_segments": (True, "settings()['expandable_segments']", True),
    "expandable_segments_reserve": ("40G", "torch.cuda.memory_allocated()", 512),
    "expandable_segments_reserve_by_class": ({"a": 0.5}, "torch.cuda.memory_allocated()", 512),
    "release_lock_on_cudamalloc": (True, "settings()['release_lock_on_cudamalloc']", True),
    "per_process_memory_fraction": (
        0.5,
        "round(torch.cuda.get_per_process_memory_fraction(), 3)",
        0.5,
    ),
    "throw_on_cudamalloc_oom": (True, "torch.cuda.memory_allocated()", 512),
    "graph_capture_record_stream_reuse": (
        True,
        "settings()['graph_capture_record_stream_reuse']",
        True,
    ),
    "pinned_use_background_threads": (True, "torch.empty(8).pin_memory().is_pinned()", True),
    "pinned_max_round_threshold_mb": (
        1,
        "torch.empty(5 * 2**20, dtype=torch.uint8).pin_memory().size(0)"
        " and torch.cuda.host_memory_stats()['allocated_bytes.peak'] < 8 * 2**20",
        True,
    ),
    "pinned_max_cached_size_mb": (
        1,
        "torch.empty(4 * 2**20, dtype=torch.uint8).pin_memory().size(0)"
        " and torch.cuda.host_memory_stats()['allocated_bytes.current']",
        0,
    ),
    "pinned_use_cuda_host_register": (True, "settings()['pinned_use_cuda_host_register']", True),
    "pinned_num_register_threads": (8, "settings()['pinned_num_register_threads']", 8),
    "pinned_reserve_segment_size_mb": (64, "torch.empty(8).pin_memory().is_pinned()", True),
    "pinned_free_catch_all": (True, "torch.empty(8).pin_memory().is_pinned()", True),
}


def test_every_key_is_read_back():
    assert set(READ_BACK) == set(KEYS)


@pytest.mark.parametrize("name", READ_BACK)
def test_a_setting_of_the_environment_is_there(name):
    if reason := lacking(name):
        pytest.skip(reason)
    value, expression, expected = READ_BACK[name]
    config = AllocatorConfig(**{name: value})
    [(variable, text)] = config.to_env().items()
    found = child(
        f"""
        kept = torch.ones(1, device="cuda")
        # The driver's allocator has no snapshot to tell its settings in.
        answer([{expression}, settings()["PYTORCH_CUDA_ALLOC_CONF"] if {name != "backend"} else ""])
        """,
        **{variable: text},
    )
    assert found == [expected, text if name != "backend" else ""]


@pytest.mark.parametrize("name", [name for name, key in KEYS.items() if key.since > TORCH])
def test_a_key_of_a_later_version_is_refused_by_torch_too(name):
    value = {"expandable_segments_reserve": "0.5"}.get(name, "64" if name[-3:] == "_mb" else "True")
    with pytest.raises(AssertionError, match="Unrecognized key"):
        child("torch.ones(1, device='cuda'); answer(1)", PYTORCH_ALLOC_CONF=f"{name}:{value}")


def test_the_variable_that_wins_is_torchs():
    found = child(
        """
        torch.ones(1, device="cuda")
        told = settings()
        answer([told["max_split_size"], told["expandable_segments"]])
        """,
        PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:64",
        PYTORCH_ALLOC_CONF="expandable_segments:True",
    )
    assert found == [64 * MB, False]


# --- changes in a running program ---------------------------------------------------------------


def test_apply_before_cuda_is_used():
    found = child(
        """
        change = AllocatorConfig(
            expandable_segments=True, per_process_memory_fraction=0.5, large_segment_size_mb=64
        ).apply()
        initialized = torch.cuda.is_initialized()
        torch.ones(1, device="cuda")
        told = settings()["expandable_segments"]
        fraction = round(torch.cuda.get_per_process_memory_fraction(), 3)
        answer([initialized, told, fraction, [s.outcome for s in change.settings]])
        """
    )
    assert found == [False, True, 0.5, ["in effect"] * 3]


def test_apply_after_cuda_is_used_keeps_what_is_in_force():
    found = child(
        """
        torch.ones(1, device="cuda"), torch.empty(8).pin_memory()
        change = AllocatorConfig(
            backend="cudaMallocAsync", pinned_reserve_segment_size_mb=64
        ).apply()
        late = {s.name: s.outcome for s in change.settings}
        change = AllocatorConfig(
            expandable_segments=True, release_lock_on_cudamalloc=True,
            per_process_memory_fraction=0.25, roundup_power2_divisions=8,
        ).apply()
        told = settings()
        answer({
            "late": late,
            "outcomes": sorted({s.outcome for s in change.settings}),
            "backend": torch.cuda.memory.get_allocator_backend(),
            "split": told["max_split_size"],
            "expandable": told["expandable_segments"],
            "lock": told["release_lock_on_cudamalloc"],
            "divisions": told["roundup_power2_divisions"]["1"],
            "fraction": round(torch.cuda.get_per_process_memory_fraction(), 3),
            "agrees": told["PYTORCH_CUDA_ALLOC_CONF"] == change.in_force,
        })
        """,
        PYTORCH_ALLOC_CONF="max_split_size_mb:64",
    )
    assert found == {
        "late": {"backend": "too late", "pinned_reserve_segment_size_mb": "too late"},
        "outcomes": ["in effect"],
        "backend": "native",
        "split": 64 * MB,
        "expandable": True,
        "lock": True,
        "divisions": 8,
        "fraction": 0.25,
        "agrees": True,
    }


def test_a_plan_makes_the_settings_before_the_model_is_moved():
    found = child(
        """
        from torch import nn, optim
        from torchfast import Plan, Trainer

        trainer = Trainer(
            nn.Linear(8, 8),
            lambda parameters: optim.SGD(parameters, lr=0.1),
            lambda model, x: model(x).square().mean(),
            Plan(allocator="variable-shapes"),
            device="cuda",
        )
        trainer.step(torch.ones(4, 8))
        grows = all(s["is_expandable"] for s in torch.cuda.memory_snapshot())
        outcomes = [d.outcome for d in trainer.report().decisions if d.lever == "allocator"]
        answer([settings()["expandable_segments"], grows, outcomes])
        """
    )
    assert found == [True, True, ["applied"]]


def test_torch_itself_forgets_what_is_not_repeated():
    """Why `apply` sends all that is in force: the control of the test above."""
    split = child(
        """
        torch.ones(1, device="cuda")
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
        answer(settings()["max_split_size"])
        """,
        PYTORCH_ALLOC_CONF="max_split_size_mb:64",
    )
    assert split != 64 * MB


# --- fragmentation ------------------------------------------------------------------------------

# Each step's largest tensor is larger than all before, so no segment that was freed holds it.
SHAPES = """
monitor = MemoryMonitor("cuda", every=1)
for step in range(40):
    x = torch.empty((16 + 2 * step) * 2**20, dtype=torch.uint8, device="cuda")
    del x
    monitor.step()
answer([torch.cuda.memory_reserved(), monitor.diagnosis().verdict, monitor.diagnosis().remedy])
"""
LARGEST = (16 + 2 * 39) * MB


def test_varying_shapes_fragment_without_the_preset():
    reserved, verdict, remedy = child(SHAPES)
    assert reserved > 5 * LARGEST
    assert verdict == "fragmentation"
    assert "expandable_segments=True" in remedy


def test_varying_shapes_do_not_with_the_preset():
    reserved, verdict, _ = child(SHAPES, **AllocatorConfig.preset("variable-shapes").to_env())
    assert reserved < 1.5 * LARGEST
    assert verdict == "healthy"


def long_run(arm):
    """Return what the run kept; where others have filled the device, that was given back."""
    for _ in range(3):
        found = fragmentation.run(arm)
        if not found["retries"]:
            return found["reserved_by_peak"]
    raise AssertionError(f"the device was full in three runs; in the last one {found} was kept")


def test_fragmentation_of_5000_steps_grows_without_the_preset():
    wasted = long_run("torch's own settings")
    assert wasted[-1] > 2 * wasted[0]
    assert max(wasted) > 4  # at the end it is less, as the peak of the tensors grows too


def test_fragmentation_of_5000_steps_is_flat_with_the_preset():
    wasted = long_run("variable-shapes")
    assert max(wasted) < 1.5
    assert wasted[-1] < 1.2 * wasted[0]


# --- the monitor --------------------------------------------------------------------------------


def test_a_planted_leak_is_found_with_its_line(caplog):
    monitor = MemoryMonitor("cuda", every=2)
    kept = []
    for _ in range(64):
        kept.append(torch.ones(2**18, device="cuda") * 2)  # the leak, of 1 MB
        monitor.step()
    found = monitor.diagnosis()
    monitor.close()
    assert found.verdict == "leak"
    assert found.slope_bytes == pytest.approx(MB, rel=0.1)
    assert "test_allocator_on_gpu.py" in found.lines[0].line
    assert "test_a_planted_leak" in found.lines[0].line
    assert found.lines[0].num_bytes == pytest.approx(6 * MB, rel=0.4)
    assert not torch._C._cuda_isHistoryEnabled()
    assert "test_allocator_on_gpu.py" in caplog.text


def test_without_a_leak_there_is_none(caplog):
    monitor = MemoryMonitor("cuda", every=1)
    for _ in range(64):
        x = torch.ones(2**18, device="cuda") * 2
        del x
        monitor.step()
    assert monitor.diagnosis().verdict in ("healthy", "short")  # short: others use the device too
    assert monitor.diagnosis().slope_bytes == 0
    assert "leak" not in caplog.text


def test_a_step_in_a_graph_is_healthy():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)).cuda()
    trainer = Trainer(
        model,
        optim.AdamW(model.parameters()),
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    )
    batch = (torch.randn(16, 64, device="cuda"), torch.randint(8, (16,), device="cuda"))
    monitor = MemoryMonitor("cuda", every=1)
    for _ in range(48):
        trainer.step(batch)
        monitor.step()
    assert monitor.diagnosis().verdict in ("healthy", "short")
    trainer.close()


def test_nothing_is_waited_for():
    monitor = MemoryMonitor("cuda", every=1)
    kept = []
    forbid_syncs(True)
    for _ in range(40):
        kept.append(torch.empty(2**20, device="cuda"))
        monitor.step()
    forbid_syncs(False)
    assert monitor.diagnosis().verdict == "leak"
    monitor.close()


def test_a_history_of_the_programs_own_is_read_and_left_alone():
    torch.cuda.memory._record_memory_history(max_entries=16, stacks="python")
    try:
        source = CUDAMemory(torch.device("cuda", torch.cuda.current_device()))
        assert source.start_trace() is None
        before = source.live_by_line()
        held = torch.ones(4 * MB, dtype=torch.uint8, device="cuda")
        grown = {n: s - before.get(n, 0) for n, s in source.live_by_line().items()}
        [line] = [name for name, size in grown.items() if size == held.numel()]
        assert "test_allocator_on_gpu.py" in line
        source.stop_trace()
        assert torch._C._cuda_isHistoryEnabled()
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
