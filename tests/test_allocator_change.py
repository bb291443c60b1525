"""`AllocatorConfig.apply`: what took effect, what came too late, and that nothing else is lost.

CUDA is played by a stand-in, at the moments at which torch reads its settings.
"""

from __future__ import annotations

import os

import pytest
import torch

from torchfast import AllocatorConfig, UnsupportedDeviceError
from torchfast.memory.allocator_environment import VARIABLES


class Allocator:
    """Torch's allocator as `apply` sees it: a text in force, a backend, a state of the process."""

    def __init__(self, monkeypatch):
        self.text = ""
        self.initialized = False
        self.num_pinned = 0
        self.fractions = []
        self.patch = monkeypatch
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        replaced = {
            "_accelerator_getAllocatorSettings": lambda: self.text,
            "_accelerator_setAllocatorSettings": self.set,
            "_cuda_getAllocatorBackend": lambda: "native",
        }
        for name, value in replaced.items():
            monkeypatch.setattr(torch._C, name, value, raising=False)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: self.initialized)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(
            torch.cuda, "host_memory_stats", lambda: {"num_host_alloc": self.num_pinned}
        )
        monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", self.fractions.append)

    def set(self, text):
        assert "backend" not in text
        self.text = text


@pytest.fixture
def allocator(monkeypatch):
    return Allocator(monkeypatch)


def outcomes(change):
    return {setting.name: setting.outcome for setting in change.settings}


def test_before_cuda_is_used_all_but_the_backend_is_in_time(allocator):
    change = AllocatorConfig(
        expandable_segments=True, per_process_memory_fraction=0.5, pinned_reserve_segment_size_mb=64
    ).apply()
    assert set(outcomes(change).values()) == {"in effect"}
    assert allocator.text == change.in_force
    assert "expandable_segments:True" in allocator.text
    assert os.environ["PYTORCH_ALLOC_CONF"] == change.in_force
    assert change.variable == "PYTORCH_ALLOC_CONF"
    assert allocator.fractions == []
    assert "from the first allocation on" in str(change)


def test_the_backend_is_too_late(allocator):
    change = AllocatorConfig(backend="cudaMallocAsync").apply()
    [setting] = change.too_late
    assert "python -m torchfast env" in setting.detail
    assert "'native'" in setting.detail
    assert change.in_force == "" == os.environ["PYTORCH_ALLOC_CONF"]


def test_the_backend_that_is_there_is_unchanged(allocator):
    change = AllocatorConfig(backend="native", expandable_segments=True).apply()
    assert outcomes(change) == {"backend": "unchanged", "expandable_segments": "in effect"}
    assert allocator.text == "expandable_segments:True"


def test_what_is_in_force_is_sent_again(allocator):
    """Torch forgets some settings that a new text does not repeat."""
    allocator.text = "max_split_size_mb:64,roundup_power2_divisions:[256:2,>:4]"
    change = AllocatorConfig(release_lock_on_cudamalloc=True).apply()
    expected = {
        "max_split_size_mb": 64,
        "roundup_power2_divisions": ((256, 2), (">", 4)),
        "release_lock_on_cudamalloc": True,
    }
    assert AllocatorConfig.parse(allocator.text).settings == expected
    assert outcomes(change) == {"release_lock_on_cudamalloc": "in effect"}


def test_after_cuda_is_used(allocator):
    allocator.initialized = True
    allocator.num_pinned = 1
    allocator.text = "max_split_size_mb:64"
    change = AllocatorConfig(
        max_split_size_mb=64,
        expandable_segments=True,
        per_process_memory_fraction=0.5,
        pinned_reserve_segment_size_mb=64,
    ).apply()
    assert outcomes(change) == {
        "max_split_size_mb": "unchanged",
        "expandable_segments": "in effect",
        "per_process_memory_fraction": "in effect",
        "pinned_reserve_segment_size_mb": "too late",
    }
    assert "pinned_reserve_segment_size_mb" not in allocator.text
    assert allocator.fractions == [0.5]
    details = {setting.name: setting.detail for setting in change.settings}
    assert "until torch.cuda.empty_cache() returns them" in details["expandable_segments"]
    assert "on cuda:0" in details["per_process_memory_fraction"]
    assert "first pinned block" in details["pinned_reserve_segment_size_mb"]


def test_a_fraction_that_stays_is_not_set_again(allocator):
    allocator.initialized = True
    allocator.text = "per_process_memory_fraction:0.5"
    AllocatorConfig(expandable_segments=True).apply()
    assert allocator.fractions == []


def test_the_reserve_is_in_time_before_the_first_pinned_block(allocator):
    allocator.initialized = True
    change = AllocatorConfig(pinned_reserve_segment_size_mb=64).apply()
    assert outcomes(change) == {"pinned_reserve_segment_size_mb": "in effect"}


def test_the_variable_that_wins_is_the_one_that_is_set(allocator):
    allocator.patch.setenv("PYTORCH_CUDA_ALLOC_CONF", "")
    change = AllocatorConfig(expandable_segments=True).apply()
    assert change.variable == "PYTORCH_CUDA_ALLOC_CONF"
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert AllocatorConfig.from_env() == AllocatorConfig(expandable_segments=True)


def test_a_variable_that_loses_is_said(allocator):
    allocator.patch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    allocator.patch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    change = AllocatorConfig(release_lock_on_cudamalloc=True).apply()
    [said] = change.remarks
    assert "PYTORCH_ALLOC_CONF='expandable_segments:True' of the environment is ignored" in said
    assert "PYTORCH_CUDA_ALLOC_CONF beats it" in said
    assert said in str(change)
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


def test_a_contradiction_with_what_is_in_force(allocator):
    allocator.text = "large_segment_size_mb:64"
    with pytest.raises(ValueError, match="which is 64, got 32"):
        AllocatorConfig(max_split_size_mb=32).apply()
    assert allocator.text == "large_segment_size_mb:64"
    assert "PYTORCH_ALLOC_CONF" not in os.environ


def test_torch_2_11_tells_its_settings_in_a_snapshot_only(allocator, monkeypatch):
    monkeypatch.delattr(torch._C, "_accelerator_getAllocatorSettings")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    AllocatorConfig(expandable_segments=True).apply()
    assert allocator.text == "max_split_size_mb:64,expandable_segments:True"

    allocator.initialized = True
    told = {"allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:32"}}
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: told)
    AllocatorConfig(expandable_segments=True).apply()
    assert allocator.text == "max_split_size_mb:32,expandable_segments:True"


def test_an_unknown_key_is_refused_before_anything_is_done(allocator, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.11.0")
    with pytest.raises(ValueError, match=r"known to torch 2\.13 and later"):
        AllocatorConfig(pinned_max_cached_size_mb=64, expandable_segments=True).apply()
    assert allocator.text == ""


def test_an_accelerator_that_lacks_a_key(allocator, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.xpu, "_is_compiled", lambda: True)
    with pytest.raises(UnsupportedDeviceError, match="xpu has none like it"):
        AllocatorConfig(per_process_memory_fraction=0.5).apply()


def test_an_allocator_that_is_off(allocator, monkeypatch):
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    assert "no setting counts" in AllocatorConfig(expandable_segments=True).apply().remarks[-1]


def test_without_cuda_nothing_is_done(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.xpu, "_is_compiled", lambda: False)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    change = AllocatorConfig(expandable_segments=True).apply()
    assert outcomes(change) == {"expandable_segments": "not here"}
    assert not torch.cuda.is_initialized()
    assert "PYTORCH_ALLOC_CONF" not in os.environ
    assert change.to_dict()["settings"]["expandable_segments"]["outcome"] == "not here"
