"""Two ranks save one checkpoint through dcp.save, and load it and another through dcp.load.

Usage: ranks.py FOLDER_TO_WRITE FOLDER_TO_READ
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from torchfast.checkpoint.manifest import Manifest, read_manifest
from torchfast.checkpoint.storage import (
    PlainLoadPlanner,
    PlainSavePlanner,
    ShardReader,
    ShardWriter,
)

RANKS = 2


def weight():
    return torch.arange(70.0).view(10, 7)


def describe(files, world_size):
    return Manifest(
        schema=1, step=1, world_size=world_size, owner="", saved_at="", torch="", metrics={},
        files=files,
    )  # fmt: skip


def rank(number, store, written, read):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    state = {
        "rows": distribute_tensor(weight(), mesh, [Shard(0)]),
        "columns": distribute_tensor(weight(), mesh, [Shard(1)]),
        "same": distribute_tensor(weight(), mesh, [Replicate()]),
        f"rank-{number:05d}.json": f'{{"rank": {number}}}'.encode(),
    }
    writer = ShardWriter(Path(written), describe)
    dcp.save(state, storage_writer=writer, planner=PlainSavePlanner())
    for folder in (written, read):
        # Cut the other way round.
        found = {
            "rows": distribute_tensor(torch.zeros(10, 7), mesh, [Shard(1)]),
            "columns": distribute_tensor(torch.zeros(10, 7), mesh, [Shard(0)]),
            "same": torch.zeros(10, 7),
        }
        reader = ShardReader(Path(folder), read_manifest(Path(folder)))
        dcp.load(found, storage_reader=reader, planner=PlainLoadPlanner())
        for name in ("rows", "columns"):
            assert torch.equal(found[name].full_tensor(), weight()), name
        assert torch.equal(found["same"], weight())
    dist.destroy_process_group()


if __name__ == "__main__":
    os.makedirs(sys.argv[1])
    context = multiprocessing.get_context("fork")
    arguments = [(n, f"{sys.argv[1]}.store", *sys.argv[1:]) for n in range(RANKS)]
    processes = [context.Process(target=rank, args=each) for each in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(max(abs(process.exitcode) for process in processes))
