"""The second half of a step: judge the gradients, clip them, update, move the average on.

And both halves together, as a graph can hold them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchfast._core.loss import Number, StepOutput, with_norm
from torchfast._core.phases import UPDATE, phase
from torchfast.compile_trial import CompileTrial
from torchfast.compiled_loss import CompiledLoss
from torchfast.compiled_update import CompiledUpdate
from torchfast.compiler import CompileOptions
from torchfast.ema import WeightAverage
from torchfast.parallel import Sharding
from torchfast.precision import PrecisionPolicy, UpdateGuard
from torchfast.step_guards import StepSyncs

if TYPE_CHECKING:
    from torchfast.graphs import GraphedUpdate

FirstHalf = Callable[[tuple[Any, ...]], tuple[Tensor, dict[str, Number]]]


@final
class Update:
    """Applies the gradients that are there.

    Args:
        optimizer: Whose update it is.
        compile_options: Whether it is compiled, and how.
        guard: Whether to update at all.
        precision: Matmul precision, and what an update leaves stale.
        average: Moved on by each update.
        syncs: What finds lines that wait.
        max_grad_norm: The limit of clipping, or None.
        sharding: Whose model's gradients are clipped.
        gradients: The first half: makes those of a group, and returns its loss and metrics.

    Attributes:
        decisions: Whether the update is compiled; see `CompiledUpdate`, also for the next two.
        counters: How often it was.
        close: Frees what was compiled.
        graph: What a step runs through, whose learning rates an update outside of it reads too.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        compile_options: CompileOptions | None,
        *,
        guard: UpdateGuard,
        precision: PrecisionPolicy,
        average: WeightAverage,
        syncs: StepSyncs,
        max_grad_norm: float | None,
        sharding: Sharding,
        gradients: FirstHalf,
    ) -> None:
        self._gradients = gradients
        self._compiled = CompiledUpdate(optimizer, compile_options)
        self._guard, self._sharding = guard, sharding
        self._precision, self._average, self._syncs = precision, average, syncs
        self._max_grad_norm = max_grad_norm
        self.graph: GraphedUpdate | None = None
        self._trial: CompileTrial | None = None  # until it is over
        self.decisions, self.counters = self._compiled.decisions, self._compiled.counters
        self.close = self._compiled.close

    def __call__(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradient norm and whether the update was skipped, where there are such."""
        self._decide()
        with phase(UPDATE), self._precision.step(), self._syncs:
            self._guard.judge()
            norm = self.clip()
            if self.graph is not None:
                self.graph.update_begins()
            with self._rates(), self._sharding.mixed():
                skipped = self._guard.update(norm, self._compiled)
        self._precision.after_update()
        self._average.update(skipped)
        return norm, skipped

    def clip(self) -> Tensor | None:
        """Clip the gradients of the model's parameters, in their order, and return their norm."""
        limit = self._max_grad_norm
        return None if limit is None else self._sharding.clip(limit)

    def whole(self, group: tuple[Any, ...]) -> StepOutput:
        """Run a step on the device: what a graph can hold, and nothing else."""
        loss, metrics = self._gradients(group)
        norm, skipped = self()
        return StepOutput(loss, with_norm(metrics, norm), skipped)

    def until_update(self, group: tuple[Any, ...]) -> StepOutput:
        """Run a step on the device but for the update itself."""
        loss, metrics = self._gradients(group)
        with phase(UPDATE):
            norm = self.clip()
        return StepOutput(loss, with_norm(metrics, norm), None)

    def run_through(
        self, graph: GraphedUpdate | None, compiled: CompiledLoss, device: torch.device
    ) -> None:
        """Run steps through a graph, if there is one, and see whether what is compiled pays."""
        self.graph = graph
        if not self._sharding.ranks.are_many:  # or all would have to choose alike
            trial = CompileTrial(compiled, graph, device)
            self._trial = None if trial.is_over else trial

    def step(self, group: tuple[Any, ...]) -> StepOutput:
        """Run a step as it is, or through its graph, and behind it what that does not hold."""
        if self._trial is not None:
            return self._on_trial(self._trial, group)
        if self.graph is None:
            return self.whole(group)
        # What is shared asks on the host, where a replay has none.
        if self._sharding.shared.is_on or self.graph.is_passed_by:
            result = self.whole(group)
            self.graph.settle()
            return result
        is_whole = self.graph.is_whole
        output: StepOutput = self.graph.run(group)
        if not is_whole:
            self.behind_graph()
        return output

    def _on_trial(self, trial: CompileTrial, group: tuple[Any, ...]) -> StepOutput:
        self._trial = None
        try:
            with trial:
                return self.step(group)
        finally:
            self._trial = None if trial.is_over else trial

    def behind_graph(self) -> None:
        """Run the update alone, behind a graph that ends with clipped gradients."""
        self._decide()
        with phase(UPDATE), self._precision.step(), self._syncs, self._sharding.mixed():
            self._compiled()
        self._precision.after_update()
        self._average.update(None)  # what can be skipped is not parted from the graph

    def _decide(self) -> None:
        """Let it be measured how to update, before what looks for waits is on."""
        if self._compiled.is_undecided or self._compiled.is_of_graph:
            in_graph = None if self.graph is None else self.graph.update_alone()
            with self._precision.step(), self._rates():
                self._compiled.decide(in_graph)

    def _rates(self) -> AbstractContextManager[None]:
        return nullcontext() if self.graph is None else self.graph.rates_on_device()
