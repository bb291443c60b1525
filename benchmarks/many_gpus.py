"""Steps on several GPUs: torchfast beside the loops that a person would write.

    PYTHONPATH=. python benchmarks/many_gpus.py [--ranks 2] [--workloads gpt-small ...] [--out FILE]

Every rank is a process. The arms of a workload take turns in the same processes, on batches that
lie on the device, and a figure is the median of its turns, from a barrier to the end of the slowest
rank. "graph by hand" captures forward, backward, collectives, clipping and update as one would by
hand; "no graph" is the same loop as it is. The arms of one GPU train alone, while the others wait,
and tell how much of an added GPU is left: the scaling is that of tokens a second. The peak of an
arm is its own: what the others hold meanwhile is taken off. When all have had their turns, a trace
of the arms named in PROFILED tells on each rank how long collectives run, and how long bare.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from benchmarks import rank_figures, results
from benchmarks.workloads import Batch, Workload, workload
from torchfast import CompileOptions, Plan, Trainer

WORKLOADS = ("gpt-small", "gpt2", "llama")
MAX_GRAD_NORM = 1.0
# As many steps as DistributedDataParallel wants before a capture, and one more.
WARM_UP_STEPS = 12
# Of each strategy the one that is fastest, as it was timed.
PROFILED = ("ddp, blocks compiled, torchfast", "fsdp, blocks compiled, torchfast")
BY_BLOCKS = CompileOptions(regions="blocks")

Step = Callable[[], Tensor]


class Arm(NamedTuple):
    """One way to train.

    Attributes:
        name: What tables call it.
        make: Returns a step on one batch, given the workload, the batch and the device.
        is_alone: Whether the first rank trains by itself.
        plan: Torchfast's, where that is what it is.
    """

    name: str
    make: Callable[[Workload, Batch, torch.device], tuple[Step, Callable[[], None]]]
    is_alone: bool = False
    plan: Plan | None = None


def autocast_loss(item: Workload, model: Any, batch: Batch, device: torch.device) -> Tensor:
    """Return the loss in bf16 on a GPU."""
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        return item.loss_fn(model, batch)


def adamw(item: Workload, parameters: Any) -> torch.optim.AdamW:
    """Return the optimizer of all arms: the fused one, which a graph can hold."""
    on_gpu = torch.cuda.is_available()
    return torch.optim.AdamW(parameters, lr=item.lr, fused=True, capturable=on_gpu)


def by_hand(
    item: Workload,
    batch: Batch,
    device: torch.device,
    *,
    shard: str,
    compiled: bool,
    graph: bool,
) -> tuple[Step, Callable[[], None]]:
    """Return a step as one would write it."""
    side = torch.cuda.Stream() if device.type == "cuda" else None
    model: Any = fresh(item).to(device)
    if compiled:
        for block in item.regions(model):
            block.compile(dynamic=False)
    if shard == "fsdp":
        for block in item.regions(model):
            fully_shard(block)
        fully_shard(model)
    elif shard == "ddp":
        with torch.cuda.stream(side):
            model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = adamw(item, model.parameters())

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=shard != "ddp")
        loss = autocast_loss(item, model, batch, device)
        loss.backward()
        clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        return loss.detach()

    if not graph or side is None:
        return step, lambda: None
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP_STEPS):
            step()
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured, stream=side, capture_error_mode="thread_local"):
        loss = step()

    def replay() -> Tensor:
        captured.replay()
        return loss.clone()

    return replay, captured.reset


def by_torchfast(
    item: Workload, batch: Batch, device: torch.device, *, plan: Plan
) -> tuple[Step, Callable[[], None]]:
    """Return a step of torchfast's."""
    trainer = trainer_of(item, device, plan)
    if device.type == "cuda":
        for _ in range(WARM_UP_STEPS + 4):
            trainer.step(batch)
        found = trainer.report().counters
        if plan.cuda_graph and not found.get("graphs"):
            raise RuntimeError(f"nothing was captured: {trainer.report()}")
    return partial(trainer.step, batch), trainer.close


def trainer_of(item: Workload, device: torch.device, plan: Plan) -> Trainer:
    """Return a trainer of a new model."""
    model = fresh(item).to(device)
    return Trainer(model, partial(adamw, item), item.loss_fn, plan, max_grad_norm=MAX_GRAD_NORM)


