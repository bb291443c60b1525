"""The plain loop behind ``Trainer.fit``: epochs, logging, evaluation, signals.

It is written over a `TrainStep` and does nothing to it: whatever trains here trains the same in a
loop of the user's own. Device scalars are read only at log steps, and then late: a reading is
staged behind an event and collected once the device has passed it, so a record appears some steps
after the step it tells of and the device never waits for the host.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from os import PathLike
from typing import Any, final

from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from torchfast._core.device import peak_flops
from torchfast._core.errors import EmptyEpochError
from torchfast._core.rounds import Rounds
from torchfast._core.signals import StopSignals
from torchfast.data import PrefetchingLoader
from torchfast.evaluation import (
    EvaluationCutError,
    deal_out,
    evaluate,
    evaluated_model,
    fails_together,
    undisturbed,
)
from torchfast.fit_checkpoints import FitCheckpoints, FitProgress
from torchfast.fit_options import Evaluate, FitEvent, FitOptions, FitResult
from torchfast.fit_steps import DoneStep, FitSteps
from torchfast.parallel import Watchdog
from torchfast.parallel.likeness import difference
from torchfast.profiling import StepTimer
from torchfast.records import IntervalRecords, Record, SkipWatch
from torchfast.reporting import JSONLWriter, ProgressLine
from torchfast.step import TrainStep
from torchfast.stopping import Stopping

logger = logging.getLogger(__name__)

_END = object()
_STILL_S = 300.0  # without a phase of a step, until the log says where the ranks stand


@final
class FitLoop:
    """One call of ``fit``: holds what the loop counts and what it has yet to read."""

    def __init__(
        self, step: TrainStep, loader: PrefetchingLoader, options: FitOptions, timer: StepTimer
    ) -> None:
        self._step = step
        self._syncs = step.syncs
        self._timer = timer
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
        if isinstance(step.lr_scheduler, ReduceLROnPlateau) and step.lr_scheduler.mode == "max":
            raise ValueError(
                "ReduceLROnPlateau(mode='max') would be stepped with the loss of each evaluation, "
                "which is to fall; give mode='min', or leave it out of the trainer and step it by "
                "your metric in a callback, on the events of kind 'evaluate'"
            )
        self._plateau = step.lr_scheduler if is_plateau else None
        step.memory.note_loader(loader)
        evaluated_model(step, ema=options.evaluate_ema)  # or raise before hours of training
        self._held_out: Any = options.evaluate
        if not (self._held_out is None or callable(self._held_out)):
            self._held_out = deal_out(step, self._held_out)  # once: worker processes may stay
        self._done = 0
        self._epoch = step.num_epochs
        self._epochs_done = 0
        self._stop_reason: str | None = None
        self._signals = StopSignals(with_usr1=options.checkpoints.checkpoint is not None)
        self._stopping = Stopping(self._signals, step.ranks.group)
        self._is_cut = False  # by a loader that failed while a signal ends the loop
        self._checkpoints = FitCheckpoints(options.checkpoints, step, loader)
        self._records = IntervalRecords(
            step,
            options.count_items,
            options.unit,
            options.flops_per_item,
            options.peak_flops or peak_flops(step.device),
            timer,
        )
        checkpoint_every = options.checkpoints.every
        self._steps = FitSteps(
            step,
            loader,
            timer,
            self._records.clock,
            unroll=options.unroll or loader.unroll,
            cuts=tuple(every for every in (options.evaluate_every, checkpoint_every) if every),
            last=options.steps,
            is_heard=bool(options.callbacks),
        )
        self._telling: DoneStep | None = None
        self._skips = SkipWatch(step)
        self._history: list[Record] = []
        self._evaluation: dict[str, float] = {}
        self._evaluated_at = -1
        self._due_at = -1  # of the last evaluation that was due, not asked for by the end of all
        self._log_failed = False

    def run(self) -> FitResult:
        """Run to the end, or to a signal, and return what was done."""
        options, step = self._options, self._step
        total = options.total_steps(self._loader)
        self._started = time.perf_counter()
        if not step.model.training:
            warnings.warn(
                f"{type(step.model).__name__} is in eval mode, so dropout is off and "
                "BatchNorm does not learn its statistics; call model.train() before fit() unless "
                "that is meant",
                stacklevel=4,
            )
        with (
            ProgressLine(
                options.progress if step.ranks.is_first else "off",
                total_steps=None if total is None else step.num_steps + total or None,
                unit=options.unit,
            ) as self._line,
            _log_file(options.log_path if step.ranks.is_first else None) as self._log,
            self._signals,
            self._timer.session(),
            step.memory.monitored(),
            self._watched(),
        ):
            try:
                with step.sharding.heard():
                    self._train()
            except BaseException:
                # What was measured is kept, and must not hide what went wrong.
                with suppress(Exception):
                    self._flush(wait=True)
                self._checkpoints.abandon()
                raise
            self._checkpoints.close()
            self._emit("end", None)
        self._timer.note_replays(step.phase_times())
        return FitResult(
            num_steps=self._done,
            num_epochs=self._epochs_done,
            seconds=time.perf_counter() - self._started,
            stopped_by=self._stopping.signal or self._stop_reason or "steps",
            history=self._history,
            evaluation=self._evaluation,
            step_times=self._timer.times(),
        )

    # --- the loop ------------------------------------------------------------------------------

    def _train(self) -> None:
        if found := difference(self._step.ranks.group, self._options.told()):
            raise ValueError(
                f"the ranks were given different arguments of fit ({found}), so they would wait "
                "for each other; give all of them the same"
            )
        self._resume()
        with self._syncs:
            self._epochs()
        self._stopping.settle()
        if self._skips.tripped(wait=True):
            self._stop_reason = "nonfinite"
            logger.warning("too many updates were skipped: %s", self._skips.told())
        if self._records.has_steps:
            self._stage()
        self._evaluate(due=False)
        self._checkpoints.save(self._progress(), self._fresh_evaluation(), blocking=True)
        self._flush(wait=True)

    def _watched(self) -> AbstractContextManager[Any]:
        """Say where all ranks stand if they stand still, well before their group gives up."""
        options = self._step.plan.shard_options
        if options is None or not self._step.ranks.are_many:
            return nullcontext()
        timeout_s = min(_STILL_S, options.timeout_s / 2)
        return Watchdog(timeout_s=timeout_s, num_steps=lambda: self._step.num_steps)

    def _resume(self) -> None:
        progress = self._checkpoints.resume()
        self._done, self._epochs_done = progress.num_steps, progress.num_epochs
        self._due_at = progress.evaluated_at
        every = self._options.evaluate_every
        if every and self._done and self._done % every == 0:
            self._evaluate()  # unless it was done before the checkpoint

    def _progress(self) -> FitProgress:
        return FitProgress(
            num_steps=self._done, num_epochs=self._epochs_done, evaluated_at=self._due_at
        )

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
        batches = self._loader.iterate(
            max_steps=steps_left, last=last, at_once=lambda: self._steps.at_once(self._done)
        )
        while (taken := self._next(batches)) is not _END:
            self._run_steps(taken)
            if self._stop_reason is not None:
                # A run cut short takes the end of the epoch up when it goes on.
                return self._stop_reason == "steps" and self._ended(batches)
        if self._is_cut:
            # The other ranks' loaders felt the signal too; none of them is at its end.
            self._stop_reason = self._stopping.at_once()
            return False
        return self._stopping.signal is None

    def _run_steps(self, taken: Any) -> None:
        """Run what the loader has handed out: a step, or several in one replay."""
        every, num_told = self._options.evaluate_every, 0
        for done, batch in self._steps.run(taken):
            self._done += 1
            num_told += 1
            self._step.memory.end_step()
            self._tell(done, batch)
            if done.num_behind:
                continue  # the model is further on
            if every and self._done % every == 0:
                self._evaluate()
            if self._checkpoints.are_on:
                self._checkpoints.after_step(self._progress(), self._fresh_evaluation())
            self._check_end(num_told)
            num_told = 0

    def _ended(self, batches: Iterator[Any]) -> bool:
        """Let the loader see the end of its epoch, if it is there."""
        self._next(batches)
        return self._loader.epoch_ended

    def _next(self, batches: Iterator[Any]) -> Any:
        self._timer.begin_step()
        batch = self._next_or_end(batches)
        if batch is _END:
            self._timer.cancel_step()
        return batch

    def _next_or_end(self, batches: Iterator[Any]) -> Any:
        try:
            with self._syncs.loading():
                return next(batches, _END)
        except Exception:
            # A terminal's Ctrl-C reaches loader workers too, and their death is not an error.
            if not self._stopping.is_asked_here:
                raise
            logger.warning("the loader failed while stopping on %s", self._signals.received)
            self._is_cut = True
            return _END

    def _check_end(self, num_steps: int = 0) -> None:
        options = self._options
        if self._stop_reason is not None:
            return
        if self._skips.tripped(num_steps):
            self._stopping.ask("nonfinite")
        asked = self._stopping.after_step()
        if asked is not None:
            self._stop_reason = asked
        elif options.steps is not None and self._done >= options.steps:
            self._stop_reason = "steps"
        elif options.epochs is not None and self._epochs_done >= options.epochs:
            self._stop_reason = "epochs"

    def _stop(self) -> None:
        self._stopping.ask("callback")

    def _evaluate(self, *, due: bool = True) -> None:
        """Evaluate what these steps made, unless that was done or a signal calls for the end.

        One that is not ``due``, at the end of all, is told and schedules nothing: the run that
        goes on from here knows nothing of it.
        """
        evaluation = self._options.evaluate
        done_at = self._due_at if due else max(self._due_at, self._evaluated_at)
        if evaluation is None or done_at == self._done or self._stopping.signal:
            return
        self._records.clock.pause()  # the time spent here belongs to no step
        self._flush(wait=True)
        try:
            with self._syncs.unheard():  # its numbers are for the host
                values = self._evaluated(evaluation)
        except EvaluationCutError:
            return
        except Exception:
            is_alone = self._step.ranks.are_many and not fails_together(self._step, evaluation)
            if is_alone or not self._stopping.is_asked_here:
                raise
            logger.warning("the evaluation failed while stopping on %s", self._signals.received)
            return
        self._evaluation = values
        self._evaluated_at = self._done
        if due:
            self._due_at = self._done
        if self._plateau is not None:
            if "loss" not in values:
                raise ValueError(
                    f"ReduceLROnPlateau needs evaluate= to return 'loss', got {sorted(values)}"
                )
            if due:
                self._plateau.step(values["loss"])
        record = {**self._place(), "evaluation": values}
        self._keep(record)
        shown = "  ".join(f"{name} {value:.4f}" for name, value in values.items())
        self._line.message(f"step {record['step']}  evaluation: {shown}")
        self._emit("evaluate", record)
        self._records.clock.start()

    def _evaluated(self, evaluation: Evaluate) -> dict[str, float]:
        if callable(evaluation):
            model = evaluated_model(self._step, ema=self._options.evaluate_ema)
            with Rounds(self._step.ranks.group) as rounds:
                with undisturbed(self._step, model):
                    values = evaluation(model)
                if not isinstance(values, Mapping):
                    raise TypeError(
                        "evaluate must return a mapping of names to floats, got "
                        f"{type(values).__name__}"
                    )
                numbers = {name: float(value) for name, value in values.items()}
                rounds.end()
            return self._step.ranks.of_first(numbers)  # a scheduler must hear the same everywhere
        return evaluate(
            self._step,
            self._held_out,
            # Ranks evaluate together: none leaves the others alone in it.
            lambda: not self._step.ranks.are_many and self._stopping.is_asked_here,
            ema=self._options.evaluate_ema,
        )

    # --- what is told --------------------------------------------------------------------------

    def _tell(self, done: DoneStep, batch: Any) -> None:
        """Tell of a step what it was; the trainer may be some steps further on."""
        self._telling = done
        with self._syncs.during("count_items"):
            self._records.add(done, batch)
        self._steps.is_told()
        if self._options.callbacks:
            self._emit("step", None, done.loss)
        if self._done % self._options.log_every == 0:
            self._stage()
        if self._records.are_staged:
            self._flush(wait=False)
        self._steps.was_heard(done)
        self._telling = None

    @property
    def _num_steps(self) -> int:
        """The trainer's count at the step that is told of."""
        return self._step.num_steps - (0 if self._telling is None else self._telling.num_behind)

    def _stage(self) -> None:
        """Begin to read the interval that ends here."""
        self._timer.note_copies(self._loader.statistics().copies_ms)
        self._timer.note_replays(self._step.phase_times())
        self._records.stage(self._place() | self._step.memory.to_record())

    def _flush(self, *, wait: bool) -> None:
        """Tell the records that have arrived; with ``wait``, all that are on their way."""
        for record in self._records.arrived(wait=wait):
            total = self._options.total_steps(self._loader)
            if total is not None and self._records.mean_step_ms is not None:
                left = max(0, total - self._done)
                record["eta_s"] = left * self._records.mean_step_ms / 1e3
            self._keep(record)
            self._line.update(record)
            self._emit("log", record)

    def _place(self) -> Record:
        return {
            "step": self._num_steps,
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
            event = FitEvent(
                kind=kind,
                num_steps=self._num_steps,
                epoch=self._epoch,
                loss=loss,
                metrics=(self._telling or self._step).metrics,
                record=record,
                stop=self._stop,
            )
            with self._syncs.during("callbacks"):
                callback(event)


def _log_file(path: str | PathLike[str] | None) -> AbstractContextManager[JSONLWriter | None]:
    return nullcontext() if path is None else JSONLWriter(path)
