"""What goes into a call of fit, and what comes out of it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from types import GeneratorType
from typing import Any, Literal, final, get_args

from torch import Tensor

from torchfast._core.arguments import (
    check_batches,
    check_callable,
    check_choice,
    check_flag,
    check_int,
    check_positive,
)
from torchfast._core.loss import Number
from torchfast._core.step_times import StepTimes
from torchfast.data import PrefetchingLoader
from torchfast.fit_checkpoints import CheckpointOptions
from torchfast.records import Record

ProgressMode = Literal["auto", "terminal", "plain", "off"]
Evaluate = Iterable[Any] | Callable[[Any], Mapping[str, float]]


@final
@dataclass(frozen=True, kw_only=True)
class FitEvent:
    """What a callback is told.

    Attributes:
        kind: ``"step"`` after every step, ``"log"`` when a record is read, ``"evaluate"``,
            ``"epoch"`` at the end of one, ``"end"``. Under ``unroll`` steps are told of when their
            group is done, and the model is then as the last one left it.
        num_steps: Updates done, those before this ``fit`` included.
        epoch: The trainer's count of epochs, from 0, those before this ``fit`` included.
        loss: The step's loss on the device; reading it makes the host wait.
        metrics: The step's metrics on the device, likewise.
        record: What was logged, for ``"log"`` and ``"evaluate"``; host numbers.
        stop: Call it to end the loop after this step, or the group that it was done in.
    """

    kind: Literal["step", "log", "evaluate", "epoch", "end"]
    num_steps: int
    epoch: int
    loss: Tensor | None
    metrics: Mapping[str, Number]
    record: Mapping[str, Any] | None
    stop: Callable[[], None]


Callback = Callable[[FitEvent], None]


@final
@dataclass(frozen=True, kw_only=True)
class FitResult:
    """What ``fit`` did.

    Attributes:
        num_steps: Updates of this call; if it went on from a checkpoint, those of the run that
            saved it too.
        num_epochs: Epochs of this call that were finished, likewise.
        seconds: Wall-clock time.
        stopped_by: ``"steps"``, ``"epochs"``, ``"callback"``, ``"nonfinite"`` (too many updates
            in a row were skipped), or the name of a signal: ``"SIGINT"``, ``"SIGTERM"`` and, with
            checkpoints, ``"SIGUSR1"``.
        history: Every record, in order: those of training and those of evaluation.
        evaluation: The last evaluation's values; empty if there was none.
        step_times: What steps take and what they are made of; print it.
    """

    num_steps: int
    num_epochs: int
    seconds: float
    stopped_by: str
    history: list[Record] = field(repr=False)
    evaluation: dict[str, float]
    step_times: StepTimes = field(default_factory=StepTimes, repr=False)

    @property
    def exit_code(self) -> int:
        """The exit code for a program that has nothing else to say.

        0 after a run that came to its end, 1 after ``"nonfinite"``, and 128 plus the signal's
        number, as shells have it: 143 after SIGTERM, 138 after SIGUSR1, 130 after SIGINT. A
        scheduler that starts such a program again lets it go on from its checkpoint.
        """
        if self.stopped_by == "nonfinite":
            return 1
        number = getattr(signal, self.stopped_by, None)
        return 0 if number is None else 128 + int(number)


@final
@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """The arguments of ``Trainer.fit``, which documents them; checked here."""

    steps: int | None
    epochs: int | None
    unroll: int | None
    evaluate: Evaluate | None
    evaluate_every: int | None
    evaluate_ema: bool
    log_every: int
    log_path: str | PathLike[str] | None
    progress: ProgressMode | bool
    callbacks: Sequence[Callback]
    count_items: Callable[[Any], int] | None
    unit: str
    flops_per_item: float | None
    peak_flops: float | None
    checkpoints: CheckpointOptions

    def __post_init__(self) -> None:
        if self.steps is None and self.epochs is None:
            raise ValueError("fit needs steps= or epochs=, got neither")
        for name, minimum in (
            ("steps", 0),
            ("epochs", 0),
            ("unroll", 1),
            ("evaluate_every", 1),
            ("log_every", 1),
        ):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), minimum=minimum)
        for name in ("flops_per_item", "peak_flops"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        if self.evaluate is None and self.evaluate_every is not None:
            raise ValueError(f"evaluate_every={self.evaluate_every} needs evaluate=, got None")
        if check_flag("evaluate_ema", self.evaluate_ema) and self.evaluate is None:
            raise ValueError("evaluate_ema=True needs evaluate=, got None")
        if not (self.evaluate is None or callable(self.evaluate)):
            check_batches("evaluate", self.evaluate, "batches, or a callable model -> mapping")
            if self._evaluates_twice and isinstance(self.evaluate, GeneratorType):
                raise TypeError(
                    f"evaluate ({type(self.evaluate).__name__}) is an iterator, which serves one "
                    "evaluation, and there are more; give a list or a DataLoader"
                )
        if not isinstance(self.progress, bool):
            check_choice("progress", self.progress, get_args(ProgressMode))
        if not isinstance(self.log_path, str | PathLike | None):
            raise TypeError(
                f"log_path must be a path or None, got {self.log_path!r} "
                f"({type(self.log_path).__name__})"
            )
        if not isinstance(self.callbacks, list | tuple):
            raise TypeError(
                f"callbacks must be a list of functions, got {type(self.callbacks).__name__}"
            )
        for index, callback in enumerate(self.callbacks):
            check_callable(f"callbacks[{index}]", callback, "callback(event)")
        if self.count_items is not None:
            check_callable("count_items", self.count_items, "count_items(batch) -> int")

    @property
    def _evaluates_twice(self) -> bool:
        """Whether there are surely two evaluations or more, if the run comes to its end."""
        if self.steps is not None and self.evaluate_every is not None:
            return self.steps >= 2 * self.evaluate_every
        return self.evaluate_every is None and (self.epochs or 0) > 1

    def total_steps(self, loader: PrefetchingLoader) -> int | None:
        """Return how many steps there will be, where that is known."""
        if self.epochs is None:
            return self.steps
        try:
            total = loader.steps_in_epoch() * self.epochs
        except TypeError:
            return self.steps
        return total if self.steps is None else min(total, self.steps)

    def told(self) -> list[str]:
        """Return what must be the same on all ranks, as lines."""
        names = ("steps", "epochs", "unroll", "evaluate_every", "evaluate_ema", "log_every")
        checkpoints, evaluate = self.checkpoints, self.evaluate
        how = "nothing" if evaluate is None else "a callable" if callable(evaluate) else "batches"
        return [
            *(f"{name}={getattr(self, name)!r}" for name in names),
            f"{how} in evaluate=",
            f"{'no' if checkpoints.checkpoint is None else 'a'} folder in checkpoint=",
            f"checkpoint_every={checkpoints.every!r}",
            f"resume={checkpoints.resume!r}",
        ]
