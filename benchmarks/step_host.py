"""What a replayed step costs the host, part by part.

    PYTHONPATH=. python benchmarks/step_host.py [--size smoke] [--device cpu] [--out FILE]

The perceptron of the yardstick, whose step on a GPU is so short that the host's part of it shows.
Without a GPU a graph that runs nothing stands in, so what is left is Python's time: the look at all
that a graph was captured from, the description of the batch, the batch's way into the graph's own
memory and the copy of what comes out; and beside it a batch of a DataLoader whose samples are in
memory. Parts are timed one at a time, in caches that are warm from themselves alone, so their sum
is less than the step. Steps that are given together, eight in a replay, are told by the step. So is
``fit``, with what it does around each, over batches that are in memory; but not on a GPU, for which
it waits at its end, when it reads what it logs.

All take turns of some calls, between which the device is waited for; a figure is the median of the
turns, beside the least of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.utils.data import DataLoader

from benchmarks.arms import Arm, parser_of, take_turns, write_rows
from benchmarks.job import MAX_GRAD_NORM, ReadyBatches, Sequential
from benchmarks.workloads import Size, workload
from torchfast import CUDAGraphOptions, Plan, StepBatches, Trainer, levers
from torchfast.data.unannotated import unannotated
from torchfast.graphs import engine
from torchfast.graphs.signature import describe

WARM_UP_STEPS = 20
FEW = 4
TOGETHER = 8  # steps
TOGETHER_PART = f"steps of {TOGETHER}, per step"
FIT_PART = "fit, per step"
FIT_TOGETHER_PART = f"fit of {TOGETHER}, per step"
CALLS = 100  # with their copies fewer than what a device lets the host be ahead by
FIT_STEPS = 960  # of a call, which costs something by itself


class Calls(Arm):
    """Something that is called."""

    def __init__(self, name: str, call: Callable[[], object], device: str) -> None:
        super().__init__(device)
        self.name, self.call = name, call
        several = {TOGETHER_PART: TOGETHER}
        several |= dict.fromkeys((FIT_PART, FIT_TOGETHER_PART), FIT_STEPS)
        self.num_steps = several.get(name, 1)

    def turn(self, steps: int) -> None:
        """Time calls for so many steps, and not the wait for what they have enqueued."""
        call = self.call
        # Steps that are given together are all enqueued by one call.
        steps = max(1, steps // self.num_steps)
        self.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            call()
        self.times_ms.append((time.perf_counter() - start) / steps * 1e3)
        self.synchronize()


class NoGraphs:
    """Stands in for a device that captures: a replay runs nothing."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def side_stream(self) -> Any:
        """Return a context that does nothing."""
        return nullcontext()

    def capture(self, body: Callable[[], Any], generators: object) -> Any:
        """Run the body; return a graph of nothing, and what the body returned."""
        del generators
        graph = mock.Mock(spec=["replay", "reset"])
        graph.replay = "".format  # does nothing, in C
        return graph, body()

    def moment(self) -> Any:
        """Nothing is timed."""

    def pool_bytes(self) -> int:
        """Return what the graphs hold."""
        return 0

    def release_scratch(self) -> None:
        """Nothing is held."""


@contextmanager
def trainer_of(size: Size, device: str) -> Iterator[tuple[Trainer, Any]]:
    """Give a trainer whose step is replayed by now, and a batch that is on the device."""
    work = workload("mlp", size)
    with ExitStack() as stack:
        if device == "cpu":
            stack.enter_context(mock.patch.object(engine, "backend_for", NoGraphs))
            stack.enter_context(mock.patch.object(levers, "has_graphs", return_value=True))
        torch.manual_seed(0)
        model = work.build().to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=work.lr, fused=True)
        # A graph of nothing would not pass the check.
        plan = Plan(cuda_graph=CUDAGraphOptions(check=device != "cpu"))
        trainer = Trainer(model, optimizer, work.loss_fn, plan, max_grad_norm=MAX_GRAD_NORM)
        stack.callback(trainer.close)
        # Of a copy on a CPU the samples would be all that shows.
        few = FEW if device == "cpu" else None
        batch = tuple(tensor[:few].to(device) for tensor in work.batches()[0])
        for _ in range(WARM_UP_STEPS):
            trainer.step(batch)
        yield trainer, batch


