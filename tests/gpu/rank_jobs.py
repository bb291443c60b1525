"""A job of ranks, under torchrun: fit, saved and gone on with, and data that ends unevenly.

On a GPU also with live graphs: saved between replays, gone on with by another trainer, whose first
steps are eager.

Usage: torchrun ... rank_jobs.py FOLDER DEVICE STRATEGY
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from torchfast import CheckpointManager, Plan, Trainer, start_ranks

STEPS = 6
# A capture comes behind the steps that DistributedDataParallel wants before it.
GRAPH_STEPS, GRAPH_CUT = 40, 24


class Uneven(IterableDataset):
    """More on rank 1 than on rank 0; divided already."""

    is_sharded = True

    def __init__(self, rank):
        self._number = 5 + 3 * rank

    def __iter__(self):
        for number in range(self._number):
            yield torch.full((16,), float(number)), torch.zeros(8)


def loss_fn(model, batch):
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


def trainer_of(strategy, device, seed, *, graph=False):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 33), nn.Dropout(0.2), nn.ReLU(), nn.Linear(33, 8))
    optimizer = partial(torch.optim.AdamW, lr=1e-2)
    plan = Plan(shard=strategy, cuda_graph=graph)
    return Trainer(model.to(device), optimizer, loss_fn, plan=plan)


def data():
    generator = torch.Generator().manual_seed(0)
    samples = TensorDataset(
        torch.randn(64, 16, generator=generator), torch.randn(64, 8, generator=generator)
    )
    return DataLoader(samples, 4, shuffle=True, generator=torch.Generator().manual_seed(1))


def fit(folder, steps, strategy, device, seed, *, graph=False):
    trainer = trainer_of(strategy, device, seed, graph=graph)
    every = GRAPH_CUT // 2 if graph else 2
    trainer.fit(data(), steps=steps, checkpoint=folder, checkpoint_every=every, progress=False)
    return trainer


def with_live_graphs(folder, strategy, device):
    """Cut a captured run between replays, and go on with it; both ends are the same bits."""
    torch.use_deterministic_algorithms(True)
    ends = {}
    for name, cuts in (("one", [GRAPH_STEPS]), ("two", [GRAPH_CUT, GRAPH_STEPS])):
        for number, steps in enumerate(cuts):
            seed = 9 * number  # of the second trainer none of it is to be seen
            trainer = fit(folder / name, steps, strategy, device, seed, graph=True)
            found = trainer.report()
            if torch.device(device).type == "cuda":
                assert found.counters["graphs"] == 1, found
                assert found.counters["replays"] > 0, found
            assert trainer.num_steps == steps
            ends[name] = full(trainer.state_dict())
            trainer.close()
    torch.use_deterministic_algorithms(False)
    check_same(ends["two"], ends["one"])


def full(value):
    if isinstance(value, dict):
        return {key: full(each) for key, each in value.items() if key not in ("rng", "plan")}
    whole = getattr(value, "full_tensor", None)
    return (whole() if whole else value).cpu().clone() if torch.is_tensor(value) else value


def check_same(found, expected, place="state"):
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), place
        for key, value in expected.items():
            check_same(found[key], value, f"{place}[{key!r}]")
    elif torch.is_tensor(expected):
        assert torch.equal(found, expected), place
    elif isinstance(expected, list | tuple):
        for index, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            check_same(ours, theirs, f"{place}[{index}]")
    else:
        assert found == expected, place


def main(folder, device, strategy):
    ranks = start_ranks()
    device = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else device
    whole = full(fit(folder / "whole", STEPS, strategy, device, 0).state_dict())
    fit(folder / "parts", 3, strategy, device, 0)
    parts = fit(folder / "parts", STEPS, strategy, device, 9)
    check_same(full(parts.state_dict()), whole)

    # Asynchronous, of live tensors on the device that are changed behind it.
    state = parts.state_dict()
    with CheckpointManager(folder / "own") as checkpoints:
        checkpoints.save(state, 1)
        with torch.no_grad():
            for parameter in parts.model.parameters():
                parameter.add_(1.0)
        found = checkpoints.load(like=state)
        for name, value in found.state["model"].items():
            assert value.device.type == "cpu" or not hasattr(value, "full_tensor")
            parts.model.state_dict()[name].copy_(value)
    check_same(full(parts.state_dict())["model"], whole["model"])

    with_live_graphs(folder / "graphs", strategy, device)

    losses = [
        parts.step(batch)
        for batch in parts.prefetch(DataLoader(Uneven(ranks.rank), 1), background=True)
    ]
    assert len(losses) == 5, len(losses)
    if ranks.are_many:
        dist.barrier()


if __name__ == "__main__":
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    main(Path(sys.argv[1]), *sys.argv[2:])
