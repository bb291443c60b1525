"""Steps on several GPUs: torchfast beside the loops that a person would write.

    PYTHONPATH=. python benchmarks/many_gpus.py [--ranks 2] [--workloads gpt-small ...]
        [--parts times exact communication] [--arms WORD ...] [--samples 16] [--limit-s 540]
        [--out FILE]

Every rank is a process. The arms of a group (see `rank_arms`) take turns in the same processes, on
batches that lie on the device, and a figure is the median of its turns, from a barrier to the end
of the slowest rank. The arm of one GPU trains alone, while the others wait, and tells how much of
an added GPU is left: the scaling is that of tokens a second. The peak of an arm is its own: what
the others hold meanwhile is taken off.

"exact" trains torchfast's arms captured and as they are, under deterministic algorithms, and
compares losses, parameters and optimizer state to the bit. "communication" tells, from a trace of
the arms named in PROFILED on each rank, how long collectives run, and how long bare.

What matters most comes first, a row is written as soon as it is there, and nothing begins that
would not end within the limit if it took what others did so far, on average. What is left out a
later run measures, into the same file.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import os
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed.tensor import DTensor

from benchmarks import rank_figures
from benchmarks.arms import parser_of
from benchmarks.rank_arms import WARM_UP_STEPS, Arm, Step, groups, trainer_of
from benchmarks.result_rows import ResultRows
from benchmarks.workloads import Batch, Workload, workload

WORKLOADS = ("gpt2", "gpt-small", "llama")
PARTS = ("times", "exact", "communication")
# Of each strategy the one that is fastest, as it was timed.
PROFILED = ("ddp, blocks compiled, torchfast", "fsdp, blocks compiled, torchfast")
# Ranks that wait for each other in vain end so long behind the limit.
GRACE_S = 30
# A rank waits so long for the others: the first one compiles alone.
TIMEOUT_S = 180

Tell = Callable[..., None]


class Clock:
    """Whether there is time for more, told by what others took; all ranks say alike.

    Args:
        deadline: By `time.time`.
    """

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._took_s: list[float] = []

    def has_time(self) -> bool:
        """Whether another would end in time if it were as the others; all ranks call it."""
        usual_s = statistics.mean(self._took_s) if self._took_s else 0.0
        return everywhere(time.time() + usual_s < self._deadline)

    def rounds(self, items: list[Any]) -> Iterator[tuple[Any, bool]]:
        """Yield each item, and whether there is time for it."""
        for item in items:
            has_time, begun = self.has_time(), time.time()
            yield item, has_time
            if has_time:
                self._took_s.append(time.time() - begun)


def measure(item: Workload, args: argparse.Namespace, device: torch.device, tell: Tell) -> None:
    """Measure what is asked for of a workload; all ranks call it."""
    chosen = [
        [arm for arm in group if not args.arms or any(word in arm.name for word in args.arms)]
        for group in groups()
    ]
    clock = Clock(args.deadline)
    host = item.batches()
    rank = dist.get_rank()
    # Each rank trains on others of them.
    batches = [
        tuple(tensor.to(device) for tensor in host[(rank + number) % len(host)])
        for number in range(len(host))
    ]
    if "times" in args.parts:
        # A few at a time: what takes turns is in memory at once.
        together = [
            group[begin : begin + args.together]
            for group in chosen
            for begin in range(0, len(group), args.together)
        ]
        for group, has_time in clock.rounds(together):
            if has_time:
                for row in turns(group, item, batches[0], args, device):
                    tell("times", item.name, row.pop("arm"), row)
            else:
                for arm in group:
                    tell("times", item.name, arm.name, None)
    own = [arm for group in chosen for arm in group if arm.plan is not None and not arm.is_alone]
    if "exact" in args.parts:
        clock = Clock(args.deadline)
        for arm, has_time in clock.rounds(own):
            compare = partial(compared, item, arm, batches, args, device)
            tell("exact", item.name, arm.name, tried(compare) if has_time else None)
    if "communication" in args.parts:
        clock = Clock(args.deadline)
        for arm, has_time in clock.rounds([arm for arm in own if arm.name in PROFILED]):
            look = partial(profiled, item, arm, batches[0], device)
            tell("communication", item.name, arm.name, tried(look) if has_time else None)


def part_of(item: Workload, samples: int | None) -> Workload:
    """Return a workload with at most so many samples in each batch, named after that."""
    whole = item.batches()
    parts = [tuple(tensor[:samples] for tensor in batch) for batch in whole]
    num_parts, num_whole = len(parts[0][0]), len(whole[0][0])
    if num_parts == num_whole:
        return item
    return replace(
        item,
        name=f"{item.name}, {samples} samples",
        batches=lambda: parts,
        items_per_step=item.items_per_step * num_parts // num_whole,
    )


def tried(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what was found, or why nothing was: on all ranks alike."""
    found: dict[str, Any] = {}
    try:
        found = work()
    except Exception:
        found = {"failed": traceback.format_exc(limit=-3)}
    if not everywhere("failed" not in found):
        found = {"failed": found.get("failed", "on another rank")}
    clean_up()
    return found


def clean_up() -> None:
    """Let go of what nobody holds, and of what was compiled, which one process has little room for.

    A function is compiled anew for other shards, shapes and settings up to a limit, and behind it
    runs as it is, without a word.
    """
    torch.compiler.reset()
    empty_cache()


