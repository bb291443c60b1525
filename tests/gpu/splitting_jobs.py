"""Trainings of two GPUs of which one has too little memory for a step, and does it in parts.

Beside it the same training where all fits.
"""

from __future__ import annotations

import gc
import os

import torch
import torch.distributed as dist

from gpu.own_process import begin_rank
from parallel_training import Net, full_state, mean_loss
from torchfast import CUDAGraphOptions, Plan, Trainer

GROUP_TIMEOUT_S = 120
TOO_SMALL = 1  # this rank
SEQUENCES, LENGTH, WIDTH = 32, 512, 1024
STEPS, LAST_STEPS = 24, 4  # the last ones with half as many sequences
OF_THE_PEAK = 0.7  # parts of half the size fit into it


def batch_of(rank, number):
    size = SEQUENCES if number < STEPS else SEQUENCES // 2
    generator = torch.Generator().manual_seed(10 * (number % 4) + rank)
    return tuple(torch.randint(0, 7, (2, size, LENGTH), generator=generator).to("cuda"))


def asking_in_backward(model, batch):
    """Ask in the backward of a whole batch for more than any GPU has."""
    tokens, targets = batch
    logits = model(tokens)
    if len(tokens) == SEQUENCES and logits.requires_grad:
        logits.register_hook(lambda gradient: torch.empty(2**46, device="cuda") and gradient)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def trained(rank, plan, loss_fn=mean_loss, after_first=lambda: None):
    torch.manual_seed(0)
    trainer = Trainer(
        Net(WIDTH).to("cuda"),
        lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9),
        loss_fn,
        plan,
        device="cuda",
    )
    losses = []
    for number in range(STEPS + LAST_STEPS):
        losses.append(trainer.step(batch_of(rank, number)))
        if number == 0:
            after_first()
    losses = torch.stack(losses).cpu()
    state = {name: value.cpu() for name, value in full_state(trainer.model).items()}
    report = trainer.report()
    trainer.close()
    found = {"losses": losses, "state": state, "counters": dict(report.counters)}
    return {**found, "report": str(report)}


def reserved():
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def run(rank, shard, where, is_captured, store, folder):
    """Train where all fits, then where rank 1 runs out, and leave what came of both."""
    begin_rank(rank, store, GROUP_TIMEOUT_S)
    expected = trained(rank, Plan(shard=shard))
    needed = torch.cuda.max_memory_allocated()
    before, total = reserved(), torch.cuda.get_device_properties(rank).total_memory

    def relieve():
        torch.cuda.set_per_process_memory_fraction(1.0, rank)

    if rank == TOO_SMALL and where == "forward":
        most = before + OF_THE_PEAK * needed
        torch.cuda.set_per_process_memory_fraction(most / total, rank)
    loss_fn = asking_in_backward if where == "backward" and rank == TOO_SMALL else mean_loss
    captured = CUDAGraphOptions(warm_up_steps=4) if is_captured else False
    plan = Plan(shard=shard, out_of_memory="split", cuda_graph=captured)
    # Beside eager steps a graph takes its own memory, which is not what is tried here.
    found = trained(rank, plan, loss_fn, relieve if is_captured else lambda: None)
    torch.save([found, expected], f"{folder}/rank-{rank}.pt")
    dist.barrier()
    os._exit(0)
