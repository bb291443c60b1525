"""What a step is given: checked, and looked at by whatever needs a batch before a step can run.

Some of what a plan does is decided on real batches: how to compile, what in float8 is faster, how
ranks exchange gradients. All of that happens here, before the step, and leaves the training as it
is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from torchfast import compiler
from torchfast._core.batches import as_group, as_steps
from torchfast._core.untouched import TrialRun, untouched
from torchfast.gradients import Gradients
from torchfast.memory.splitting import parts_of
from torchfast.step_memory import StepMemory
from torchfast.transforms import ModelTransforms

if TYPE_CHECKING:
    from torchfast.graphs import GraphedUpdate


@final
class StepInputs:
    """Makes micro-batches of what a step is given, after a look at them.

    Args:
        gradients: The first half of a step.
        transforms: What was done to the model.
        memory: Runs what may run out of it.
        graph: What a step runs through; None if nothing is captured.
        accumulate: Most micro-batches in a step.
    """

    def __init__(
        self,
        gradients: Gradients,
        transforms: ModelTransforms,
        memory: StepMemory,
        graph: GraphedUpdate | None,
        accumulate: int,
    ) -> None:
        self._gradients, self._transforms, self._memory = gradients, transforms, memory
        self._compiled, self._sharding = gradients.compiled, gradients.sharding
        self._graph, self._accumulate = graph, accumulate
        # Whether anything looks at what each step is given: on one rank, by most plans, nothing.
        self._is_looked_at = transforms.looks_at_batches or self._sharding.is_on

    def of_step(self, batch: Any, number: int) -> tuple[Any, ...]:
        """Return the micro-batches of the step of this number; the first is 1."""
        group = as_group(batch, self._accumulate)
        if self._is_looked_at or self._compiled.is_undecided:
            with compiler.measuring():
                self._look_before(batch, group, number)
        return group

    def _look_before(self, batch: Any, group: tuple[Any, ...], number: int) -> None:
        self._sharding.check_same_parts()
        if self._accumulate > 1:
            self._sharding.check_counts(len(group), are_even=batch.are_even)
        if self._transforms.looks_at_batches or self._compiled.is_undecided:
            self._memory.run(lambda parts: self._look(parts, number), group, is_step=False)
        if self._sharding.is_undecided:
            work = TrialRun(lambda: self._gradients(group), self._compiled.loss_fn)
            with untouched(self._gradients.model, self._gradients.device, work):
                self._sharding.decide(work)

    def of_steps(self, batches: Any) -> tuple[tuple[Any, ...], ...]:
        """Return the micro-batches of each of several steps; nothing looks at them yet."""
        return as_steps(batches, self._accumulate)

    def _look(self, group: tuple[Any, ...], number: int) -> None:
        """Measure and compare before a step; in parts, if it is to run in parts."""
        first, model = parts_of(group[0])[0], self._gradients.model
        loss_fn = self._compiled.loss_fn
        forward = TrialRun(lambda: self._gradients.compute_loss(first, model).loss, loss_fn)
        self._transforms.before_step(number, forward)
        if self._compiled.is_undecided:
            self._compiled.decide(self._gradients, group, self._graph)
        self._transforms.check_step(TrialRun(lambda: self._gradients(group), loss_fn))
