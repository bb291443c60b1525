"""Trainings of two GPUs in which one rank raises, or leaves out a block that the other waits in.

Both live on until the other has heard.
"""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist

from gpu.own_process import begin_rank
from parallel_training import batches, fresh, leaving_out, mean_loss
from torchfast import Plan, RankError, Trainer

STEPS, FAILS_AT, GROUP_TIMEOUT_S = 60, 40, 120
FAILS = 1


def run(rank, shard, is_captured, store, folder, leaves_out=None):
    """Train until the steps are over or an error comes, and leave what came of it."""
    begin_rank(rank, store, GROUP_TIMEOUT_S)
    trainer = Trainer(
        fresh(16).to("cuda"),
        lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(0.01), fused=True, capturable=True),
        mean_loss
        if leaves_out is None
        else leaving_out(leaves_out, FAILS_AT if rank == FAILS else 0)[0],
        Plan(shard=shard, cuda_graph=is_captured),
        device="cuda",
    )
    own = batches(rank)
    told, began = None, time.monotonic()
    try:
        for number in range(STEPS):
            began = time.monotonic()
            # A replay does not call the loss function: what fails is what the step is given.
            fails = leaves_out is None and rank == FAILS and number == FAILS_AT
            trainer.step(own[0][0] if fails else own[number % len(own)])
            torch.cuda.synchronize()  # waits for the other rank's kernels
    except (ValueError, TypeError, RankError) as error:
        told = type(error).__name__, str(error), time.monotonic() - began
    torch.save([told, dict(trainer.report().counters)], f"{folder}/rank-{rank}.pt")
    words = dist.distributed_c10d._get_default_store()
    words.set(str(rank), "")
    words.get(str(1 - rank))  # waits
    os._exit(0)
