"""How fit runs its steps: one by one, or several in a replay where nothing has to go on in between.

Between two steps a loop evaluates, saves, logs, calls callbacks and looks whether to end. An
evaluation and a checkpoint need the model as a step left it, so no group of steps reaches beyond
one behind which they are due. The rest is told of each step when its group is done, with what that
step has left; a signal or a callback ends the run there.

A callback that changes the model between two steps, or a learning rate, would come too late where
both are in one replay. So these are looked at before and after it: behind one that has changed
something, steps run one by one until it has let all be for as many steps as a group has. What takes
longer to compare, such as attributes of modules, is looked at once a group.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any, NamedTuple, final

from torch import Tensor

from torchfast._core.loss import Number, SeveralOutput
from torchfast._core.reading import StepClock
from torchfast.data import PrefetchingLoader
from torchfast.graphs import rates_of
from torchfast.profiling import StepTimer
from torchfast.step import TrainStep

logger = logging.getLogger(__name__)

_NO_ROOM = "an evaluation, a checkpoint or the end was due before a group would have been done"
_JUST_CHANGED = "a callback had just changed the model or its optimizer"
_CHANGES = "a callback changes the model or its optimizer between steps"
_TRAINING, _REQUIRES_GRAD = attrgetter("training"), attrgetter("requires_grad")
_VERSION = attrgetter("_version")


class Seen(NamedTuple):
    """What a callback may change.

    Attributes:
        settings: Of the optimizer.
        modes: Whether each module trains.
        trained: Whether each parameter needs gradients.
        versions: How often each parameter and buffer was written to.
    """

    settings: list[object]
    modes: list[bool]
    trained: list[bool]
    versions: list[int]

    def unlike(self, other: Seen) -> str | None:
        """Return what differs, in words; None if nothing does."""
        if self == other:
            return None
        if self.settings != other.settings:
            return "a learning rate or another setting of the optimizer"
        if self.modes != other.modes:
            return "a mode"
        return "a parameter or a buffer"


@final
class DoneStep:
    """What is told of a step; it holds no batch.

    Attributes:
        loss: On the device.
        rates: The learning rates that it had, by parameter group.
        num_behind: Steps that are done behind it already.
    """

    __slots__ = ("_metrics", "_output", "loss", "num_behind", "rates")

    def __init__(
        self,
        loss: Tensor,
        rates: list[Number],
        *,
        metrics: Mapping[str, Number] | None = None,
        output: SeveralOutput | None = None,
        num_behind: int = 0,
    ) -> None:
        self.loss, self.rates, self.num_behind = loss, rates, num_behind
        self._metrics, self._output = metrics, output

    @property
    def metrics(self) -> Mapping[str, Number]:
        """What it has measured, on the device."""
        if self._metrics is None:
            assert self._output is not None
            self._metrics = self._output.metrics_of(-1 - self.num_behind)
        return self._metrics

    @property
    def num_skipped_behind(self) -> Tensor | int:
        """How many of the steps behind it have skipped their update."""
        if not self.num_behind or self._output is None or self._output.skipped is None:
            return 0
        return self._output.skipped[-self.num_behind :].sum()


@final
class FitSteps:
    """Runs the steps of a call of ``fit``.

    Args:
        step: Runs one.
        loader: Hands out what it takes.
        timer: Told when a step ends.
        clock: Likewise.
        unroll: Most steps in a replay; None where several were not asked for.
        cuts: Something needs the model at multiples of these numbers of steps of the call.
        last: The last step of the call, if that is known.
        is_heard: Whether callbacks hear of steps.
    """

    def __init__(
        self,
        step: TrainStep,
        loader: PrefetchingLoader,
        timer: StepTimer,
        clock: StepClock,
        *,
        unroll: int | None,
        cuts: tuple[int, ...],
        last: int | None,
        is_heard: bool,
    ) -> None:
        self._step, self._loader = step, loader
        self._timer, self._clock = timer, clock
        # No group would ever have room between two cuts that are closer than it is long.
        shortest, *_ = sorted((unroll or 1, *cuts))
        self._unroll = shortest if shortest > 1 else unroll or 1
        self._cuts, self._last = cuts, math.inf if last is None else last
        # Whether to look at what callbacks change: some steps may be done before they are heard of.
        self._is_watching = is_heard and self._unroll > 1 and step.unrolled.why_never is None
        self._before: Seen | None = None  # callbacks hear of a step
        # With what the loss function uses beside the model, such as a teacher that follows it.
        self._modules = [*step.model.modules(), *step.state.beside.modules()]
        self._parameters = [p for m in self._modules for p in m.parameters(recurse=False)]
        buffers = [b for m in self._modules for b in m.buffers(recurse=False)]
        every = [*self._parameters, *buffers, *step.state.beside.tensors()]
        self._tensors = [t for t in every if not t.is_inference()]  # which have no versions
        self._num_quiet = self._unroll  # steps since a callback has changed something
        self._came_too_late = False
        # For the step that comes; for all of them where the loader was not even asked for groups.
        is_ungrouped = self._unroll > 1 and loader.unroll is None
        self._why_alone = step.unrolled.why_never if is_ungrouped else None

    def at_once(self, num_done: int) -> int:
        """Return how many steps come next at most, when so many of the call are done."""
        self._why_alone = self._obstacle(num_done) if self._unroll > 1 else None
        return self._unroll if self._why_alone is None else 1

    def _obstacle(self, num_done: int) -> str | None:
        if (why := self._step.unrolled.why_not_yet) is not None:
            return why
        if self._came_too_late:
            return _CHANGES
        if self._num_quiet < self._unroll:
            return _JUST_CHANGED
        room = min(self._last - num_done, *(cut - num_done % cut for cut in self._cuts), math.inf)
        return _NO_ROOM if room < self._unroll else None

    def run(self, taken: Any) -> Iterator[tuple[DoneStep, Any]]:
        """Run what the loader has handed out, and yield its steps with what each took.

        All of them are done before one whose ``num_behind`` is not 0 is yielded.
        """
        if self._why_alone is not None:
            self._step.unrolled.ran_alone(self._why_alone)
        elif self._unroll > 1 and (output := self._step.together(taken)) is not None:
            number = len(taken)
            self._timer.end_step(num_steps=number)
            self._clock.tick(number)
            rates_of_each = self._step.unrolled.rates(number)
            told = zip(output.losses.unbind(), rates_of_each, taken, strict=True)
            for loss, rates, batch in told:
                number -= 1
                yield DoneStep(loss, rates, output=output, num_behind=number), batch
            return
        is_group = self._loader.unroll is not None
        for place, batch in enumerate(taken if is_group else (taken,)):
            if place:
                self._timer.begin_step()
            if is_group:
                self._loader.go_to(place)  # before it may raise, as where one step is handed out
            rates = rates_of(self._step.optimizer)  # a scheduler changes them
            loss = self._step(batch)
            self._timer.end_step()
            self._clock.tick()
            yield DoneStep(loss, rates, metrics=self._step.metrics), batch

    def seen(self) -> Seen:
        """Return what a callback may change, to be compared without a look at the device."""
        return Seen(
            [
                (id(value), value._version) if isinstance(value, Tensor) else value
                for group in self._step.optimizer.param_groups
                for name, value in group.items()
                if name != "params"
            ],
            [*map(_TRAINING, self._modules)],
            [*map(_REQUIRES_GRAD, self._parameters)],
            [*map(_VERSION, self._tensors)],
        )

    def is_told(self) -> None:
        """Note what there is before callbacks hear of a step."""
        if self._is_watching and self._before is None:
            self._before = self.seen()

    def was_heard(self, done: DoneStep) -> None:
        """Note what callbacks have changed that have heard of a step."""
        if (before := self._before) is None:
            return
        now = self.seen()
        # Between the steps of a replay that is done nothing changes but by callbacks.
        self._before = now if done.num_behind else None
        what = now.unlike(before)
        is_sure = what is not None
        if what is None and done.num_behind == 1:  # all else takes longer to see: once a group
            changed = self._step.unrolled.changed()
            what = None if changed is None else f"what a step may read ({changed})"
        if what is None:
            self._num_quiet += 1
            return
        self._num_quiet = 0
        if done.num_behind and not self._came_too_late:
            self._came_too_late = True
            number = self._step.num_steps
            logger.warning(
                "unroll: a callback changed %s behind step %d%s, when the steps up to %d were done "
                "in the same replay, so it holds from step %d on; steps run one by one from now "
                "on. Leave it to fit, such as a schedule by Trainer(lr_scheduler=...), or leave "
                "unroll out",
                what,
                number - done.num_behind,
                "" if is_sure else " or before",
                number,
                number + 1,
            )
