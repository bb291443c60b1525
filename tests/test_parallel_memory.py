"""Whose the memory of shards is, when it runs out and when branches read it."""

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
