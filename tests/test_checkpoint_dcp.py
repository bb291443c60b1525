"""The storage plugs into torch.distributed.checkpoint itself, and many ranks add no new format."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp

from faults import faulty
from faults.ranks import describe, weight
from torchfast import CheckpointCorruptError, CheckpointManager
from torchfast.checkpoint.files import read_file
from torchfast.checkpoint.loading import verify_folder
from torchfast.checkpoint.manifest import read_manifest
from torchfast.checkpoint.storage import (
    PlainLoadPlanner,
    PlainSavePlanner,
    ShardReader,
    ShardWriter,
    read,
    write,
)

# dcp.save() and dcp.load() say so of every single process; it is why one process does without.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
TEXT = "rank-00000.json"


def flat():
    return {"w": weight(), "half": weight().bfloat16(), "zero": torch.empty(0, 3), TEXT: b"{}"}


def test_dcp_saves_and_loads_through_it(tmp_path):
    dcp.save(flat(), storage_writer=ShardWriter(tmp_path, describe), planner=PlainSavePlanner())
    found = {"w": torch.zeros(10, 7), "half": torch.zeros(10, 7).bfloat16(), TEXT: b"?"}
    reader = ShardReader(tmp_path, verify_folder(tmp_path))
    dcp.load(found, storage_reader=reader, planner=PlainLoadPlanner())
    assert torch.equal(found["w"], weight())
    assert torch.equal(found["half"], weight().bfloat16())
    assert found[TEXT] == b"{}"


def test_one_process_writes_what_dcp_would(tmp_path):
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
    write(flat(), tmp_path / "ours", describe)
    writer = ShardWriter(tmp_path / "theirs", describe)
    dcp.save(flat(), storage_writer=writer, planner=PlainSavePlanner())
    ours, theirs = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        for name in ("ours", "theirs")
    )
    assert ours == theirs


def test_two_ranks_and_one_read_what_the_other_wrote(tmp_path):
    state = {"rows": weight(), "columns": weight(), "same": weight()}
    with CheckpointManager(tmp_path / "one") as checkpoints:
        checkpoints.save(state, 1)
    faulty.run("ranks.py", tmp_path / "two", tmp_path / "one" / "step-1")
    manifest = verify_folder(tmp_path / "two")
    assert manifest.world_size == 2
    found = read(ShardReader(tmp_path / "two", manifest), dict.fromkeys(state))
    for name in state:
        assert torch.equal(found[name], weight()), name
    for rank in range(2):
        text = read_file(tmp_path / "two" / f"rank-{rank:05d}.json", 100)
        assert json.loads(text) == {"rank": rank}


def test_no_file_of_a_checkpoint_is_a_pickle(tmp_path):
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save({"w": weight(), "n": [1, (2, 3)]}, 1)
    for path in (tmp_path / "step-1").iterdir():
        data = path.read_bytes()
        assert not data.startswith((b"\x80", b"PK"))
        if path.suffix == ".json":
            json.loads(data)
    raw = (tmp_path / "step-1" / "rank-00000-0000.bin").read_bytes()
    assert raw == weight().numpy().tobytes()


def test_a_key_that_is_not_there(tmp_path):
    write(flat(), tmp_path, describe)
    with pytest.raises(CheckpointCorruptError, match="has no tensor 'v'"):
        read(ShardReader(tmp_path, read_manifest(tmp_path)), {"v": None})
