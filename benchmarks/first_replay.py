"""How soon a step is replayed: what lies between its warm-up and its first replay.

    PYTHONPATH=. python benchmarks/first_replay.py [--workloads W ...] [--size smoke] [--out FILE]
    PYTHONPATH=. python benchmarks/first_replay.py --profile

A workload is trained by the plan ``fast`` without a compiler, from nothing. After the steps of the
warm-up the device is drained, and the next step captures. Told is the time from its beginning to
the launch of the first replay, and to its end, by when replays have been compared with eager steps;
both also in steps of the plan ``eager``, of which the median of some steady ones is taken. Beside
it stands the first replay of the loop by hand, which looks at nothing. Each time is the median over
some trainers, each of which captures anew. With ``--profile`` it is told which functions the time
until the first replay went to, in place of how long it was: a profiler of Python makes it longer.
"""

from __future__ import annotations

import cProfile
import pstats
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.arms import check_has_graphs, parser_of, write_rows
from benchmarks.job import Job
from benchmarks.methods import by_hand
from benchmarks.workloads import NAMES, Workload, workload
from torchfast import Plan, Trainer

WORKLOADS: Final = ("mlp", "gpt-small", "lstm", "moe", "resnet50", "gpt2")
STEADY_STEPS: Final = 10
PROFILED_LINES: Final = 25


def trainer_of(work: Workload, plan: Plan) -> Trainer:
    """Return a trainer of a new model."""
    torch.manual_seed(0)
    adamw = partial(torch.optim.AdamW, lr=work.lr)
    return Trainer(work.build(), adamw, work.loss_fn, plan, max_grad_norm=1.0, device="cuda")


@contextmanager
def replays_noted(before: Callable[[], object] = time.perf_counter) -> Iterator[list[float]]:
    """Note the times at which replays are launched, and call something before each."""
    launched: list[float] = []
    replay = torch.cuda.CUDAGraph.replay

    def noted(graph: Any) -> None:
        before()
        launched.append(time.perf_counter())
        replay(graph)

    torch.cuda.CUDAGraph.replay = noted  # type: ignore[method-assign]
    try:
        yield launched
    finally:
        torch.cuda.CUDAGraph.replay = replay  # type: ignore[method-assign]


def eager_ms(work: Workload, batches: list[Any]) -> float:
    """Return the time of a steady step that is never captured."""
    times = []
    with trainer_of(work, Plan.preset("fast").replace(compile=False, cuda_graph=False)) as trainer:
        for number in range(2 * STEADY_STEPS):
            torch.cuda.synchronize()
            started = time.perf_counter()
            trainer.step(batches[number % len(batches)])
            torch.cuda.synchronize()
            times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times[STEADY_STEPS:])


def captured_ms(work: Workload, batches: list[Any]) -> tuple[float, float]:
    """Return the times to the first replay and to the end of the step that captures."""
    with (
        replays_noted() as launched,
        trainer_of(work, Plan.preset("fast").replace(compile=False)) as trainer,
    ):
        for number in range(STEADY_STEPS):
            torch.cuda.synchronize()
            started = time.perf_counter()
            trainer.step(batches[number % len(batches)])
            torch.cuda.synchronize()
            if launched:
                return (launched[0] - started) * 1e3, (time.perf_counter() - started) * 1e3
    raise RuntimeError(f"{work.name} was not captured in {STEADY_STEPS} steps:\n{trainer.report()}")


def by_hand_ms(work: Workload) -> float:
    """Return the time from the warm-up of the loop by hand to its first replay."""
    started = 0.0

    class FoundError(Exception):
        pass

    with replays_noted() as launched:

        def tick(loss: Tensor) -> None:
            nonlocal started
            del loss
            if launched:
                raise FoundError
            torch.cuda.synchronize()
            started = time.perf_counter()

        torch.manual_seed(0)
        with suppress(FoundError):
            by_hand.graph(Job(work, work.build().cuda(), torch.device("cuda"), tick))
        return (launched[0] - started) * 1e3


def profiled(work: Workload, batches: list[Any]) -> pstats.Stats:
    """Return where the time of the step that captures goes, until its first replay."""
    profiler = cProfile.Profile()
    plan = Plan.preset("fast").replace(compile=False)
    with replays_noted(profiler.disable) as launched, trainer_of(work, plan) as trainer:
        for number in range(STEADY_STEPS):
            torch.cuda.synchronize()
            profiler.clear()  # of the step before, which did not capture
            profiler.enable()
            trainer.step(batches[number % len(batches)])
            profiler.disable()
            if launched:
                return pstats.Stats(profiler)
    raise RuntimeError(f"{work.name} was not captured in {STEADY_STEPS} steps:\n{trainer.report()}")


def measured(name: str, args: Any) -> dict[str, Any]:
    """Return the row of a workload."""
    work = workload(name, args.size)
    batches = [tuple(t.cuda() for t in batch) for batch in work.batches()]
    eager = eager_ms(work, batches)
    # The first of a process loads what the others find.
    times = [captured_ms(work, batches) for _ in range(args.rounds + 1)][1:]
    first, whole = (statistics.median(each) for each in zip(*times, strict=True))
    hand = [by_hand_ms(work) for _ in range(args.rounds + 1)][1:]
    return {
        "workload": name,
        "eager_ms": eager,
        "first_replay_ms": first,
        "checked_ms": whole,
        "by_hand_ms": statistics.median(hand),
        "first_replay_steps": first / eager,
        "checked_steps": whole / eager,
        "times_ms": times,
        "times_by_hand_ms": hand,
    }


def main() -> None:
    """Measure, print and write the figures."""
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("--size", choices=["full", "smoke"], default="full")
    parser.add_argument("--workloads", nargs="+", choices=NAMES, default=list(WORKLOADS))
    parser.add_argument("--profile", action="store_true", help="tell which functions take the time")
    args = parser.parse_args()
    check_has_graphs(parser, args)
    args.block_s = None
    rows = []
    for name in args.workloads:
        if args.profile:
            work = workload(name, args.size)
            batches = [tuple(t.cuda() for t in batch) for batch in work.batches()]
            captured_ms(work, batches)  # the first of a process loads what the others find
            print(name)
            profiled(work, batches).sort_stats("tottime").print_stats(PROFILED_LINES)
            continue
        rows.append(measured(name, args))
        row = rows[-1]
        print(
            f"{name:<10} eager {row['eager_ms']:8.2f} ms  first replay after "
            f"{row['first_replay_ms']:8.2f} ms ({row['first_replay_steps']:.2f} steps), checked "
            f"after {row['checked_ms']:8.2f} ms ({row['checked_steps']:.2f} steps), "
            f"by hand after {row['by_hand_ms']:8.2f} ms",
            flush=True,
        )
        write_rows(args, rows)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
