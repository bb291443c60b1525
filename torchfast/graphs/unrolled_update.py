"""Several whole steps, one after the other, in one graph.

A replay costs the host its Python once, however many kernels there are in the graph. So where a
step takes the device about as long as the host needs to launch it, a graph of several steps lets
the device set the pace. They are a kind of call of the engine that captures the single step: in its
memory pool, watched, checked and dropped with it.

Between the steps of a replay no Python runs. What the host does there is done ahead: the learning
rate of each step stands in a tensor of its own, and a schedule is stepped through all of them
before the replay. One that changes more than learning rates is set back, and its steps run singly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchfast._core.loss import Number, SeveralOutput, StepOutput
from torchfast.graphs.engine import GraphEngine
from torchfast.graphs.entries import ONE_FIRST, Aside, Ready
from torchfast.graphs.learning_rates import LearningRates
from torchfast.graphs.signature import Several
from torchfast.graphs.watch import NOT_FROZEN


@final
class UnrolledUpdate:
    """Several steps of a graph that has the update in it.

    Args:
        engine: Captures the single step.
        rates: The learning rates that it reads.
        step: Runs it.

    Numerics: Bitwise the steps one by one.
    Synchronizes: At captures.
    """

    def __init__(
        self,
        engine: GraphEngine,
        rates: LearningRates,
        step: Callable[[tuple[Any, ...]], StepOutput],
    ) -> None:
        self._engine, self._rates, self._step = engine, rates, step
        self._rates_of: list[LearningRates] = []  # each step

    def __call__(self, groups: Several) -> SeveralOutput:
        """Run the steps, as the engine captures them."""
        outputs = []
        for rates, group in zip(self._rates_of, groups, strict=False):
            with rates.standing_in_for(self._rates):
                outputs.append(self._step(group))
            self._engine.settle()  # as at the end of a step
        return SeveralOutput.of(outputs)

    @property
    def why_not_yet(self) -> str | None:
        """Why no steps at all can be replayed together now; None if some may be."""
        if self._engine.why_eager is not None:
            return self._engine.why_eager
        return None if self._engine.store.graphs else ONE_FIRST

    def changed(self) -> str | None:
        """Return what of modules has changed behind the last replay; see `GraphEngine.changed`."""
        return self._engine.changed()

    def rates(self, num_steps: int) -> list[list[Number]]:
        """Return the learning rates of each step of the last replay, of so many; safe to keep."""
        return [rates.filled() for rates in self._rates_of[:num_steps]]

    def prepared(self, groups: tuple[tuple[Any, ...], ...]) -> Ready | Aside:
        """Return what replays the steps of these micro-batches; see `GraphEngine.prepared`."""
        while len(self._rates_of) < len(groups):
            self._rates_of.append(self._rates.another())
        if not self._rates_of[0].cover_groups:  # a capture must find a tensor for each
            for rates in self._rates_of:
                rates.fill()
        return self._engine.prepared(Several(groups))

    def replay(
        self, ready: Ready, optimizer: Optimizer, scheduler: LRScheduler | None
    ) -> SeveralOutput | None:
        """Replay the steps.

        Args:
            ready: What `prepared` returned.
            optimizer: Whose update is in them.
            scheduler: Stepped after each of them; None if none is.

        Returns:
            What they leave; None, with nothing changed, where the schedule does what no replay
            can follow.
        """
        rates_of = self._rates_of[: ready.entry.num_steps]
        if scheduler is None:
            for rates in rates_of:
                rates.fill()
            return self._replayed(ready)
        schedule = _Schedule(scheduler, optimizer)
        try:
            if schedule.steps_ahead(rates_of):
                return self._replayed(ready)
        except BaseException:
            schedule.put_back()
            raise
        schedule.put_back()
        return None

    def _replayed(self, ready: Ready) -> SeveralOutput:
        output: SeveralOutput = self._engine.replay(ready)
        return output


@final
class _Schedule:
    """A scheduler and what it steers, as they are before it is stepped ahead."""

    def __init__(self, scheduler: LRScheduler, optimizer: Optimizer) -> None:
        self._scheduler = scheduler
        self._state = scheduler.state_dict()
        self._groups = [(group, dict(group)) for group in optimizer.param_groups]

    def steps_ahead(self, rates_of: list[LearningRates]) -> bool:
        """Fill in the rates of each step; return whether there is no more to the schedule."""
        for rates in rates_of:
            if self._has_changed_more():
                return False
            rates.fill()
            try:
                self._scheduler.step()
            except Exception:  # at its end, say: it will raise where it comes there step by step
                return False
        return True  # what the last has changed, the engine notices

    def _has_changed_more(self) -> bool:
        """Whether anything in the groups has changed but what a graph reads anew."""
        return any(
            group.keys() != before.keys()
            or any(
                _differs(value, before[key])
                for key, value in group.items()
                if key not in NOT_FROZEN
            )
            for group, before in self._groups
        )

    def put_back(self) -> None:
        self._scheduler.load_state_dict(self._state)
        for group, before in self._groups:
            group.clear()
            group.update(before)


def _differs(new: Any, old: Any) -> bool:
    # The comparison of a tensor would make the host wait.
    return new is not old and (isinstance(new, Tensor) or bool(new != old))
