"""Checkpoints of CUDA tensors: pinned staging, on the stream that the step runs on."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import torch

from torchfast import CheckpointManager, CheckpointWriteError
from torchfast._core.compare import differences
from torchfast.checkpoint import staging

pytestmark = pytest.mark.requires(gpus=1)


def test_staging_is_pinned_and_used_again(tmp_path):
    state = {"a": torch.randn(1000, 1000, device="cuda"), "b": torch.ones(3, 2, device="cuda").t()}
    with CheckpointManager(tmp_path) as checkpoints:
        addresses = set()
        for step in (1, 2):
            checkpoints.save(state, step)
            checkpoints.wait()
            [block] = checkpoints._stager._blocks.values()
            assert block.memory.is_pinned()
            addresses.add(block.memory.data_ptr())
        assert len(addresses) == 1
        found = checkpoints.load().state
    assert all(torch.equal(found[name], value.cpu()) for name, value in state.items())


@pytest.fixture(params=["room", "no room"])
def room(request, monkeypatch):
    """Whether the device has room for a second copy."""
    if request.param == "no room":
        monkeypatch.setattr(staging, "_PART_OF_FREE", 0.0)
    return request.param == "room"


def test_the_copy_comes_between_the_steps(tmp_path, room):
    """What was queued before the save is in it, what is queued after is not."""
    weight = torch.zeros(64 << 20, device="cuda")
    stream = torch.cuda.Stream()
    with CheckpointManager(tmp_path) as checkpoints, torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.default_stream())
        torch.cuda._sleep(100_000_000)
        weight.fill_(1.0)
        checkpoints.save({"weight": weight}, 1)
        weight.fill_(2.0)
        torch.cuda.synchronize()
        assert torch.equal(checkpoints.load().state["weight"], torch.ones(64 << 20))


def test_the_host_waits_for_no_copy_where_the_device_has_room(tmp_path, room):
    weight = torch.ones(64 << 20, device="cuda")
    with CheckpointManager(tmp_path) as checkpoints:
        for step in range(3):  # of the first, whoever writes pins what is needed
            checkpoints.wait()
            torch.cuda.synchronize()
            torch.cuda._sleep(400_000_000)  # about 0.2 s
            start = time.perf_counter()
            checkpoints.save({"weight": weight}, step)
            seconds = time.perf_counter() - start
            assert (seconds < 0.1) == room, f"save {step} took {seconds:.3f} s"
        weight.zero_()
        assert torch.equal(checkpoints.load().state["weight"], torch.ones(64 << 20))


def test_tensors_of_all_kinds_arrive_as_they_are(tmp_path, room):
    state = {
        "bf16": torch.randn(1000, 3, device="cuda").bfloat16(),
        "bool": torch.rand(77, device="cuda") > 0.5,
        "int": torch.arange(5, device="cuda"),
        "complex": torch.randn(9, device="cuda", dtype=torch.complex64).conj(),
        "fp8": torch.randn(16, device="cuda").to(torch.float8_e4m3fn),
        "strided": torch.randn(6, 4, device="cuda").t()[::2],
        "scalar": torch.tensor(3.5, device="cuda"),
        "empty": torch.empty(0, 3, device="cuda"),
        "here": torch.randn(5),
    }
    with CheckpointManager(tmp_path) as checkpoints:
        for step in range(2):
            checkpoints.save(state, step)
        found = checkpoints.load().state
    for name, value in state.items():
        assert not differences(value.cpu().resolve_conj(), found[name].resolve_conj()), name
        assert found[name].dtype == value.dtype


def test_a_blocking_save_and_both_devices_at_once(tmp_path):
    state = {"here": torch.arange(5.0), "there": torch.arange(5, device="cuda").bfloat16()}
    state["rng"] = torch.cuda.get_rng_state()
    with CheckpointManager(tmp_path) as checkpoints:
        for step, blocking in enumerate([True, False]):
            checkpoints.save(state, step, blocking=blocking)
            found = checkpoints.load(step).state
            assert all(torch.equal(found[name], value.cpu()) for name, value in state.items())


def test_no_save_during_a_capture(tmp_path):
    weight = torch.zeros(3, device="cuda")
    checkpoints = CheckpointManager(tmp_path)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        weight.add_(1.0)
        with pytest.raises(CheckpointWriteError, match="is being captured"):
            checkpoints.save({"weight": weight}, 1)
    graph.replay()
    checkpoints.save({"weight": weight}, 1)
    checkpoints.close()


_ON_THE_SECOND = """
import sys, torch
from torchfast import CheckpointManager
torch.cuda.set_device(1)
with CheckpointManager(sys.argv[1]) as checkpoints:
    checkpoints.save({"a": torch.ones(1000, device="cuda")}, 1)
    checkpoints.wait()
assert torch._C._cuda_hasPrimaryContext(1)
assert not torch._C._cuda_hasPrimaryContext(0)
"""


@pytest.mark.requires(gpus=2)
def test_a_save_from_the_second_device_leaves_the_first_alone(tmp_path):
    """Of several ranks each would take memory there, for nothing."""
    subprocess.run([sys.executable, "-c", _ON_THE_SECOND, str(tmp_path)], check=True)
