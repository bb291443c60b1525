"""What one rank raises ends the others' wait for it on the device, though its process lives on."""

from __future__ import annotations

import pytest
import torch

from gpu import failing_jobs
from gpu.own_process import spawned
from gpu.requirements import requires

pytestmark = [requires(gpus=2), pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    ("shard", "is_captured"), [("ddp", False), ("fsdp", False), ("ddp", True), ("fsdp", True)]
)
def test_a_rank_hears_of_an_error_while_it_waits_on_the_device(shard, is_captured, tmp_path):
    arguments = (shard, is_captured, str(tmp_path / "store"), str(tmp_path))
    ended = spawned(failing_jobs.run, arguments, 90)
    assert not ended, ended
    (waiting, counters), (failed, _) = (
        torch.load(tmp_path / f"rank-{rank}.pt") for rank in range(2)
    )
    assert (counters.get("replays", 0) > 0) == is_captured
    assert failed[0] in ("TypeError", "ValueError")
    assert waiting[0] == "RankError"
    assert f"so no rank can go on: rank 1: {failed[0]}: " in waiting[1]
    assert waiting[2] < failing_jobs.GROUP_TIMEOUT_S / 4


@pytest.mark.parametrize("at", [0, 2])
def test_ranks_that_use_different_parts_hear_of_it(at, tmp_path):
    arguments = ("fsdp", False, str(tmp_path / "store"), str(tmp_path), at)
    ended = spawned(failing_jobs.run, arguments, 90)
    assert not ended, ended
    for rank in range(2):
        (name, message, seconds), _ = torch.load(tmp_path / f"rank-{rank}.pt")
        assert name == "RankError"
        assert "the ranks used different parts of the model in a step" in message
        assert seconds < failing_jobs.GROUP_TIMEOUT_S / 4
