"""Several steps in one replay: `UnrolledSteps` knows when that is the same as one after the other.

It helps where a step is bound by the host: a graph of several steps is launched once. It does not
where the device has more to do in a step than the host. What it costs is the memory of the batches:
a graph of n steps reads n of them, and a loader holds as many more for each that it is ahead.

Whatever a graph of several steps cannot do as single steps would, they do: one after the other,
with the same numbers. So it is with all that the host does between two steps, but for the stepping
of a schedule, which is done ahead.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING, Any, final

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchfast import graphs
from torchfast._core.decisions import Decision, Outcome
from torchfast._core.loss import Number, SeveralOutput
from torchfast.compiled_loss import CompiledLoss
from torchfast.ema import WeightAverage
from torchfast.plan import Plan
from torchfast.step_memory import StepMemory

if TYPE_CHECKING:
    from torchfast.graphs import GraphedUpdate

logger = logging.getLogger(__name__)

Groups = tuple[Any, ...]  # the micro-batches of each step
NO_GRAPH = "there is no graph of a step, see cuda_graph"
NO_UPDATE = "the update is not in the graph, see cuda_graph"
CHANGES_MORE = "the schedule changed more than the learning rates, or ended"


@final
class UnrolledSteps:
    """Runs several steps in one replay, where one graph can hold them.

    Args:
        plan: What is done in a step.
        optimizer: Whose update is in it.
        scheduler: What the step steps after each update; None if nothing.
        average: Of the weights.
        compiled: The loss function.
        memory: Takes an account where it runs out.
        graph: What a step runs through; None if nothing is captured.

    Numerics: Bitwise the steps one by one.
    Synchronizes: At captures.
    """

    def __init__(
        self,
        plan: Plan,
        optimizer: Optimizer,
        scheduler: Any,
        *,
        average: WeightAverage,
        compiled: CompiledLoss,
        memory: StepMemory,
        graph: GraphedUpdate | None,
    ) -> None:
        self._optimizer, self._scheduler = optimizer, scheduler
        self._average, self._compiled, self._memory = average, compiled, memory
        self._graph = graph
        self._why_never = _why_never(plan, scheduler)
        self._most = 2  # steps in a group so far
        self._num_unrolled, self._num_replays = 0, 0
        self._num_single: Counter[str] = Counter()  # by why
        self._has_warned = False

    def __call__(self, groups: Groups) -> SeveralOutput | None:
        """Run steps in one replay; return None, with nothing done, if they are to run one by one.

        Args:
            groups: The micro-batches of each.
        """
        why = self._obstacle(groups)
        output: SeveralOutput | None = None
        if why is None:
            with self._average.around_step():
                output, why = self._memory.run(self._attempt, groups)
        if output is None:
            assert why is not None
            self.ran_alone(why, len(groups))
            return None
        self._num_replays += 1
        self._num_unrolled += len(groups)
        return output

    @property
    def why_never(self) -> str | None:
        """Why no steps of this trainer will ever be replayed together; None if some may be."""
        if self._graph is None or self._graph.is_passed_by:
            return NO_GRAPH
        if self._why_never is not None:
            return self._why_never
        return None if self._graph.unrolled is not None else NO_UPDATE

    @property
    def why_not_yet(self) -> str | None:
        """Why the next step runs alone whatever comes behind it; None if it need not."""
        if (why := self.why_never) is not None:
            return why
        assert self._graph is not None
        assert self._graph.unrolled is not None
        return self._passing() or self._graph.unrolled.why_not_yet

    def rates(self, num_steps: int) -> list[list[Number]]:
        """Return the learning rates of each step of the last replay, of so many; safe to keep."""
        assert self._graph is not None
        assert self._graph.unrolled is not None
        return self._graph.unrolled.rates(num_steps)

    def changed(self) -> str | None:
        """Return what of modules has changed behind the last replay; see `GraphEngine.changed`."""
        assert self._graph is not None
        unrolled = self._graph.unrolled
        return None if unrolled is None else unrolled.changed()

    def ran_alone(self, why: str, number: int = 1) -> None:
        """Note steps that ran one by one, where several at once were asked for.

        Args:
            why: What kept them apart.
            number: How many.
        """
        self._num_single[why] += number
        if why == self.why_never and self._graph is not None and not self._has_warned:
            self._has_warned = True
            logger.warning("unroll: steps that are given together run one by one: %s", why)

    def decisions(self) -> list[Decision]:
        """Return how steps that were given together have run; nothing where none were."""
        why_never = self.why_never
        if why_never is not None and self._num_single:
            outcome: Outcome = "left alone" if self._graph is None else "stepped aside"
            detail = f"steps that are given together run one by one: {why_never}"
            return [Decision(lever="unroll", outcome=outcome, detail=detail)]
        parts = [f"{self._num_unrolled} steps in {self._num_replays} replays of several"]
        parts += [f"{num} one by one ({why})" for why, num in self._num_single.items()]
        if not (self._num_unrolled or self._num_single):
            return []
        return [Decision(lever="unroll", outcome="applied", detail="; ".join(parts))]

    def counters(self) -> dict[str, int]:
        """Return how many steps were done in replays of several; empty where none were given."""
        if not (self._num_unrolled or self._num_single):
            return {}
        return {"unrolled replays": self._num_replays, "unrolled steps": self._num_unrolled}

    def _attempt(self, groups: Groups) -> tuple[SeveralOutput | None, str | None]:
        """Replay; return what came of it, or why it did not come to that."""
        assert self._graph is not None
        unrolled = self._graph.unrolled
        assert unrolled is not None
        ready = unrolled.prepared(groups)
        if not isinstance(ready, graphs.Ready):
            return None, ready.why
        output = unrolled.replay(ready, self._optimizer, self._scheduler)
        return output, CHANGES_MORE if output is None else None

    def _obstacle(self, groups: Groups) -> str | None:
        """Return why these steps run one by one; None if they need not."""
        if (why := self.why_never) is not None:
            return why
        if len(groups) < self._most:
            # A short last group would take a capture and memory to save next to nothing.
            return "groups of fewer steps than others, or of one"
        self._most = len(groups)
        return self._passing()

    def _passing(self) -> str | None:
        """Return what keeps the next steps apart for now, whatever their batches are."""
        if self._compiled.is_undecided:
            return "it was not yet decided how to compile"
        if self._average.is_new:
            return "the first update of an average"
        groups_of = self._optimizer.param_groups
        if self._scheduler is not None and any(isinstance(g["lr"], Tensor) for g in groups_of):
            return "a schedule writes to a learning rate on the device"
        return None


def _why_never(plan: Plan, scheduler: Any) -> str | None:
    """Return what of a plan or a schedule needs the host between two steps."""
    if plan.shard_options is not None:
        return "ranks agree before each step on how it runs"
    if plan.float8_options is not None:
        return "float8 looks at batches between steps"
    if plan.offload_options is not None:
        return "what is offloaded goes to the host and comes back step by step"
    if plan.out_of_memory_options.action == "split":
        return "out_of_memory='split' does single steps again"
    if plan.compiles_update:
        return "the update is compiled for the learning rate of one step"
    if plan.graph_options is not None and plan.graph_options.time_phases:
        return "time_phases tells of single steps"
    if scheduler is not None and not isinstance(scheduler, LRScheduler):
        return (
            f"{type(scheduler).__name__} is not an LRScheduler of torch, and may read what a step "
            "has done"
        )
    return None