def several(batch: Any) -> StepBatches[Any]:
    """Return the batches of some steps, each with memory of its own, as a loader hands them out."""
    return StepBatches([tuple(t.clone() for t in batch) for _ in range(TOGETHER)])


def calls_of(trainer: Trainer, batch: Any) -> dict[str, Callable[[], object]]:
    """Return the step and its parts."""
    update = trainer._step._graph
    assert update is not None
    graphs = update._graph
    (entry,) = graphs.store.graphs
    group = several(batch)
    trainer.steps(group)
    assert trainer.report().counters["unrolled replays"] == 1
    glance, inputs, outputs = graphs._watch.glance(), entry.inputs, entry.outputs
    assert glance is not None
    assert inputs is not None
    assert outputs is not None
    assert entry.graph is not None
    call = describe(((batch,),), {})
    fits = {FIT_PART: fitting(trainer, batch, None)}
    fits[FIT_TOGETHER_PART] = fitting(trainer, batch, TOGETHER)
    return {
        "step": partial(trainer.step, batch),
        TOGETHER_PART: partial(trainer.steps, group),
        **({} if trainer.device.type != "cpu" else fits),
        "a glance at the state": glance.is_as_it_was,
        "a closer look": lambda: (
            graphs._watch.moved(),
            graphs._watch.is_frozen_as(graphs._frozen),
            graphs._watch.mode(),
        ),
        "describing the batch": lambda: describe(((batch,),), {}),
        "learning rates": graphs._state.fill_rates,
        "filling the inputs": partial(inputs.fill, call.tensors),
        "launching the graph": entry.graph.replay,
        "cloning the outputs": outputs.cloned,
        "a DataLoader's next()": partial(next, iter(ready(batch))),
        "without its annotation": partial(next, unannotated(iter(ready(batch)))),
    }


def fitting(trainer: Trainer, batch: Any, unroll: int | None) -> Callable[[], object]:
    """Return a call of ``fit`` with one record, whose loader is there already."""
    batches = [*several(batch), *several(batch), *several(batch)]  # more than are in use at a time
    loader = trainer.prefetch(batches * (FIT_STEPS // len(batches)), unroll=unroll, reuse=True)
    return partial(trainer.fit, loader, steps=FIT_STEPS, log_every=FIT_STEPS, progress=False)


def ready(batch: Any) -> DataLoader[Any]:
    """Return a loader of batches that are in memory."""
    return DataLoader(ReadyBatches([batch]), batch_size=None, sampler=Sequential())


def main() -> None:
    """Measure, print a table and write the figures."""
    parser = parser_of(__doc__, rounds=201)
    parser.add_argument("--size", choices=["full", "smoke"], default="full")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with trainer_of(args.size, args.device) as (trainer, batch):
        calls = calls_of(trainer, batch)
        arms = [Calls(name, call, args.device) for name, call in calls.items()]
        take_turns(arms, args.rounds, CALLS)
    rows = [
        {
            "part": arm.name,
            "median_us": statistics.median(arm.times_ms) * 1e3 / arm.num_steps,
            "least_us": min(arm.times_ms) * 1e3 / arm.num_steps,
        }
        for arm in arms
    ]
    print(f"{'':<24} {'median':>8} {'least':>8}  microseconds a call")
    for row in rows:
        print(f"{row['part']:<24} {row['median_us']:>8.2f} {row['least_us']:>8.2f}")
    args.block_s = None
    write_rows(args, rows)


if __name__ == "__main__":
    main()