def by_accelerate(
    item: Workload, batch: Batch, device: torch.device
) -> tuple[Step, Callable[[], None]]:
    """Return a step as Accelerate's documentation has it, on the same engine."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    model: Any = fresh(item)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[type(item.regions(model)[0]).__name__],
        reshard_after_forward=True,
    )
    precision = "bf16" if device.type == "cuda" else "no"
    accelerator = Accelerator(
        mixed_precision=precision, fsdp_plugin=plugin, cpu=device.type == "cpu"
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=item.lr, fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)

    def step() -> Tensor:
        loss = item.loss_fn(model, batch)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, accelerator.free_memory


def by_lightning(
    item: Workload, batch: Batch, device: torch.device
) -> tuple[Step, Callable[[], None]]:
    """Return a step of Lightning's Fabric with its sharding strategy."""
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.fabric.strategies import FSDPStrategy

    model: Any = fresh(item)
    # Fabric asks the launcher's environment, which here is this program.
    os.environ.setdefault("TORCHELASTIC_RUN_ID", "benchmark")
    fabric = Fabric(
        accelerator=device.type,
        devices=dist.get_world_size(),
        precision="bf16-mixed" if device.type == "cuda" else "32-true",
        strategy=FSDPStrategy(
            auto_wrap_policy={type(item.regions(model)[0])},
            cluster_environment=TorchElasticEnvironment(),
        ),
    )
    fabric.launch()
    model = fabric.setup_module(model)
    optimizer: Any = fabric.setup_optimizers(
        torch.optim.AdamW(model.parameters(), lr=item.lr, fused=True)
    )

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = item.loss_fn(model, batch)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=MAX_GRAD_NORM)
        optimizer.step()
        return loss.detach()

    return step, lambda: None


def fresh(item: Workload) -> nn.Module:
    """Return the model, the same on every rank."""
    torch.manual_seed(0)
    return item.build()


def arms() -> list[Arm]:
    """Return the ways to train, those by hand before torchfast's of the same kind."""
    found = []
    for shard in ("ddp", "fsdp"):
        for compiled in (False, True):
            form = f"{shard}, blocks compiled" if compiled else shard
            for graph in (False, True):
                name = f"{form}, {'graph' if graph else 'no graph'} by hand"
                make = partial(by_hand, shard=shard, compiled=compiled, graph=graph)
                found.append(Arm(name, make))
            plan = Plan(
                precision="bf16" if torch.cuda.is_available() else "as_given",
                shard=shard,  # type: ignore[arg-type]
                compile=BY_BLOCKS if compiled else False,
                cuda_graph=True,
            )
            make = partial(by_torchfast, plan=plan)
            found.append(Arm(f"{form}, torchfast", make, plan=plan))
    found += [Arm("fsdp, Accelerate", by_accelerate), Arm("fsdp, Lightning", by_lightning)]
    alone = plan.replace(shard=None)
    made = partial(by_torchfast, plan=alone)
    name = "one GPU, blocks compiled, torchfast"
    return [*found, Arm(name, made, is_alone=True)]


