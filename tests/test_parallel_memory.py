"""Whose the memory of shards is, when it runs out and when branches read it."""

import time

import pytest
import torch

import ranks
from parallel_training import OPTIMIZERS, batches, fresh, mean_loss
from torchfast import OutOfMemoryError, Plan, Trainer
from torchfast.graphs import parallel_branches
from torchfast.memory.owners import known_owners, living_owners

CPU = torch.device("cpu")


def owners(rank):
    trainer = Trainer(fresh(), OPTIMIZERS["adamw"], mean_loss, Plan(shard="fsdp"))
    trainer.step(batches(rank)[0])
    weight = trainer.model.head.weight
    known = known_owners(trainer.model, trainer.optimizer, None, {}, CPU)
    found = {owner.name: (owner.category, owner.num_bytes) for owner in known}
    parts = list(parallel_branches._dense_parts(weight.detach()))
    address = weight.to_local().untyped_storage().data_ptr()
    living = [owner for owner in living_owners(CPU) if owner.address == address]
    return (
        found,
        weight.to_local().untyped_storage().nbytes(),
        len(living),
        [
            (type(part) is torch.Tensor, part.data_ptr() == weight.to_local().data_ptr())
            for part in parts
        ],
    )


def test_shards_have_owners():
    for found, num_bytes, num_living, parts in ranks.run(owners):
        assert found["head.weight"] == ("parameters", num_bytes)
        assert found["head.weight: exp_avg"][0] == "optimizer state"
        assert num_living == 1
        assert parts == [(True, True)]


def running_out(rank):
    calls = []

    def loss_fn(model, batch):
        calls.append(batch)
        loss = mean_loss(model, batch)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return loss

    trainer = Trainer(fresh(), OPTIMIZERS["adamw"], loss_fn, Plan(shard="fsdp"))
    first, second, *_ = batches(rank)
    trainer.step(first)
    try:
        trainer.step(second)
    except OutOfMemoryError as error:
        return str(error)
    return None


def test_a_step_of_shards_that_runs_out_of_memory_has_its_account():
    for told in ranks.run(running_out):
        assert "optimizer state" in told
        assert "head.weight" in told


def one_running_out(rank, shard):
    calls = []

    def loss_fn(model, batch):
        calls.append(batch)
        loss = mean_loss(model, batch)
        if rank == 1 and len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return loss

    trainer = Trainer(fresh(), OPTIMIZERS["adamw"], loss_fn, Plan(shard=shard))
    first, second, *_ = batches(rank)
    trainer.step(first)
    began = time.monotonic()
    try:
        trainer.step(second)
    except Exception as error:
        account = getattr(error, "account", None)
        return {
            "error": type(error).__name__,
            "stage": None if account is None else account.stage,
            "text": str(error),
            "num_calls": len(calls),
            "num_steps": trainer.num_steps,
            "took_s": time.monotonic() - began,
        }
    return None


@pytest.mark.parametrize("shard", ["ddp", "fsdp"])
def test_where_one_rank_runs_out_all_end_with_its_account_and_none_tries_again(shard):
    other, out = ranks.run(one_running_out, 2, shard)
    assert (out["error"], out["stage"]) == ("OutOfMemoryError", "forward")
    assert other["error"] == "RankError"
    for told in (other, out):
        assert "out of memory in the forward" in told["text"]
        assert "optimizer state" in told["text"]
        assert told["num_calls"] == 2
        assert told["num_steps"] == 1
        assert told["took_s"] < ranks.GROUP_TIMEOUT_S / 2  # nobody waits until the group gives up
