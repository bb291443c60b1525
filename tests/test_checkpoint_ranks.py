"""CheckpointManager on several ranks: one checkpoint of all, loaded by any number of them."""

from __future__ import annotations

import json
import logging
import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import ranks
from checkpointing import assert_same
from torchfast import (
    CheckpointCorruptError,
    CheckpointManager,
    CheckpointWriteError,
    RankError,
    StateMismatchError,
    import_state_dict,
)
from torchfast.__main__ import main
from torchfast.checkpoint.loading import verify_folder
from torchfast.checkpoint.staging import Staged, Stager
from torchfast.checkpoint.storage import ShardWriter

# One has a dimension that no number of ranks divides, one is smaller than their number.
SHAPES = {"even": (8, 4), "odd": (7, 3), "small": (1, 5), "flat": (6,)}


def whole(name, number=0.0):
    generator = torch.Generator().manual_seed(len(name))
    return torch.randn(SHAPES[name], generator=generator) + number


def made(mesh, number=0.0, dim=0):
    """Return a state with all kinds of parts."""
    tensors = {
        name: distribute_tensor(whole(name, number), mesh, [Shard(min(dim, len(shape) - 1))])
        for name, shape in SHAPES.items()
    }
    rank = dist.get_rank()
    return {
        "model": {**tensors, "tied": tensors["even"].detach(), "buffer": torch.full((3,), number)},
        "optimizer": {"state": {0: {"step": torch.tensor(2.0), "exp_avg": tensors["odd"] * 2}}},
        "half": distribute_tensor(whole("even").bfloat16(), mesh, [Replicate()]),
        "rng": {"torch": torch.full((4,), rank), "python": (3, (rank, 5))},
        "loader": {"num_batches": 7, "rank": rank},
        "step": 3,
    }


def full(value):
    if isinstance(value, dict):
        return {key: full(each) for key, each in value.items()}
    if isinstance(value, DTensor):
        return value.full_tensor()
    return value.clone() if isinstance(value, torch.Tensor) else value


def check_whole(state, rank, number=0.0):
    """All values, when a rank has loaded them whole."""
    for name in SHAPES:
        assert torch.equal(state["model"][name], whole(name, number)), name
    assert state["model"]["tied"].data_ptr() == state["model"]["even"].data_ptr()
    assert state["model"]["buffer"].tolist() == [number] * 3
    assert torch.equal(state["optimizer"]["state"][0]["exp_avg"], whole("odd", number) * 2)
    assert torch.equal(state["half"], whole("even").bfloat16())
    assert state["rng"]["torch"].tolist() == [rank] * 4
    assert state["rng"]["python"] == (3, (rank, 5))
    assert state["loader"] == {"num_batches": 7, "rank": rank}
    assert state["step"] == 3


