"""A state whose tensors are whole goes into a trainer of which each rank holds a part."""

from functools import partial

import pytest
import torch

import ranks
from parallel_training import batches, fresh, full_state, mean_loss
from torchfast import CheckpointManager, Plan, ShardOptions, Trainer

KINDS = {
    "ddp": "ddp",
    "fsdp": "fsdp",
    "hsdp": ShardOptions(strategy="hsdp", num_replicas=2),
}


def trainer_of(kind, dtype):
    return Trainer(
        fresh().to(dtype),
        partial(torch.optim.AdamW, lr=0.01),
        mean_loss,
        Plan(shard=KINDS[kind]),
        max_grad_norm=1.0,
        ema=0.9,  # of 16-bit weights unrounded, beside them
        lr_scheduler=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
    )


def weights(trainer, own):
    for batch in own:
        trainer.step(batch)
    found = [full_state(trainer.model), full_state(trainer.ema_model)]
    trainer.close()
    return found


def gone_on_with(rank, folder, dtype, saved):
    """Save under one strategy, go on under each, and compare with a run that was not cut."""
    found, own = {}, batches(rank)
    with CheckpointManager(folder) as checkpoints:
        trainer = trainer_of(saved, dtype)
        for batch in own:
            trainer.step(batch)
        checkpoints.save(trainer.state_dict(), 4)
        expected = weights(trainer, own)
        for loaded in KINDS:
            for is_placed in (False, True):
                trainer = trainer_of(loaded, dtype)
                like = trainer.state_dict() if is_placed else None  # without moments yet
                trainer.load_state_dict(checkpoints.load(like=like).state)
                found[loaded, is_placed] = all(
                    torch.equal(value, state[name])
                    for state, wanted in zip(weights(trainer, own), expected, strict=True)
                    for name, value in wanted.items()
                )
    return found


@pytest.mark.parametrize("saved", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_goes_from_each_strategy_to_each(dtype, saved, tmp_path):
    for of_rank in ranks.run(gone_on_with, 2, str(tmp_path), dtype, saved):
        assert len(of_rank) == 2 * len(KINDS)
        for (loaded, is_placed), same in of_rank.items():
            # Shards reduce 16-bit gradients in fp32, and replicas do not, so such runs differ.
            is_of_both = (saved == "ddp") != (loaded == "ddp")
            assert same or (dtype is torch.bfloat16 and is_of_both), (loaded, is_placed)