def measured(
    item: Workload, args: argparse.Namespace, device: torch.device
) -> list[dict[str, Any]]:
    """Return a row for each arm; all ranks call it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    batches = item.batches()
    batch = tuple(tensor.to(device) for tensor in batches[rank % len(batches)])
    rows = []
    chosen = [arm for arm in arms() if not args.arms or any(word in arm.name for word in args.arms)]
    # A few at a time: what takes turns is in memory at once.
    for begin in range(0, len(chosen), args.together):
        rows += turns(chosen[begin : begin + args.together], item, batch, args, device)
    by_name = {arm.name: arm for arm in chosen}
    for row in rows:
        if "ms" in row and row["arm"] in PROFILED:
            made = partial(trainer_of, item, device, by_name[row["arm"]].plan)
            row["communication"] = rank_figures.communication(made, batch, WARM_UP_STEPS + 4)
        if "ms" in row:
            ranks = 1 if row["is_alone"] else world
            row["items_per_s"] = ranks * item.items_per_step / row["ms"] * 1e3
    return rows


def turns(
    group: list[Arm], item: Workload, batch: Batch, args: argparse.Namespace, device: torch.device
) -> list[dict[str, Any]]:
    """Let some arms take turns."""
    made: list[tuple[Arm, Step | None, Callable[[], None], rank_figures.OwnMemory]] = []
    rows: dict[str, dict[str, Any]] = {}
    for arm in group:
        is_here = not arm.is_alone or dist.get_rank() == 0
        row = rows[arm.name] = {"arm": arm.name, "is_alone": arm.is_alone, "turns_ms": []}
        step, close = None, lambda: None
        memory = rank_figures.OwnMemory(args.cuda)
        try:
            if is_here:
                with memory.making():
                    step, close = arm.make(item, batch, device)
        except Exception:
            row["failed"] = traceback.format_exc(limit=-3)
        if not everywhere("failed" not in row):
            row.setdefault("failed", "on another rank")
            continue
        made.append((arm, step, close, memory))
    for number in range(args.rounds + 1):
        for position in range(len(made)):
            arm, step, _, memory = made[(position + number) % len(made)]
            with memory.turn():
                ms, loss = timed(step, args.steps, device)
            if number:  # the first round only warms up
                rows[arm.name]["turns_ms"].append(ms)
            rows[arm.name]["loss"] = loss
    for arm, _, close, memory in made:
        close()
        rows[arm.name]["ms"] = statistics.median(rows[arm.name]["turns_ms"])
        rows[arm.name]["peak_gb"] = memory.peak_gb
    del made
    gc.collect()
    if args.cuda:
        torch.cuda.empty_cache()
    return list(rows.values())


def everywhere(yes: bool) -> bool:
    """Whether all ranks say yes."""
    flag = torch.tensor(int(yes))
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag)


def timed(step: Step | None, steps: int, device: torch.device) -> tuple[float, float]:
    """Return the milliseconds of a step on the slowest rank, and the last loss."""
    loss = torch.zeros(())
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps if step is not None else 0):
        assert step is not None
        loss = step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    took = torch.tensor((time.perf_counter() - start) / steps * 1e3)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    whole = loss.full_tensor() if isinstance(loss, DTensor) else loss
    return float(took), float(whole)


def work(rank: int, args: argparse.Namespace, store: str, found: Any) -> None:
    """Measure on one rank."""
    args.cuda = torch.cuda.is_available() and args.device == "cuda"
    device = torch.device("cuda", rank) if args.cuda else torch.device("cpu")
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(args.ranks), "LOCAL_RANK": str(rank)}
    # For the peers, which read it and find the group made already.
    os.environ |= {
        "LOCAL_WORLD_SIZE": str(args.ranks),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29511",
    }
    if args.cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if args.cuda else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=args.ranks,
        timeout=timedelta(seconds=120),
    )
    for name in args.workloads:
        if time.time() > args.deadline:
            break
        rows = measured(workload(name, args.size), args, device)
        if rank == 0:
            found.put((name, rows))
    dist.destroy_process_group()


def told(name: str, rows: list[dict[str, Any]]) -> None:
    """Print a table."""
    print(f"\n{name}", flush=True)
    bars = {
        row["arm"].rpartition(", ")[0]: row for row in rows if row["arm"].endswith("graph by hand")
    }
    for row in rows:
        if "failed" in row:
            print(f"  {row['arm']:<44} failed: {row['failed'].strip().splitlines()[-1]}")
            continue
        bar = bars.get(row["arm"].rpartition(", ")[0], {}).get("ms")
        ratio = f"{row['ms'] / bar:7.3f}" if bar else " " * 7
        print(
            f"  {row['arm']:<44} {row['ms']:9.3f} ms {ratio}  {row['items_per_s']:12.0f}/s",
            flush=True,
        )


def main() -> None:
    """Start the ranks, and write what they found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS))
    parser.add_argument("--arms", nargs="+", default=[], help="only those whose name has a word")
    parser.add_argument("--size", choices=["full", "smoke"], default="full")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="of a turn")
    parser.add_argument("--together", type=int, default=4, help="arms in memory at once")
    parser.add_argument("--limit-s", type=float, default=540, help="no workload begins after it")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.deadline = time.time() + args.limit_s
    context = multiprocessing.get_context("spawn")
    found = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        ranks = multiprocessing.spawn(work, (args, store, found), nprocs=args.ranks, join=False)
        figures: dict[str, Any] = {"ranks": args.ranks, "size": args.size, "workloads": {}}
        ended = False
        while not (ended and found.empty()):
            ended = ended or ranks.join(timeout=1)
            while not found.empty():
                name, rows = found.get()
                figures["workloads"][name] = rows
                told(name, rows)
                if args.out is not None:
                    results.write(args.out, figures)


if __name__ == "__main__":
    main()