def check_sharded(folder, dim):
    """Load with another cut, each rank its part, and compare with the whole."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    like = made(mesh, 9.0, dim)
    # A parameter in the place of its moments.
    like["optimizer"] = {"state": {0: like["model"]["odd"]}}
    with CheckpointManager(folder) as checkpoints:
        found = checkpoints.load(like=like)
    for name in SHAPES:
        loaded = found.state["model"][name]
        assert loaded.placements == like["model"][name].placements
        assert loaded.to_local().shape == like["model"][name].to_local().shape
        assert torch.equal(loaded.full_tensor(), whole(name)), name
    moments = found.state["optimizer"]["state"][0]
    assert torch.equal(moments["exp_avg"].full_tensor(), whole("odd") * 2)
    assert type(moments["step"]) is torch.Tensor
    assert found.state["half"].dtype == torch.bfloat16
    assert torch.equal(found.state["half"].full_tensor(), whole("even").bfloat16())
    return found


def save_and_wait(checkpoints, state, step, **options):
    checkpoints.save(state, step, **options)
    checkpoints.wait()


def save_on_two(rank, folder):
    mesh = init_device_mesh("cpu", (2,))
    state = made(mesh)
    with CheckpointManager(folder / "run", keep_last=2) as checkpoints:
        before = full(state)
        checkpoints.save(state, 1, metrics={"loss": 0.5})
        for value in state["model"].values():  # the copies are made already
            (value.to_local() if isinstance(value, DTensor) else value).fill_(-1)
        checkpoints.wait()
        found = checkpoints.load(1)
        assert (found.world_size, found.metrics) == (2, {"loss": 0.5})
        check_whole(found.state, rank)
        assert_same(found.state["model"], before["model"])
        check_sharded(folder / "run", 1)
        for step in (2, 3):
            checkpoints.save(made(mesh), step, blocking=step == 3)
        assert checkpoints.steps() == [2, 3]
        assert (folder / "run" / "latest").read_text() == "step-3\n"

        # What one of them may not keep, none keeps.
        checkpoints.save(made(mesh), 4, only_if=torch.tensor(rank == 0), blocking=True)
        checkpoints.save(made(mesh), 4, only_if=torch.tensor(rank == 1))
        checkpoints.wait()
        assert checkpoints.steps() == [2, 3]
        dist.barrier()


def fail_on_two(rank, folder):
    """What fails on one rank fails on both, and leaves what was there."""
    mesh = init_device_mesh("cpu", (2,))
    write = os.write
    with CheckpointManager(folder / "run") as checkpoints:
        for blocking in (True, False):

            def full_disk(descriptor, data):
                raise OSError(28, "No space left on device")

            os.write = full_disk if rank == 1 else write
            with pytest.raises(CheckpointWriteError) as caught:
                save_and_wait(checkpoints, made(mesh), 4, blocking=blocking)
            os.write = write
            assert ("rank 1: " in str(caught.value)) == (rank == 0)
            assert "No space left on device" in str(caught.value)
            assert "bytes" in str(caught.value)
        # The last files, which only rank 0 writes.
        finish = ShardWriter.finish
        for blocking in (True, False):

            def full_at_the_end(writer, metadata, results):
                raise OSError(28, "No space left on device")

            ShardWriter.finish = full_at_the_end if rank == 0 else finish
            with pytest.raises(CheckpointWriteError, match=r"No space left on device.*bytes"):
                save_and_wait(checkpoints, made(mesh), 4, blocking=blocking)
            ShardWriter.finish = finish
        # One whose thread cannot get hold of the copies.
        stage = Stager.stage

        def no_memory():
            raise RuntimeError("no memory for 7 bytes")

        Stager.stage = (lambda *_: Staged(no_memory)) if rank == 0 else stage
        with pytest.raises(
            RuntimeError if rank == 0 else CheckpointWriteError, match="no memory for 7 bytes"
        ):
            save_and_wait(checkpoints, made(mesh), 4)
        Stager.stage = stage
        # A state that one rank cannot store; the others are told, not left waiting.
        bad = {"model": object() if rank == 0 else 1}
        with pytest.raises(TypeError if rank == 0 else CheckpointWriteError, match="is a object"):
            save_and_wait(checkpoints, bad, 4)
        with pytest.raises(CheckpointWriteError, match=r"different steps, by rank \[4, 5\]"):
            checkpoints.save({"model": 1}, 4 + rank, blocking=True)
        parts = {"model": DTensor.from_local(torch.ones(2), mesh, [Partial()])}
        with pytest.raises(TypeError, match="still to be added up"):
            checkpoints.save(parts, 4)
        with pytest.raises(ValueError, match="step=9 is not in"):
            checkpoints.load(9)
        with pytest.raises(StateMismatchError, match=r"'model/odd' of \(7, 3\), expected \(8, 4\)"):
            checkpoints.load(like={"model": {"odd": made(mesh)["model"]["even"]}})
        dist.barrier()
        assert checkpoints.steps() == [2, 3]
        assert not leftovers(folder / "run")
        # And it still works.
        checkpoints.save(made(mesh), 4)
    with CheckpointManager(folder / f"{rank}", across_ranks=False) as alone:
        with pytest.raises(TypeError, match="a DTensor over 2 ranks"):
            alone.save(made(mesh), 1)
        alone.save({"w": torch.ones(2)}, 1)
    with pytest.raises(TypeError, match="per_rank must be keys"):
        CheckpointManager(folder / "run", per_rank="rng")


def decide_alike(rank, folder, caplog):
    """A file that is damaged for both, and one that only rank 1 reads."""
    run = folder / "run"
    if rank == 0:
        flip(run / "step-4" / "rank-00001-0000.bin")
        flip(run / "step-3" / "rank-00001.json")
    dist.barrier()
    with CheckpointManager(run) as checkpoints:
        with pytest.raises(
            CheckpointCorruptError if rank == 1 else RankError, match=r"00001\.json"
        ):
            checkpoints.load(3)
        found = checkpoints.load()
        assert found.step == 2
        check_whole(found.state, rank)
        dist.barrier()
        assert checkpoints.steps() == [2]
        assert len([name for name in os.listdir(run) if ".bad-" in name]) == 2
    assert caplog.text.count("going on from step 2") == (rank == 0)


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_ranks_save_and_others_load(tmp_path, caplog, capsys):
    caplog.set_level(logging.WARNING)

    def on_two(rank):
        save_on_two(rank, tmp_path)
        fail_on_two(rank, tmp_path)

    ranks.run(on_two)
    run = tmp_path / "run"
    # One process: everything whole, and its own parts are those of rank 0.
    with CheckpointManager(run) as checkpoints:
        assert checkpoints.steps() == [2, 3, 4]
        check_whole(checkpoints.load().state, 0)
        checkpoints.export(tmp_path / "model.pt")
        assert torch.equal(import_state_dict(tmp_path / "model.pt")["odd"], whole("odd"))
    # Each byte once, and each rank has written some of it.
    folder = run / "step-4"
    manifest = verify_folder(folder)
    metadata = json.loads((folder / "metadata.json").read_text())["tensors"]
    assert not [key for key in metadata if "tied" in key]
    for name, shape in SHAPES.items():
        sizes = [chunk["sizes"] for chunk in metadata[f"model/{name}"]["chunks"]]
        assert sum(size[0] for size in sizes) == shape[0]
    assert len(metadata["half"]["chunks"]) == len(metadata["model/buffer"]["chunks"]) == 1
    assert {"rank-00000-0000.bin", "rank-00001-0000.bin", "rank-00001.json"} < set(manifest.files)
    own = json.loads((folder / "rank-00001.json").read_text())
    assert set(own) == {"rng", "loader"}
    for command in ("list", "verify", "show"):
        assert main(["checkpoint", command, os.fspath(run)]) == 0
    assert "ranks: 2" in capsys.readouterr().out

    def on_three(rank):
        found = check_sharded(run, 0)
        # The third rank has none of its own, and is told so.
        assert found.state["loader"]["rank"] == rank % found.world_size

    ranks.run(on_three, 3)
    ranks.run(decide_alike, 2, tmp_path, caplog)


def test_one_process_saves_and_two_load(tmp_path):
    state = {
        "model": {name: whole(name) for name in SHAPES} | {"tied": whole("even")},
        "optimizer": {"state": {0: {"step": torch.tensor(2.0), "exp_avg": whole("odd") * 2}}},
        "half": whole("even").bfloat16(),
        "loader": {"rank": 0},
    }
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(state, 1)

    def on_two(rank):
        assert check_sharded(tmp_path, 1).world_size == 1

    ranks.run(on_two)


def leftovers(folder):
    return [name for name in os.listdir(folder) if "tmp" in name]


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_leaves_the_one_before(killed, tmp_path):
    def work(rank):
        mesh = init_device_mesh("cpu", (2,))
        checkpoints = CheckpointManager(tmp_path)
        states = made(mesh), made(mesh, 1.0)
        checkpoints.save(states[0], 1, blocking=True)
        if rank == killed:
            original = os.fsync

            def kill(descriptor):
                original(descriptor)
                os.kill(os.getpid(), signal.SIGKILL)

            os.fsync = kill
        with pytest.raises(CheckpointWriteError, match="cannot be reached"):
            save_and_wait(checkpoints, states[1], 2)
        with pytest.raises(CheckpointWriteError, match="cannot be reached"):
            checkpoints.save(states[1], 3, blocking=True)
        assert checkpoints.steps() == [1]
        # Rank 0 had made the temporary folder; if it is gone, the next start finds that it is.
        assert killed == 0 or not leftovers(tmp_path)

    ranks.run(work, 2, ends={killed: -signal.SIGKILL})
    with CheckpointManager(tmp_path) as checkpoints:
        found = checkpoints.load()
        assert found.step == 1
        assert not leftovers(tmp_path)
        check_whole(found.state, 0)


def net(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    model[2].weight = nn.Parameter(model[2].weight.detach())
    return model


def train(model, optimizer, num_steps):
    generator = torch.Generator().manual_seed(1)
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(torch.randn(4, 5, generator=generator)).square().mean().backward()
        optimizer.step()


def test_a_sharded_model_goes_on_with_another_number_of_ranks(tmp_path):
    """Save under FSDP on four ranks, go on with two and in one process: bitwise the same state."""

    def on_four(rank):
        model = net(0)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        for each in (model[0], model[2], model):
            fully_shard(each, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        train(model, optimizer, 2)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        with CheckpointManager(tmp_path) as checkpoints:
            checkpoints.save(state, 2)
        return full(model.state_dict()), full(optimizer.state_dict()["state"])

    def on_two(rank):
        model = net(3)
        for each in (model[0], model[2], model):
            fully_shard(each, mesh=init_device_mesh("cpu", (2,)))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        like = {
            "model": model.state_dict(),
            "optimizer": {"state": dict(enumerate(model.parameters()))},
        }
        with CheckpointManager(tmp_path) as checkpoints:
            found = checkpoints.load(like=like)
        model.load_state_dict(found.state["model"])
        optimizer.load_state_dict(found.state["optimizer"])
        loaded = full(model.state_dict()), full(optimizer.state_dict()["state"])
        train(model, optimizer, 1)  # and it trains on
        return loaded

    saved = ranks.run(on_four, 4)
    for loaded in ranks.run(on_two):
        assert_same(loaded, saved[0])
    with CheckpointManager(tmp_path) as checkpoints:
        found = checkpoints.load()
    model = net(3)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    model.load_state_dict(found.state["model"])
    optimizer.load_state_dict(found.state["optimizer"])
    assert_same((dict(model.state_dict()), optimizer.state_dict()["state"]), saved[0])


def test_a_folder_that_not_all_ranks_see(tmp_path):
    def work(rank):
        folder = Path(tmp_path / f"of rank {rank}")
        with CheckpointManager(folder) as checkpoints:
            with pytest.raises(CheckpointWriteError, match=r"storage that they share|rank 1: "):
                checkpoints.save({"w": torch.ones(2)}, 1, blocking=True)
            assert checkpoints.steps() == []
        if rank == 0:  # a folder that was copied to one machine only
            with CheckpointManager(folder, across_ranks=False) as alone:
                alone.save({"w": torch.ones(2)}, 5)
        with (
            CheckpointManager(folder) as checkpoints,
            pytest.raises(RankError, match=r"step-5 is not to be seen on the ranks \[1\]"),
        ):
            checkpoints.load()

    ranks.run(work)


def test_a_manager_that_was_made_before_the_ranks_met(tmp_path):
    """Each would save for itself, all of them into one folder."""

    def work(rank):
        early = CheckpointManager(tmp_path / "run")
        own = CheckpointManager(tmp_path / f"{rank}", across_ranks=False)
        early.save({"rank": rank}, rank, blocking=True)
        ranks.join(rank, 2, tmp_path / "store")
        for refused in (lambda: early.save({"rank": rank}, 2), early.load):
            with pytest.raises(RankError, match="was made before the process group"):
                refused()
        own.save({"rank": rank}, 2, blocking=True)
        assert own.load().state == {"rank": rank}
        dist.barrier()

    ranks.run(work, joined=False)
