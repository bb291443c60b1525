"""Trainings of two GPUs, in processes of their own: captured, and as they are."""

from __future__ import annotations

import os
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

from parallel_training import batches, fresh, full_state, mean_loss
from torchfast import (
    CompileOptions,
    CUDAGraphOptions,
    Float8Options,
    OffloadOptions,
    Plan,
    ShardOptions,
    Trainer,
)

STEPS = 40


def run(rank, jobs, num_ranks, store, folder, known=None):
    """Do some jobs by name on one rank, of those here or others, and leave what came of them."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": str(rank)}
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.cuda.set_device(rank)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl",
        init_method=f"file://{store}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=120),
    )
    results = {}
    for name in jobs:
        try:
            results[name] = (known or JOBS)[name](rank)
        except Exception:
            results[name] = traceback.format_exc()
            break  # the other ranks may be anywhere by now
    torch.save(results, f"{folder}/rank-{rank}.pt")
    dist.destroy_process_group()


def trained(rank, plan, loss_fn=mean_loss, width=8, *, steps=STEPS, odd=(), hooked=(), **options):
    """Train for some steps and return what is left of it, on the host.

    Before some steps the last rank gets a batch of another shape, or a hook, which makes its graph
    invalid and changes no number.
    """
    model = fresh(width).to("cuda")
    trainer = Trainer(
        model,
        lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(0.01), fused=True, capturable=True),
        loss_fn,
        plan,
        device="cuda",
        **options,
    )
    own = batches(rank, accumulate=options.get("accumulate", 1))
    shorter = batches(rank, accumulate=options.get("accumulate", 1), lengths=(5, 4))
    losses, ways = [], []
    for number in range(steps):
        if rank == 1 and number in hooked:
            model.head.register_forward_pre_hook(lambda *_: None)
        given = shorter if rank == 1 and number in odd else own
        losses.append(trainer.step(given[number % len(given)]))
        if (graph := trainer._step._graph) is not None:
            counters = graph.counters()
            ways.append((counters["replays"], counters["captures"]))
    result = {
        "ways": ways,
        "state": {name: value.cpu() for name, value in full_state(model).items()},
        "losses": torch.stack(losses).cpu(),
        "skipped": trainer.num_skipped,
        "counters": dict(trainer.report().counters),
        "report": str(trainer.report()),
    }
    trainer.close()
    return result


def both_ways(shard, **fields):
    """Return a job that trains eagerly and captured."""
    names = ("ema", "max_grad_norm", "width", "accumulate", "steps", "odd", "hooked")
    options = {name: fields.pop(name) for name in names if name in fields}

    def job(rank):
        strict = CUDAGraphOptions(on_failure="raise")
        return {
            graph: trained(
                rank, Plan(shard=shard, cuda_graph=strict if graph else False, **fields), **options
            )
            for graph in (False, True)
        }

    return job


def refusing(rank):
    """A loss that waits for the device on the last rank only, where no capture is possible."""

    def loss_fn(model, batch):
        loss = mean_loss(model, batch)
        if rank == 1:
            loss.item()
        return loss

    return trained(rank, Plan(shard="ddp", cuda_graph=True), loss_fn)


def evaluated(rank):
    """An evaluation of five batches, of which one rank has a stand-in for the last."""
    held_out = [batch for which in range(2) for batch in batches(which)][:5]
    found = {}
    for shard in ("ddp", "fsdp"):
        trainer = Trainer(
            fresh().to("cuda"),
            lambda ps: torch.optim.AdamW(ps, lr=0.01),
            mean_loss,
            Plan(shard=shard),
            device="cuda",
        )
        found[shard] = trainer.evaluate(held_out)
        trainer.close()
    model = fresh().to("cuda")
    with torch.no_grad():
        losses = [float(mean_loss(model, [each.cuda() for each in batch])) for batch in held_out]
    found["alone"] = {"loss": sum(losses) / len(losses)}
    return found


# Compared with bf16 before the capture and between replays.
FLOAT8 = Float8Options(recipe="tensorwise", smallest=16, all_gather=True, watch_at=(1, 30))

BY_BLOCKS = CompileOptions(regions="blocks")
# A gradient that is averaged behind the backward, within the graph.
WHOLE_HEAD = ShardOptions(strategy="fsdp", ignored=("head",))
KEPT_WHOLE = ShardOptions(strategy="fsdp", reshard_after_forward=False)
OFFLOAD = OffloadOptions(min_bytes=64, window_bytes=0)  # the model is small

JOBS = {
    **{shard: both_ways(shard, max_grad_norm=0.5) for shard in ("ddp", "fsdp", "hsdp")},
    "ddp skip": both_ways("ddp", nonfinite="skip"),
    "fsdp skip": both_ways("fsdp", nonfinite="skip"),
    "fsdp bf16": both_ways("fsdp", precision="bf16"),
    "ddp average": both_ways("ddp", ema=0.9),
    "evaluation": evaluated,
    "one rank waits": refusing,
    **{
        f"{shard} {name}": both_ways(shard, max_grad_norm=0.5, **fields)
        for shard in ("ddp", "fsdp")
        for name, fields in (
            ("accumulate", {"accumulate": 3}),
            ("recompute", {"recompute": "blocks"}),
            ("compile", {"compile": BY_BLOCKS}),
            (
                "compile recompute accumulate",
                {"compile": BY_BLOCKS, "recompute": "blocks", "accumulate": 2},
            ),
        )
    },
    **{
        f"{shard} {name}": both_ways(shard, **fields)
        for shard in ("ddp", "fsdp")
        for name, fields in (
            ("odd shapes", {"odd": (14, 15, 20, 39)}),
            ("lost graph", {"steps": 60, "hooked": (26,)}),
        )
    },
    "fsdp some whole": both_ways(WHOLE_HEAD, max_grad_norm=0.5),
    "fsdp kept whole": both_ways(KEPT_WHOLE),
    **{
        f"{shard} {name}": both_ways(shard, max_grad_norm=0.5, offload=OFFLOAD, **fields)
        for shard in ("ddp", "fsdp")
        for name, fields in (("offload", {}), ("offload recompute", {"recompute": "blocks"}))
    },
    "fsdp float8": both_ways("fsdp", precision=FLOAT8, width=16),  # needs units for it: the last
}
