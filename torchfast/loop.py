"""The plain loop behind ``Trainer.fit``: epochs, logging, evaluation, signals.

It is written over a `TrainStep` and does nothing to it: whatever trains here trains the same in a
loop of the user's own. Device scalars are read only at log steps, and then late: a reading is
staged behind an event and collected once the device has passed it, so a record appears some steps
after the step it tells of and the device never waits for the host.
"""

from __future__ import annotations

import logging
import signal
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, Literal, final, get_args

from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from torchfast._core.arguments import (
    check_callable,
    check_choice,
    check_int,
    check_iterable,
    check_positive,
)
from torchfast._core.device import peak_flops
from torchfast._core.errors import EmptyEpochError
from torchfast._core.loss import Number
from torchfast._core.signals import StopSignals
from torchfast.data import PrefetchingLoader
from torchfast.evaluation import EvaluationCutError, evaluate, undisturbed
from torchfast.fit_checkpoints import CheckpointOptions, FitCheckpoints, FitProgress
from torchfast.records import IntervalRecords, Record, SkipWatch
from torchfast.reporting import JSONLWriter, ProgressLine
from torchfast.step import TrainStep

logger = logging.getLogger(__name__)

_END = object()

ProgressMode = Literal["auto", "terminal", "plain", "off"]
Evaluate = Iterable[Any] | Callable[[Any], Mapping[str, float]]


