"""Trainings of two GPUs, in processes of their own: captured, and as they are."""

from __future__ import annotations

import gc
import os
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from gpu.own_process import spawned
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


def done(run, jobs, folder, limit_s):
    """Do jobs on two ranks, each with a GPU; return what each rank has left of them in time.

    Every test of a file reads its job's results: what one job does to the ranks, be it that they
    never end, takes no others with it that were done before.
    """
    ended = spawned(run, (list(jobs), 2, str(folder / "store"), str(folder)), limit_s)
    files = [folder / f"rank-{rank}.pt" for rank in range(2)]
    found = [torch.load(file) if file.exists() else {} for file in files]
    return [
        {name: each.get(name, ended or "an earlier one failed") for name in jobs} for each in found
    ]


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
            how = "fine"
        except Exception as error:
            results[name] = traceback.format_exc()
            how = type(error).__name__
        torch.save(results, f"{folder}/part-{rank}.pt")
        os.replace(f"{folder}/part-{rank}.pt", f"{folder}/rank-{rank}.pt")
        gc.collect()  # of trainers whose job has failed
        if not all_are(how, name):
            os._exit(0)  # the other ranks may be anywhere by now, and groups are not destroyed then
    dist.destroy_process_group()


def all_are(how, job):
    """Whether all ranks came out of a job alike, and can do another one together."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{job}/{dist.get_rank()}", how)
    # Waits: a rank that waits for another in a step hears of its error a little later.
    told = {store.get(f"{job}/{rank}").decode() for rank in range(dist.get_world_size())}
    return told == {how} != {"RankError"}


class NormedBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.line = nn.BatchNorm1d(width), nn.Linear(width, width)

    def forward(self, x):
        return x + torch.relu(self.line(self.norm(x.transpose(1, 2)).transpose(1, 2)))


class Normed(nn.Module):
    """With statistics of what each rank is given, of which only the first rank's may count."""

    def __init__(self, width=8, classes=7):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(classes, width)
        self.blocks = nn.ModuleList(NormedBlock(width) for _ in range(2))
        self.head = nn.Linear(width, classes)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def trained(rank, plan, loss_fn=mean_loss, width=8, make=fresh, *, steps=STEPS, **options):
    """Train for some steps and return what is left of it, on the host.

    Before some steps the last rank gets a batch of another shape, or a hook, which makes its graph
    invalid and changes no number.
    """
    odd, hooked = options.pop("odd", ()), options.pop("hooked", ())
    model = make(width).to("cuda")
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
    names = ("make", "ema", "max_grad_norm", "width", "accumulate", "steps", "odd", "hooked")
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


class Waiting(torch.autograd.Function):
    """The identity, which waits for the device in one of its halves."""

    @staticmethod
    def forward(ctx, x, half):
        ctx.half = half
        if half == "forward":
            x.sum().item()
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.half == "backward":
            gradient.sum().item()
        return gradient, None


def refusing(shard, half):
    """Return a job with a wait for the device on the last rank only, which no capture allows."""

    def loss_fn(model, batch):
        tokens, targets = batch
        x = model.embedding(tokens)
        for number, block in enumerate(model.blocks):
            x = block(x)
            if number == 0:
                x = Waiting.apply(x, half if dist.get_rank() == 1 else None)
        return F.cross_entropy(model.head(x).flatten(0, 1), targets.flatten())

    def job(rank):
        return {
            graph: trained(rank, Plan(shard=shard, cuda_graph=graph), loss_fn)
            for graph in (False, True)
        }

    return job


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
    **{
        f"{shard} waits in a {half}": refusing(shard, half)
        for shard in ("ddp", "fsdp")
        for half in ("forward", "backward")
    },
    **{
        f"{shard} {name}": both_ways(shard, max_grad_norm=0.5, **fields)
        for shard in ("ddp", "fsdp")
        for name, fields in (
            ("accumulate", {"accumulate": 3}),
            ("recompute", {"recompute": "blocks"}),
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
    **{f"{shard} normed": both_ways(shard, make=Normed) for shard in ("ddp", "fsdp")},
    "fsdp some whole": both_ways(WHOLE_HEAD, max_grad_norm=0.5),
    "fsdp kept whole": both_ways(KEPT_WHOLE),
    **{
        f"{shard} {name}": both_ways(shard, max_grad_norm=0.5, offload=OFFLOAD, **fields)
        for shard in ("ddp", "fsdp")
        for name, fields in (("offload", {}), ("offload recompute", {"recompute": "blocks"}))
    },
    # What takes longest comes last.
    **{
        f"{shard} {name}": both_ways(shard, max_grad_norm=0.5, compile=BY_BLOCKS, **fields)
        for shard in ("ddp", "fsdp")
        for name, fields in (
            ("compile", {}),
            ("compile recompute accumulate", {"recompute": "blocks", "accumulate": 2}),
        )
    },
    "fsdp float8": both_ways("fsdp", precision=FLOAT8, width=16),  # needs units for it: the last
}
