"""Ways to train that take turns, since no more than two of their models fit at a time."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils._pytree import tree_leaves

from benchmarks.arms import median_and_quartiles
from benchmarks.workloads.definition import Batch, Workload
from torchfast import Plan, Trainer
from torchfast._core.storages import plain_parts

MAX_GRAD_NORM = 1.0
WARM_UP_STEPS = 12


class Method:
    """A way to train, with a model of its own."""

    def __init__(
        self,
        name: str,
        work: Workload,
        build: Callable[[nn.Module], Any],
        batches: Iterator[Batch],
    ) -> None:
        self.name, self.times_ms = name, list[float]()
        torch.manual_seed(0)
        self.losses: list[Tensor] = []
        free()
        before = allocated()
        self.runner = build(work.build())
        self.turn(batches, 2 * WARM_UP_STEPS)  # compiles, measures and captures
        self.times_ms.clear()
        free()
        self.held_bytes = allocated() - before

    def turn(self, batches: Iterator[Batch], steps: int) -> None:
        """Time some steps."""
        drawn = [next(batches) for _ in range(steps)]
        synchronize()
        started = time.perf_counter()
        for batch in drawn:
            loss = self.runner.step(batch)
        synchronize()
        self.times_ms.append((time.perf_counter() - started) / steps * 1e3)
        self.losses.append(loss)

    def row(self, group: str, items: int, reference: Method) -> dict[str, Any]:
        """Return the figures, beside those of the first method, round by round."""
        ms = statistics.median(self.times_ms)
        pairs = zip(self.times_ms, reference.times_ms, strict=True)
        ratio, quartiles = median_and_quartiles([own / other for own, other in pairs])
        return {
            "reference": reference.name,
            "ratio": ratio,
            "ratio_quartiles": quartiles,
            "group": group,
            "method": self.name,
            "ms": ms,
            "items_per_s": items / ms * 1e3,
            "held_bytes": self.held_bytes,
            "turns_ms": self.times_ms,
            "losses": [float(loss) for loss in self.losses],
            **self.runner.notes(),
        }


class Ours:
    """A trainer with a plan, as a user writes it."""

    def __init__(self, work: Workload, args: argparse.Namespace, plan: Plan, loss_fn: Any) -> None:
        self._work, self._args, self._plan, self._loss_fn = work, args, plan, loss_fn
        self.trainer: Trainer | None = None

    def __call__(self, model: nn.Module) -> Ours:
        """Begin to train a model."""
        self.trainer = Trainer(
            model.to(self._args.device),
            partial(torch.optim.AdamW, lr=self._work.lr),
            self._loss_fn,
            self._plan,
            max_grad_norm=MAX_GRAD_NORM,
        )
        return self

    def step(self, batch: Batch) -> Tensor:
        """Train on a batch."""
        assert self.trainer is not None
        return self.trainer.step(batch)

    def close(self) -> None:
        """Let go of the model."""
        assert self.trainer is not None
        self.trainer.close()
        self.trainer = None

    def notes(self) -> dict[str, Any]:
        """Return what the report says, and what the optimizer's state takes."""
        assert self.trainer is not None
        return {
            "state_bytes": state_bytes(self.trainer.optimizer),
            "report": self.trainer.report().to_dict(),
        }


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return what the state of an optimizer takes, of few bits or many."""
    tensors = tree_leaves(list(optimizer.state.values()))
    parts = (part for t in tensors if isinstance(t, Tensor) for part in plain_parts(t))
    memory = (part.untyped_storage() for part in parts)
    return sum({held.data_ptr(): held.nbytes() for held in memory}.values())


class ByHand:
    """The same in float8 as a person writes it, around torchao."""

    def __init__(self, work: Workload, args: argparse.Namespace) -> None:
        self._work, self._device = work, torch.device(args.device)

    def __call__(self, model: nn.Module) -> ByHand:
        """Begin to train a model."""
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        on_gpu = self._device.type == "cuda"
        config = Float8LinearConfig.from_recipe_name("tensorwise")
        self.model: Any = convert_to_float8_training(
            model.to(self._device),
            config=config if on_gpu else dataclasses.replace(config, emulate=True),
            module_filter_fn=lambda module, name: (
                "blocks" in name and isinstance(module, nn.Linear)
            ),
        )
        if on_gpu:
            for block in self._work.regions(self.model):
                block.compile(dynamic=False)
        self.optimizer: Any = torch.optim.AdamW(
            self.model.parameters(), lr=self._work.lr, fused=True, capturable=on_gpu
        )
        self._graph: Any = None
        self._inputs: Any = None
        self._loss: Any = None
        self._num_steps = 0
        return self

    def step(self, batch: Batch) -> Tensor:
        """Train on a batch: through the graph, once it is there."""
        if self._device.type != "cuda":
            return self._run(batch)
        if self._num_steps == 0:
            self._inputs = tuple(tensor.clone() for tensor in batch)
            self._stream = torch.cuda.Stream()
        self._num_steps += 1
        for target, source in zip(self._inputs, batch, strict=True):
            target.copy_(source)
        if self._graph is None and self._num_steps > WARM_UP_STEPS:
            self.optimizer.zero_grad(set_to_none=True)
            # The graph gets workspaces in its own pool: whoever captures later frees the others.
            torch._C._cuda_clearCublasWorkspaces()
            self._graph = torch.cuda.CUDAGraph()
            with (
                torch.cuda.graph(self._graph, stream=self._stream),
                torch.compiler.set_stance("fail_on_recompile"),
            ):
                self._loss = self._run(self._inputs)
        if self._graph is not None:
            self._graph.replay()
            return self._loss.clone()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            loss = self._run(self._inputs)
        torch.cuda.current_stream().wait_stream(self._stream)
        return loss

    def _run(self, batch: Batch) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self._device.type, dtype=torch.bfloat16):
            loss = self._work.loss_fn(self.model, batch)
        loss.backward()
        clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        self.optimizer.step()
        return loss.detach()

    def close(self) -> None:
        """Let go of the model."""
        self._graph = self.model = self.optimizer = self._inputs = self._loss = None

    def notes(self) -> dict[str, Any]:
        """Return nothing: what is written by hand has no report."""
        return {}


def measured(
    group: str, every: Mapping[str, Any], work: Workload, args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Yield a row for the first method of a group, and for each that is asked for beside it."""
    batches = [tuple(t.to(args.device) for t in batch) for batch in work.batches()]
    source = itertools.cycle(batches)
    (first, build), *others = every.items()
    reference = Method(first, work, build, source)
    try:
        if is_wanted(first, args):
            for _ in range(args.rounds):
                reference.turn(source, args.turn_steps)
            yield reference.row(group, work.items_per_step, reference)
        for name, build in others:
            if not is_wanted(name, args):
                continue
            reference.times_ms.clear()
            method = Method(name, work, build, source)
            try:
                for number in range(args.rounds):
                    # Whoever is first is another one each time.
                    for one in (reference, method)[:: -1 if number % 2 else 1]:
                        one.turn(source, args.turn_steps)
                yield method.row(group, work.items_per_step, reference)
            finally:
                method.runner.close()
                del method
                free()
    finally:
        reference.runner.close()
        torch.compiler.reset()
        free()


def is_wanted(name: str, args: argparse.Namespace) -> bool:
    """Whether a method was asked for."""
    return args.methods is None or name in args.methods


def allocated() -> int:
    """Return the bytes that tensors hold on the device; 0 on a CPU, which does not say."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def synchronize() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def free() -> None:
    """Give back what nothing holds any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
