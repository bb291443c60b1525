"""One GPU of two has too little memory for a step: both do it in equally many parts."""

from __future__ import annotations

import pytest
import torch

from gpu import splitting_jobs
from gpu.own_process import spawned
from gpu.requirements import requires

pytestmark = [requires(gpus=2), pytest.mark.timeout(300)]


@pytest.mark.parametrize("shard", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    ("where", "is_captured"), [("forward", False), ("backward", False), ("forward", True)]
)
def test_both_go_on_in_equally_many_parts(shard, where, is_captured, tmp_path):
    arguments = (shard, where, is_captured, str(tmp_path / "store"), str(tmp_path))
    ended = spawned(splitting_jobs.run, arguments, 150)
    assert not ended, ended
    told = []
    for rank in range(2):
        found, expected = torch.load(tmp_path / f"rank-{rank}.pt")
        torch.testing.assert_close(found["losses"], expected["losses"], rtol=1e-3, atol=1e-4)
        for name, value in expected["state"].items():
            close = {"rtol": 1e-2, "atol": 1e-4}
            torch.testing.assert_close(found["state"][name], value, **close, msg=name)
        counters = found["counters"]
        told.append([counters[key] for key in ("out_of_memory", "split_steps", "most_parts")])
        assert (counters.get("replays", 0) > 0) == is_captured, found["report"]
    assert told[0] == told[1]
    failures, split_steps, parts = told[0]
    assert failures >= 1
    assert split_steps == splitting_jobs.STEPS  # the smaller ones are whole
    assert parts >= 2
