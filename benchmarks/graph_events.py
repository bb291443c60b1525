"""Timing events inside of a graph: what they cost in each replay, and when they can be believed.

    PYTHONPATH=. python benchmarks/graph_events.py [--size smoke] [--out FILE]

A step of a workload as one CUDA graph, twice: as it is, and with external events
(``torch.cuda.Event(enable_timing=True, external=True)``) where forward, backward and update begin
and end. Three questions:

- **cost**: replays of both take turns, and the quotient is what the events cost, with its
  quartiles; "again" is a second graph without events, whose quotient is noise.
- **agreement**: after a replay that the host waited for, do the parts add up to the whole, measured
  by ordinary events around the replay? And are they those of the eager step?
- **late reading**: a host that runs ahead launches the next replay before it reads. How often does
  what it reads then differ by more than a tenth from what the same events say of a replay that was
  waited for, and how often is it refused by CUDA or below nought?
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from typing_extensions import override

from benchmarks.arms import (
    Arm,
    check_has_graphs,
    median_and_quartiles,
    parser_of,
    steps_of_a_turn,
    take_turns,
    write_rows,
)
from benchmarks.workloads import Size, workload

PARTS: Final = ("forward", "backward", "update")
WORKLOADS: Final = ("mlp", "gpt-small", "vit")
WARM_UP: Final = 5
READINGS: Final = 100


class Replayed(Arm):
    """A training step as one graph, with events in it or without."""

    def __init__(self, name: str, size: Size, *, events: bool) -> None:
        super().__init__("cuda")
        work = workload(name, size)
        torch.manual_seed(0)
        model = work.build().cuda()
        batch = tuple(t.cuda() for t in work.batches()[0])
        optimizer = torch.optim.AdamW(model.parameters(), work.lr, fused=True, capturable=True)
        self.events = [_event(external=events) for _ in range(len(PARTS) + 1)] if events else []

        def mark(number: int, marks: list[torch.cuda.Event]) -> None:
            if marks:
                marks[number].record()

        def step(marks: list[torch.cuda.Event]) -> Tensor:
            optimizer.zero_grad(set_to_none=True)
            mark(0, marks)
            with torch.autocast("cuda", torch.bfloat16):
                loss = work.loss_fn(model, batch)
            mark(1, marks)
            loss.backward()
            mark(2, marks)
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            mark(3, marks)
            return loss.detach()

        eager = [_event(external=False) for _ in range(len(PARTS) + 1)]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                step(eager)
        torch.cuda.synchronize()
        self.eager_ms = _between(eager)
        optimizer.zero_grad(set_to_none=True)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            step(self.events)
        self.kept = model, optimizer, batch

    @override
    def run(self) -> None:
        self.graph.replay()


def _event(*, external: bool) -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True, external=external)


def _between(events: list[torch.cuda.Event]) -> list[float]:
    return [before.elapsed_time(after) for before, after in pairwise(events)]


def parts_and_whole(arm: Replayed) -> tuple[list[float], float]:
    """Return the medians of the parts of replays that were waited for, and of the whole."""
    parts, wholes = [], []
    for _ in range(READINGS):
        before, after = _event(external=False), _event(external=False)
        before.record()
        arm.run()
        after.record()
        torch.cuda.synchronize()
        parts.append(_between(arm.events))
        wholes.append(before.elapsed_time(after))
    return [statistics.median(part) for part in zip(*parts, strict=True)], statistics.median(wholes)


def late_readings(arm: Replayed, known_ms: list[float]) -> dict[str, float]:
    """Return which share of the readings is wrong that are made with the next replay launched."""
    wrong = refused = 0
    for _ in range(READINGS):
        torch.cuda.synchronize()
        arm.run()
        # What the reading waits for is the first replay, as a host does that looks some time later.
        done = _event(external=False)
        done.record()
        arm.run()
        done.synchronize()
        found = _tried(lambda: _between(arm.events))
        if found is None or min(found) < 0:
            refused += 1
        elif any(abs(a - b) > 0.1 * b for a, b in zip(found, known_ms, strict=True)):
            wrong += 1
    torch.cuda.synchronize()
    return {"wrong": wrong / READINGS, "refused": refused / READINGS}


def _tried(read: Callable[[], list[float]]) -> list[float] | None:
    try:
        return read()
    except RuntimeError:  # an event of the two has not been passed
        return None


def measured(name: str, args: Any) -> list[dict[str, Any]]:
    """Return a row for each graph of a workload."""
    arms = {
        "plain": Replayed(name, args.size, events=False),
        "events": Replayed(name, args.size, events=True),
        "again": Replayed(name, args.size, events=False),
    }
    steps = steps_of_a_turn(arms["plain"], args.block_s, fewest=4, most=5000)
    take_turns(list(arms.values()), args.rounds, steps)
    rows = []
    for arm_name, arm in arms.items():
        row: dict[str, Any] = {
            "workload": name,
            "arm": arm_name,
            "ms": statistics.median(arm.times_ms),
            "turns_ms": arm.times_ms,
        }
        if arm_name != "plain":
            pairs = zip(arm.times_ms, arms["plain"].times_ms, strict=True)
            row["cost"], row["cost_quartiles"] = median_and_quartiles([a / b - 1 for a, b in pairs])
        if arm.events:
            parts_ms, whole_ms = parts_and_whole(arm)
            row |= {
                "parts_ms": dict(zip(PARTS, parts_ms, strict=True)),
                "whole_ms": whole_ms,
                "eager_ms": dict(zip(PARTS, arm.eager_ms, strict=True)),
                "late": late_readings(arm, parts_ms),
            }
        rows.append(row)
    return rows


def main() -> None:
    """Measure, print and write the figures."""
    parser = parser_of(__doc__, rounds=21)
    parser.add_argument("--size", choices=["full", "smoke"], default="full")
    parser.add_argument("--block-s", type=float, default=0.1, help="seconds of a turn")
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS))
    args = parser.parse_args()
    check_has_graphs(parser, args)
    rows = []
    for name in args.workloads:
        for row in measured(name, args):
            rows.append(row)
            cost = f"{row['cost']:+.2%} {row['cost_quartiles']}" if "cost" in row else ""
            print(f"{name:<10} {row['arm']:<7} {row['ms']:9.4f} ms  {cost}", flush=True)
            if "parts_ms" in row:
                print(f"  parts {row['parts_ms']} sum {sum(row['parts_ms'].values()):.4f}")
                print(f"  whole {row['whole_ms']:.4f}; eager {row['eager_ms']}")
                print(f"  late readings: {row['late']}", flush=True)
        write_rows(args, rows)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
