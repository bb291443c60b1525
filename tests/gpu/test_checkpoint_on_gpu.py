"""Checkpoints of CUDA tensors: pinned staging, on the stream that the step runs on."""

from __future__ import annotations

import pytest
import torch

from torchfast import CheckpointManager, CheckpointWriteError

pytestmark = pytest.mark.requires(gpus=1)


def test_staging_is_pinned_and_used_again(tmp_path):
    state = {"a": torch.randn(1000, 1000, device="cuda"), "b": torch.ones(3, 2, device="cuda").t()}
    with CheckpointManager(tmp_path) as checkpoints:
        addresses = set()
        for step in (1, 2):
            checkpoints.save(state, step)
            [block] = checkpoints._stager._blocks.values()
            assert block.memory.is_pinned()
            addresses.add(block.memory.data_ptr())
        assert len(addresses) == 1
        found = checkpoints.load().state
    assert all(torch.equal(found[name], value.cpu()) for name, value in state.items())


def test_the_copy_comes_between_the_steps(tmp_path):
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