@final
@dataclass(frozen=True, kw_only=True)
class FitEvent:
    """What a callback is told.

    Attributes:
        kind: ``"step"`` after every step, ``"log"`` when a record is read, ``"evaluate"``,
            ``"epoch"`` at the end of one, ``"end"``.
        num_steps: Updates done, those before this ``fit`` included.
        epoch: The trainer's count of epochs, from 0, those before this ``fit`` included.
        loss: The step's loss on the device; reading it makes the host wait.
        metrics: The step's metrics on the device, likewise.
        record: What was logged, for ``"log"`` and ``"evaluate"``; host numbers.
        stop: Call it to end the loop after this step.
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
    """

    num_steps: int
    num_epochs: int
    seconds: float
    stopped_by: str
    history: list[Record] = field(repr=False)
    evaluation: dict[str, float]

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
    evaluate: Evaluate | None
    evaluate_every: int | None
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
        for name, minimum in (("steps", 0), ("epochs", 0), ("evaluate_every", 1), ("log_every", 1)):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), minimum=minimum)
        for name in ("flops_per_item", "peak_flops"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        if self.evaluate is None and self.evaluate_every is not None:
            raise ValueError(f"evaluate_every={self.evaluate_every} needs evaluate=, got None")
        if not (self.evaluate is None or callable(self.evaluate)):
            check_iterable("evaluate", self.evaluate, "batches, or a callable model -> mapping")
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


@final
class FitLoop:
    """One call of ``fit``: holds what the loop counts and what it has yet to read."""

    def __init__(self, step: TrainStep, loader: PrefetchingLoader, options: FitOptions) -> None:
        self._step = step
        self._loader = loader
        self._options = options
        if loader.is_one_shot and options.epochs is not None and options.epochs > 1:
            raise TypeError(
                f"loader ({type(loader.loader).__name__}) is an iterator, which serves one epoch, "
                f"but epochs={options.epochs}; pass something that iter() can start again"
            )
        is_plateau = isinstance(step.lr_scheduler, ReduceLROnPlateau)
        if is_plateau and options.evaluate is None:
            raise ValueError("ReduceLROnPlateau is stepped on evaluations: fit needs evaluate=")
        self._plateau = step.lr_scheduler if is_plateau else None
        self._done = 0
        self._epoch = step.num_epochs
        self._epochs_done = 0
        self._stop_reason: str | None = None
        self._signals = StopSignals(with_usr1=options.checkpoints.checkpoint is not None)
        self._checkpoints = FitCheckpoints(options.checkpoints, step, loader)
        self._records = IntervalRecords(
            step,
            options.count_items,
            options.unit,
            options.flops_per_item,
            options.peak_flops or peak_flops(step.device),
        )
        self._skips = SkipWatch(step)
        self._history: list[Record] = []
        self._evaluation: dict[str, float] = {}
        self._evaluated_at = -1
        self._log_failed = False

    def run(self) -> FitResult:
        """Run to the end, or to a signal, and return what was done."""
        options = self._options
        self._started = time.perf_counter()
        if not self._step.model.training:
            warnings.warn(
                f"{type(self._step.model).__name__} is in eval mode, so dropout is off and "
                "BatchNorm does not learn its statistics; call model.train() before fit() unless "
                "that is meant",
                stacklevel=4,
            )
        with (
            ProgressLine(
                options.progress, total_steps=self._last_step() or None, unit=options.unit
            ) as self._line,
            _log_file(options.log_path) as self._log,
            self._signals,
        ):
            try:
                self._resume()
                self._epochs()
                if self._skips.tripped(wait=True):
                    self._stop_reason = "nonfinite"
                    logger.warning("too many updates were skipped: %s", self._skips.told())
                if self._records.has_steps:
                    self._records.stage(self._place())
                self._evaluate()
                self._checkpoints.save(self._progress(), self._fresh_evaluation(), blocking=True)
                self._flush(wait=True)
            except BaseException:
                # What was measured is kept, and must not hide what went wrong.
                with suppress(Exception):
                    self._flush(wait=True)
                with suppress(Exception):
                    self._checkpoints.close()
                raise
            self._checkpoints.close()
            self._emit("end", None)
        return FitResult(
            num_steps=self._done,
            num_epochs=self._epochs_done,
            seconds=time.perf_counter() - self._started,
            stopped_by=self._signals.received or self._stop_reason or "steps",
            history=self._history,
            evaluation=self._evaluation,
        )

    # --- the loop ------------------------------------------------------------------------------

    def _resume(self) -> None:
        progress = self._checkpoints.resume()
        self._done, self._epochs_done = progress.num_steps, progress.num_epochs

    def _progress(self) -> FitProgress:
        return FitProgress(num_steps=self._done, num_epochs=self._epochs_done)

    def _fresh_evaluation(self) -> dict[str, float] | None:
        return self._evaluation if self._evaluated_at == self._done else None

    def _epochs(self) -> None:
        self._records.clock.start()
        self._check_end()
        while self._stop_reason is None:
            self._epoch = self._step.num_epochs
            self._loader.set_epoch(self._epoch)
            before, resumed = self._done, self._loader.will_resume
            if self._run_epoch():
                if self._done == before and not resumed:
                    raise EmptyEpochError(
                        f"epoch {self._epoch} yielded no batch after {self._done} steps; the "
                        "loader is empty, or an iterator that is used up: pass one that iter() "
                        "can start again"
                    )
                self._loader.end_epoch()
                self._epochs_done += 1
                self._step.num_epochs += 1
                if self._options.evaluate_every is None:
                    self._evaluate()
                self._checkpoints.after_epoch(self._progress(), self._fresh_evaluation())
                self._emit("epoch", None)
            self._check_end()

    def _run_epoch(self) -> bool:
        """Train on one epoch; return whether it came to its end."""
        options = self._options
        steps_left = None if options.steps is None else options.steps - self._done
        last = options.epochs is not None and self._epochs_done + 1 >= options.epochs
        batches = self._loader.iterate(max_steps=steps_left, last=last)
        while (batch := self._next(batches)) is not _END:
            self._records.begin()
            loss = self._step(batch)
            self._done += 1
            self._records.add(loss, batch)
            self._emit("step", None, loss)
            if self._done % options.log_every == 0:
                self._records.stage(self._place())
            self._flush(wait=False)
            if options.evaluate_every and self._done % options.evaluate_every == 0:
                self._evaluate()
            self._checkpoints.after_step(self._progress(), self._fresh_evaluation())
            self._check_end()
            if self._stop_reason is not None:
                return self._loader.at_epoch_end
        return self._signals.received is None

    def _next(self, batches: Iterator[Any]) -> Any:
        try:
            return next(batches, _END)
        except Exception:
            # A terminal's Ctrl-C reaches loader workers too, and their death is not an error.
            if self._signals.received is None:
                raise
            logger.warning("the loader failed while stopping on %s", self._signals.received)
            return _END

    def _check_end(self) -> None:
        options = self._options
        if self._stop_reason is not None:
            return
        if self._signals.received is not None:
            self._stop_reason = self._signals.received
        elif options.steps is not None and self._done >= options.steps:
            self._stop_reason = "steps"
        elif options.epochs is not None and self._epochs_done >= options.epochs:
            self._stop_reason = "epochs"
        elif self._skips.tripped():
            self._stop_reason = "nonfinite"

    def _stop(self) -> None:
        self._stop_reason = self._stop_reason or "callback"

    def _evaluate(self) -> None:
        """Evaluate what these steps made, unless that was done or a signal calls for the end."""
        evaluation = self._options.evaluate
        if evaluation is None or self._evaluated_at == self._done or self._signals.received:
            return
        self._records.clock.pause()  # the time spent here belongs to no step
        self._flush(wait=True)
        try:
            values = self._evaluated(evaluation)
        except EvaluationCutError:
            return
        except Exception:
            if self._signals.received is None:
                raise
            logger.warning("the evaluation failed while stopping on %s", self._signals.received)
            return
        self._evaluation = values
        self._evaluated_at = self._done
        if self._plateau is not None:
            if "loss" not in values:
                raise ValueError(
                    f"ReduceLROnPlateau needs evaluate= to return 'loss', got {sorted(values)}"
                )
            self._plateau.step(values["loss"])
        record = {**self._place(), "evaluation": values}
        self._keep(record)
        shown = "  ".join(f"{name} {value:.4f}" for name, value in values.items())
        self._line.message(f"step {record['step']}  evaluation: {shown}")
        self._emit("evaluate", record)
        self._records.clock.start()

    def _evaluated(self, evaluation: Evaluate) -> dict[str, float]:
        if callable(evaluation):
            with undisturbed(self._step):
                values = evaluation(self._step.model)
            if not isinstance(values, Mapping):
                raise TypeError(
                    "evaluate must return a mapping of names to floats, got "
                    f"{type(values).__name__}"
                )
            return {name: float(value) for name, value in values.items()}
        return evaluate(self._step, evaluation, lambda: self._signals.received is not None)

    # --- what is told --------------------------------------------------------------------------

    def _flush(self, *, wait: bool) -> None:
        """Tell the records that have arrived; with ``wait``, all that are on their way."""
        for record in self._records.arrived(wait=wait):
            total = self._total()
            if total is not None and self._records.mean_step_ms is not None:
                left = max(0, total - self._done)
                record["eta_s"] = left * self._records.mean_step_ms / 1e3
            self._keep(record)
            self._line.update(record)
            self._emit("log", record)

    def _place(self) -> Record:
        return {
            "step": self._step.num_steps,
            "epoch": self._epoch,
            "seconds": time.perf_counter() - self._started,
        }

    def _keep(self, record: Record) -> None:
        self._history.append(record)
        if self._log is None:
            return
        try:
            self._log.write(record)
        except OSError as error:
            # A full disk costs the log a record, not the run its training.
            if not self._log_failed:
                logger.warning("a record was not logged, training goes on: %s", error)
            self._log_failed = True

    def _emit(self, kind: Any, record: Record | None, loss: Tensor | None = None) -> None:
        for callback in self._options.callbacks:
            callback(
                FitEvent(
                    kind=kind,
                    num_steps=self._step.num_steps,
                    epoch=self._epoch,
                    loss=loss,
                    metrics=self._step.metrics,
                    record=record,
                    stop=self._stop,
                )
            )

    def _total(self) -> int | None:
        """Return how many steps there will be, where that is known."""
        options = self._options
        if options.epochs is None:
            return options.steps
        length = self._epoch_length()
        if length is None:
            return options.steps
        total = length * options.epochs
        return total if options.steps is None else min(total, options.steps)

    def _last_step(self) -> int | None:
        """Return the trainer's own count at the end, where that is known."""
        total = self._total()
        return None if total is None else self._step.num_steps + total

    def _epoch_length(self) -> int | None:
        """Return how many steps an epoch has, where the loader knows."""
        try:
            return len(self._loader)
        except TypeError:
            return None


def _log_file(path: str | PathLike[str] | None) -> AbstractContextManager[JSONLWriter | None]:
    return nullcontext() if path is None else JSONLWriter(path)
