"""What fit tells of the collectives of two GPUs, in processes of their own."""

from __future__ import annotations

import json
import statistics
import time
import traceback

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

from gpu import parallel_jobs
from gpu.late import SLOW, Late
from gpu.syncs import forbid_syncs
from parallel_training import Block, Own, full_state
from torchfast import Plan, ShardOptions, Trainer
from torchfast.profiling import StepTimer

STEPS = 40
LATE = 8 * SLOW  # far longer than the host takes for a step: it is ahead, and launches in time
SHARDS = {
    "ddp": ShardOptions(strategy="ddp", bucket_mb=0.1),
    "fsdp": ShardOptions(strategy="fsdp"),
    "hsdp": ShardOptions(strategy="hsdp", num_replicas=1),
    "hsdp of whole copies": ShardOptions(strategy="hsdp", num_replicas=2),
}


def run(rank, jobs, num_ranks, store, folder):
    parallel_jobs.run(rank, jobs, num_ranks, store, folder, JOBS)


class Net(nn.Module):
    """Late where a test says so: before its blocks in the backward, behind them in the forward."""

    def __init__(self, width=256, forward=0, backward=0):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.late = forward, backward

    def forward(self, x):
        forward, backward = self.late
        x = Late.apply(self.first(x), 0, backward) if backward else self.first(x)
        for block in self.blocks:
            x = block(x)
        return Late.apply(x, forward, 0) if forward else x


def loss_fn(model, x):
    return model(x).square().mean()


def batches(rank, num=8):
    generator = torch.Generator().manual_seed(rank)
    return Own(torch.randn(64, 256, generator=generator).cuda() for _ in range(num))


def trainer_of(shard, graph, **net):
    torch.manual_seed(0)
    return Trainer(
        Net(**net).cuda(),
        lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(0.01), fused=True, capturable=True),
        loss_fn,
        Plan(shard=SHARDS[shard], cuda_graph=graph),
        max_grad_norm=1.0,
        device="cuda",
    )


def fit(trainer, loader, steps=STEPS):
    return trainer.fit(loader, steps=steps, progress="off", log_every=10)


def told(result):
    return {
        str(row.name): (row.p50_ms, row.source, row.num_samples) for row in result.step_times.phases
    }


def sleep_ms():
    """What the device sleeps where a net is late by `LATE`."""
    times = []
    for _ in range(3):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.cuda._sleep(LATE)
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def late_rank(rank):
    """Times of both ranks, where the second is late at the end of each forward."""
    found = {"sleep_ms": sleep_ms()}
    for shard in SHARDS:
        for graph in (False, True):
            trainer = trainer_of(shard, graph, forward=LATE * rank)
            result = fit(trainer, batches(rank))
            found[shard, graph] = told(result), dict(trainer.report().counters)
            trainer.close()
    return found


def hidden(rank):
    """As above, where the first rank has more to do in its backward than the second is late.

    So gradients of its last layers wait for the other while it computes, and those of the first
    layers are waited for on the other.
    """
    net = {"backward": 3 * LATE} if rank == 0 else {"forward": LATE}
    trainer = trainer_of("ddp", False, **net)
    times = told(fit(trainer, batches(rank)))
    trainer.close()
    return {"sleep_ms": sleep_ms(), "times": times}


def beside_a_profile(rank):
    """What fit tells, and how long kernels of NCCL run in a step as a profile has it."""
    found = {}
    for shard in SHARDS:
        trainer = trainer_of(shard, False, forward=LATE * rank)
        loader = batches(rank)
        times = told(fit(trainer, loader))
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
            for x in loader:
                trainer.step(x)
            torch.cuda.synchronize()
        path = f"/tmp/torchfast-trace-{rank}.json"
        prof.export_chrome_trace(path)
        with open(path) as file:
            events = json.load(file)["traceEvents"]
        spans = sorted(
            (e["ts"], e["ts"] + e["dur"])
            for e in events
            if e.get("cat") == "kernel" and "nccl" in e["name"].lower()
        )
        busy_us, reached = 0.0, float("-inf")
        for start, stop in spans:
            busy_us += max(0.0, stop - max(start, reached))
            reached = max(reached, stop)
        found[shard] = times, busy_us / 1e3 / len(loader)
        trainer.close()
    return found


def bits(rank):
    """Whether looking changes a bit, eagerly and captured."""
    found = {}
    begin_step = StepTimer.begin_step
    for shard in SHARDS:
        for graph in (False, True):
            for is_timed in (True, False):
                StepTimer.begin_step = begin_step if is_timed else lambda self: None
                trainer = trainer_of(shard, graph)
                result = fit(trainer, batches(rank))
                found[shard, graph, is_timed] = {
                    "state": {k: v.cpu() for k, v in full_state(trainer.model).items()},
                    "losses": torch.tensor([r["loss"] for r in result.history if "loss" in r]),
                    "graphs": trainer.report().counters.get("graphs"),
                }
                trainer.close()
    StepTimer.begin_step = begin_step
    return found


def waits(rank):
    """The lines that wait for the device in steps that are looked at."""
    from torch.cuda import _gpu_trace

    seen = []

    def note(*_):
        if is_watching:
            seen.append("".join(traceback.format_stack(limit=8)))

    is_watching = False
    torch._C._activate_gpu_trace()
    _gpu_trace.register_callback_for_device_synchronization(note)
    _gpu_trace.register_callback_for_stream_synchronization(note)
    _gpu_trace.register_callback_for_event_synchronization(note)
    found = {}
    for shard in SHARDS:
        trainer = trainer_of(shard, False)
        loader = batches(rank)
        for x in loader + loader:  # replicas keep statistics of the first ten steps, with waits
            trainer.step(x)
        torch.cuda.synchronize()
        seen.clear()
        num_read = trainer._timer._num_read
        with trainer._timer.session():
            forbid_syncs(True)
            is_watching = True
            for x in loader:
                trainer._timer.begin_step()
                trainer.step(x)
                trainer._timer.end_step()
            is_watching = False
            forbid_syncs(False)
        torch.cuda.synchronize()
        times = trainer._timer.times()
        found[shard] = list(seen), trainer._timer._num_read - num_read, str(times)
        trainer.close()
    return found


def cost(rank):
    """Ratios of the times of a fit that looks and one that does not."""
    found = {}
    begin_step, end_step = StepTimer.begin_step, StepTimer.end_step
    for shard in ("ddp", "fsdp"):
        trainer = trainer_of(shard, False)
        loader = batches(rank)
        fit(trainer, loader)
        ratios = []
        for turn in range(8):
            seconds = {}
            for is_timed in (True, False) if turn % 2 else (False, True):
                StepTimer.begin_step = begin_step if is_timed else lambda self: None
                StepTimer.end_step = end_step if is_timed else lambda self: None
                torch.cuda.synchronize()
                dist.barrier()
                started = time.perf_counter()
                fit(trainer, loader, steps=200)
                torch.cuda.synchronize()
                seconds[is_timed] = time.perf_counter() - started
            ratios.append(seconds[True] / seconds[False])
        StepTimer.begin_step, StepTimer.end_step = begin_step, end_step
        found[shard] = ratios
        trainer.close()
    return found


JOBS = {
    "late rank": late_rank,
    "hidden": hidden,
    "beside a profile": beside_a_profile,
    "bits": bits,
    "cost": cost,
    "waits": waits,  # the last: what it registers stays
}