def empty_cache() -> None:
    """Let go of what nobody holds."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def compared(
    item: Workload,
    arm: Arm,
    batches: list[Batch],
    args: argparse.Namespace,
    device: torch.device,
) -> dict[str, Any]:
    """Return whether captured steps leave what the same steps leave as they are."""
    assert arm.plan is not None
    plans = [arm.plan.replace(cuda_graph=False), arm.plan]
    makes = [partial(trainer_of, item, device, plan) for plan in plans]
    return rank_figures.exactness(makes, batches, args.exact_steps, needs_graph=args.cuda)


def profiled(item: Workload, arm: Arm, batch: Batch, device: torch.device) -> dict[str, Any]:
    """Return by rank what collectives take of a step."""
    assert arm.plan is not None
    make = partial(trainer_of, item, device, arm.plan)
    return {"ranks": rank_figures.communication(make, batch, WARM_UP_STEPS + 4)}


def turns(
    group: list[Arm], item: Workload, batch: Batch, args: argparse.Namespace, device: torch.device
) -> list[dict[str, Any]]:
    """Let some arms take turns, and return a row for each."""
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
            close()  # a graph that is left would keep the ranks from their end
            continue
        made.append((arm, step, close, memory))
        # Or what its warm-up has left in the cache would be missing to the next one.
        empty_cache()
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
        row = rows[arm.name]
        row["ms"] = statistics.median(row["turns_ms"])
        row["peak_gb"] = memory.peak_gb
        num_ranks = 1 if arm.is_alone else dist.get_world_size()
        row["items_per_s"] = num_ranks * item.items_per_step / row["ms"] * 1e3
    made.clear()
    step = close = None  # type: ignore[assignment]
    clean_up()
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
    everywhere(True)
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
    faulthandler.enable()  # a rank that dies says where it was
    args.cuda = torch.cuda.is_available() and args.device == "cuda"
    device = torch.device("cuda", rank) if args.cuda else torch.device("cpu")
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(args.ranks), "LOCAL_RANK": str(rank)}
    # For the peers, which read it and find the group made already.
    os.environ |= {
        "LOCAL_WORLD_SIZE": str(args.ranks),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29511",
    }
    # Before the first matrix product: what deterministic algorithms ask for.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if args.cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # the ranks would fight for the cores
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if args.cuda else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=args.ranks,
        timeout=timedelta(seconds=TIMEOUT_S),
    )

    def tell(*what: Any) -> None:
        if rank == 0:
            found.put(what)

    for name in args.workloads:
        measure(part_of(workload(name, args.size), args.samples), args, device, tell)
    dist.destroy_process_group()


def told(part: str, name: str, arm: str, row: dict[str, Any] | None, bars: dict[Any, float]) -> str:
    """Return a row as a line."""
    start = f"{part:<14} {name:<10} {arm:<40}"
    if row is None:
        return f"{start} left out: no time was left"
    if "failed" in row:
        return f"{start} failed: {row['failed'].strip().splitlines()[-1]}"
    if part == "exact":
        return f"{start} {'same bits' if row['same_bits'] else row['differs']}"
    if part == "communication":
        shares = ", ".join(
            f"{r['exposed_communication_ms']:.3f} of {r['communication_ms']:.3f} ms bare"
            for r in row["ranks"]
        )
        return f"{start} {shares}"
    kind, _, way = arm.rpartition(", ")
    if way == "graph by hand":
        bars[name, kind] = row["ms"]
    bar = bars.get((name, kind))
    ratio = f"{row['ms'] / bar:7.3f}" if bar else " " * 7
    return f"{start} {row['ms']:9.3f} ms {ratio}  {row['items_per_s']:12.0f}/s"


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Return by what the script is called."""
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--arms", nargs="+", default=[], help="only those whose name has a word")
    parser.add_argument("--size", choices=["full", "smoke"], default="full")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20, help="of a turn")
    parser.add_argument("--exact-steps", type=int, default=24, help="of each of the two trainings")
    parser.add_argument("--together", type=int, default=3, help="arms in memory at once")
    parser.add_argument("--samples", type=int, help="of each batch, for less memory; else all")
    parser.add_argument("--limit-s", type=float, default=540, help="when all is to be over")
    args = parser.parse_args(words)
    if args.samples is not None and args.samples < 1:
        parser.error(f"--samples {args.samples}: a step needs at least one of each batch")
    return args


def main() -> None:
    """Start the ranks, and write what they find as they find it."""
    args = arguments()
    args.deadline = time.time() + args.limit_s
    names = ("size", "ranks", "rounds", "steps")
    settings = {name: getattr(args, name) for name in names}
    rows = ResultRows(args.out, ("group", "name"), settings)
    bars: dict[Any, float] = {}
    context = multiprocessing.get_context("spawn")
    found = context.Queue()

    def take() -> None:
        while not found.empty():
            part, name, arm, row = found.get()
            print(told(part, name, arm, row, bars), flush=True)
            if row is None:
                rows.leave_out(part, f"{name}, {arm}", "no time was left", ranks=args.ranks)
            else:
                which = {"group": part, "name": f"{name}, {arm}", "workload": name, "arm": arm}
                rows.add({**which, **row}, ranks=args.ranks)

    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        ranks = multiprocessing.spawn(work, (args, store, found), nprocs=args.ranks, join=False)
        try:
            while not ranks.join(timeout=1):
                take()
                if time.time() > args.deadline + GRACE_S:
                    for process in ranks.processes:
                        process.kill()
                    raise SystemExit(f"the ranks are not done {GRACE_S} s behind the limit")
        finally:
            take()  # what there is, where a rank has failed, too


if __name__ == "__main__":
    main()
