"""Trainer: a step, and a loop over it for whoever wants one.

``trainer.step(batch)`` is the whole of it for a loop of one's own; ``trainer.fit(loader, ...)`` is
the plain loop with a progress line, a log, evaluation and a clean stop. Both run the same
`TrainStep`, so what trains in one trains the same in the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from torchfast._core.arguments import explain_keywords
from torchfast._core.batches import StepBatches
from torchfast._core.closing import Closing
from torchfast._core.decisions import Report
from torchfast._core.loss import Number
from torchfast.compiled_loss import LossFn
from torchfast.data import PrefetchingLoader
from torchfast.ema import EMAOptions
from torchfast.evaluation import evaluate
from torchfast.fit_checkpoints import CheckpointOptions, Resume, Target
from torchfast.fit_options import Callback, Evaluate, FitOptions, FitResult, ProgressMode
from torchfast.loop import FitLoop
from torchfast.plan import Plan
from torchfast.preparation import OptimizerSource, SchedulerSource
from torchfast.profiling import StepTimer, SyncReport
from torchfast.step import TrainStep
from torchfast.step_loader import fit_loader, step_loader

if TYPE_CHECKING:
    from torchfast.profiling import ProfileReport


@final
class Trainer(Closing):
    """Trains a model as a plan says, in your loop (`step`) or in a plain one (`fit`).

    The model, the optimizer and the data stay yours: the same objects, the same keys, Python
    floats in the parameter groups. `TrainStep` documents the arguments.

    Args:
        model: Any module; trained in place.
        optimizer: A ``torch.optim.Optimizer``, or a callable ``parameters -> Optimizer``.
        loss_fn: ``loss_fn(model, batch)`` returns ``loss``, ``(loss, metrics)`` or
            ``(loss, metrics, weight)``.
        plan: ``"eager"``, ``"exact"`` (the default: changes no number), ``"fast"``, or a `Plan`.
        max_grad_norm: Clip the total gradient norm at this.
        accumulate: Micro-batches in a step.
        lr_scheduler: Stepped once after each update; or a callable ``optimizer -> scheduler``.
        device: Where to train; None means where the parameters are.
        ema: Keep an exponential moving average of the weights, in `ema_model`: its decay, such as
            0.999, or `EMAOptions`.

    Raises:
        TypeError: An argument of the wrong kind, or an unknown keyword.
        ValueError: An argument out of range.
        PlanError: A plan that does not exist or contradicts itself.
        UnsupportedDeviceError: A device that this machine lacks.
        UnsupportedOptimizerError: An optimizer that needs a closure.

    Numerics: ``eager`` and ``exact`` are bitwise the plain loop; ``fast`` is close.
    Synchronizes: Never in a steady step.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        >>> def loss_fn(model, batch):
        ...     inputs, targets = batch
        ...     return (model(inputs) - targets).square().mean()
        >>> trainer = Trainer(model, optimizer, loss_fn, max_grad_norm=1.0)
        >>> loader = [(torch.ones(2, 4), torch.zeros(2, 1))] * 3
        >>> for batch in trainer.prefetch(loader):
        ...     loss = trainer.step(batch)
        >>> trainer.num_steps
        3
    """

    @explain_keywords
    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerSource,
        loss_fn: LossFn,
        plan: str | Plan = "exact",
        *,
        max_grad_norm: float | None = None,
        accumulate: int = 1,
        lr_scheduler: SchedulerSource = None,
        device: torch.device | str | int | None = None,
        ema: float | EMAOptions | None = None,
    ) -> None:
        self._step = TrainStep(
            model,
            optimizer,
            loss_fn,
            plan,
            max_grad_norm=max_grad_norm,
            accumulate=accumulate,
            lr_scheduler=lr_scheduler,
            device=device,
            ema=ema,
        )
        self._timer = StepTimer(self._step.device, collectives=self._step.sharding.collectives)

    def step(self, batch: Any) -> Tensor:
        """Run one update and return its mean loss, detached, on the device.

        With ``accumulate`` above 1, ``batch`` is a `MicroBatches`, which `prefetch` yields.
        Reading the loss (``float(loss)``) makes the host wait for the device; do it rarely.
        See `TrainStep` for what it raises.
        """
        return self._step(batch)

    def steps(self, batches: StepBatches[Any]) -> Tensor:
        """Run several updates and return their losses, shape ``(n,)``, detached, on the device.

        The same as `step` for each of them, to the bit, in one replay where one graph can hold
        them; the report says where not, and why. It pays where steps are so short that the host
        sets the pace. Learning rates that you set hold for all of them; ``lr_scheduler`` is
        stepped after each. `metrics` are the last one's.

        Args:
            batches: What `prefetch` yields with ``unroll``; what each step takes, in order.

        Raises:
            TypeError: No `StepBatches`.
            ValueError: More micro-batches in a step than ``accumulate``.
        """
        return self._step.steps(batches)

    def forward_backward(self, batch: Any) -> Tensor:
        """Run the first half of a step: zero_grad, forward, backward. Returns the loss.

        ``.grad`` then holds the true gradient (divided over the group, unscaled), to look at or
        to change before `update`.
        """
        return self._step.forward_backward(batch)

    def update(self) -> None:
        """Run the second half of a step: clip, optimizer, scheduler."""
        self._step.update()

    @explain_keywords
    def prefetch(
        self,
        loader: Iterable[Any],
        *,
        depth: int = 2,
        unroll: int | None = None,
        reuse: bool = False,
        transform: Callable[[Any], Any] | None = None,
        transfer_dtype: torch.dtype | None = None,
        across_epochs: bool = False,
        background: bool | Literal["auto"] = "auto",
        strict: bool = False,
    ) -> PrefetchingLoader:
        """Return a `PrefetchingLoader` over ``loader`` that yields what `step` takes.

        On the step's device, grouped into `MicroBatches` under ``accumulate``, and as NHWC where
        the plan says so. With ``unroll`` it yields what `steps` takes, for so many steps. Of many
        ranks each gets its own part (`shard_loader`), and all end an epoch together.
        `PrefetchingLoader` documents the arguments.

        Raises:
            TypeError: An argument of the wrong kind, or an unknown keyword.
            ValueError: An argument out of range.
        """
        return step_loader(
            self._step,
            loader,
            depth=depth,
            unroll=unroll,
            reuse=reuse,
            transform=transform,
            transfer_dtype=transfer_dtype,
            across_epochs=across_epochs,
            background=background,
            strict=strict,
        )

    @explain_keywords
    def fit(
        self,
        loader: Iterable[Any],
        *,
        steps: int | None = None,
        epochs: int | None = None,
        unroll: int | None = None,
        evaluate: Evaluate | None = None,
        evaluate_every: int | None = None,
        evaluate_ema: bool = False,
        log_every: int = 10,
        log_path: str | PathLike[str] | None = None,
        progress: ProgressMode | bool = "auto",
        callbacks: Sequence[Callback] = (),
        count_items: Callable[[Any], int] | None = None,
        unit: str = "samples",
        flops_per_item: float | None = None,
        peak_flops: float | None = None,
        checkpoint: Target | None = None,
        checkpoint_every: int | None = None,
        resume: Resume = "auto",
    ) -> FitResult:
        """Train over ``loader``, again and again until ``steps`` or ``epochs`` are done.

        The model's train and eval modes are left as they are; a model in eval mode gets a
        warning. SIGINT (Ctrl-C) and SIGTERM end the loop after the step in progress; ``fit`` then
        returns, and the result says so. A second one acts at once.

        Args:
            loader: Any iterable of batches; ``set_epoch`` is called on it, its samplers and its
                data set where they have it. What `prefetch` returns is taken as it is, with its
                options and its position.
            steps: Updates to do in this call.
            epochs: Passes over the loader in this call. With both, whichever ends first.
            unroll: Do so many steps in one replay where one graph can hold them, as `steps` does.
                Evaluations and checkpoints fall between such groups; signals, callbacks and
                ``stop()`` wait for the end of one. None means what a loader of `prefetch` has.
            evaluate: Batches to evaluate on (see `evaluate`), or a callable ``model -> mapping``
                of names to floats, which does all by itself.
            evaluate_every: Steps between evaluations; None means after each epoch. A last one
                follows the last step in any case.
            evaluate_ema: Evaluate the averaged weights, which ``ema`` of the trainer keeps.
            log_every: Steps between records.
            log_path: A JSONL file to append records to.
            progress: ``"auto"`` (one line rewritten on a terminal, else a line a record),
                ``"terminal"``, ``"plain"``, ``"off"``, True or False.
            callbacks: Functions that take a `FitEvent`.
            count_items: ``batch -> int``, read from shapes, for the rate; None means the first
                dimension of the first tensor.
            unit: What is counted, such as ``"tokens"``.
            flops_per_item: Forward and backward FLOPs of an item, for ``mfu`` in the records.
            peak_flops: FLOP/s that 100 % MFU means; None means the data sheet's dense 16-bit
                figure of a known GPU.
            checkpoint: A folder to save checkpoints in, of which the last three are kept; or a
                `CheckpointManager` that says what to keep. The last step of the call is saved in
                any case; SIGTERM and SIGUSR1 save and end the loop.
            checkpoint_every: Steps between checkpoints; None means after each epoch.
            resume: ``"auto"`` goes on from the newest checkpoint, if there is one: ``steps`` and
                ``epochs`` then count from where that run began, so that the same command ends
                where it would have ended. A step takes that one. The path of other checkpoints
                begins from their newest, where there are none here yet. None begins anew.

        Returns:
            What was done, with every record.

        Raises:
            TypeError: An argument of the wrong kind; an iterator as loader with epochs > 1.
            ValueError: An argument out of range, or neither steps nor epochs; different data on the
                ranks; a PrefetchingLoader for another device, ``accumulate`` or ``unroll``.
            EmptyEpochError: An epoch that yields no batch.
            CheckpointWriteError: A checkpoint could not be written; the one before it is whole.
            CheckpointCorruptError: The step asked for is damaged, or all checkpoints are.
            StateMismatchError: A checkpoint of another model, optimizer or loader.

        Numerics: The same as calling `step` in a loop. Evaluation leaves every random generator
            as it found it. A resumed run is bitwise the uninterrupted one.
        Synchronizes: At evaluations, at checkpoints and at the end. Records are read late, behind
            an event.
        """
        saving = CheckpointOptions(checkpoint=checkpoint, every=checkpoint_every, resume=resume)
        options = FitOptions(
            steps=steps,
            epochs=epochs,
            unroll=unroll,
            evaluate=evaluate,
            evaluate_every=evaluate_every,
            evaluate_ema=evaluate_ema,
            log_every=log_every,
            log_path=log_path,
            progress=progress,
            callbacks=callbacks,
            count_items=count_items,
            unit=unit,
            flops_per_item=flops_per_item,
            peak_flops=peak_flops,
            checkpoints=saving,
        )
        with fit_loader(self._step, loader, unroll) as prefetching:
            return FitLoop(self._step, prefetching, options, self._timer).run()

    def evaluate(self, batches: Iterable[Any], *, ema: bool = False) -> dict[str, float]:
        """Return the mean loss and metrics of ``loss_fn`` over ``batches``.

        In eval mode and without gradients; modes and random generators are put back. Batches count
        equally unless ``loss_fn`` returns weights. ``"loss"`` is the loss, also where a metric has
        that name. With ``ema``, ``loss_fn`` gets `ema_model` as its model. Of many ranks, which
        all call it, each evaluates its part; a `PrefetchingLoader` is taken as it is.

        Raises:
            EmptyEpochError: No batch.
            ValueError: ``ema``, and no average is kept; ranks were given different batches.
            RankError: Another rank failed.
        Synchronizes: Once, at the end.
        """
        return evaluate(self._step, batches, ema=ema)

    @explain_keywords
    def profile(
        self,
        loader: Iterable[Any],
        *,
        steps: int = 10,
        warmup: int = 10,
        folder: str | PathLike[str] = "torchfast-profile",
        lines: bool = True,
        ceilings: bool = False,
    ) -> ProfileReport:
        """Train over ``loader`` for some steps and say where their time goes.

        These are steps like any others: the model learns from them. `torchfast.profile` documents
        the other arguments; the traces and a page are in the folder.

        Args:
            loader: Batches, gone through again if there are too few.
            steps: Steps to measure.
            warmup: Steps before, in which the step is compiled and captured.
            folder: Where traces and page go.
            lines: Run three steps more to learn the lines of what is found.
            ceilings: Measure what the device can do, too.

        Returns:
            The verdict, the figures behind it and single faults; print it.

        Raises:
            TypeError: An argument of the wrong kind.
            ValueError: A count that is too small.
            TraceError: The loader has too few batches to measure a step.

        Numerics: Bitwise equal to the same steps without.
        Synchronizes: When the profiler begins and ends; not in between.
        """
        from torchfast.profiling import profile  # which few ask for

        profiling = profile(folder, steps=steps, warmup=warmup, lines=lines, ceilings=ceilings)
        with profiling, self.prefetch(loader) as batches:
            before = -1
            while not profiling.is_done and profiling.num_steps > before:
                before = profiling.num_steps
                for batch in profiling.iterate(batches):
                    self.step(batch)
        return profiling.report

    def report(self) -> Report:
        """Return what the plan did, what stepped aside and why: print it, or ``to_dict()``.

        After `fit` it has `Report.step_times` too.
        """
        return dataclasses.replace(self._step.report(), step_times=self._timer.times())

    @property
    def sync_report(self) -> SyncReport | None:
        """The lines that made the host wait so far, under ``Plan(sync_guard=...)``, else None."""
        return self._step.syncs.report()

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a resumed run needs but the loader's position.

        Model, optimizer (in the form as given), scheduler, loss scale, average, step count, random
        generators. See `TrainStep.state_dict`.
        """
        return self._step.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what `state_dict` returned; a state that does not fit changes nothing."""
        self._step.load_state_dict(state)

    def check_skips(self) -> None:
        """Raise if ``stop_after`` updates in a row were skipped since the last call.

        For a loop of your own, which learns of skipped updates in no other way: call it now and
        then, such as at each log step. ``fit`` looks by itself. Without ``stop_after``
        (`NonfiniteOptions`) there is nothing to raise.

        Raises:
            NonFiniteError: They were; the message says at which steps.

        Synchronizes: Yes, if ``stop_after`` is set.
        """
        self._step.check_skips()

    @override
    def close(self) -> None:
        """Put the optimizer and the model's layout back; a second call does nothing."""
        self._step.close()

    @property
    def model(self) -> nn.Module:
        """The model, the same object that was given."""
        return self._step.model

    @property
    def ema_model(self) -> nn.Module | None:
        """The model with averaged weights, to evaluate or to save; None without ``ema``.

        A module like `model`, in eval mode, whose parameters need no gradients and have the
        model's dtypes. It follows each step: copy it to keep it, and take it from here again where
        the model was given other modules or parameters, was cast or moved. Do not move or cast it
        itself. Weights that are loaded into it are averaged on.
        """
        return self._step.ema_model

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer, given or made."""
        return self._step.optimizer

    @property
    def lr_scheduler(self) -> Any:
        """The scheduler, given or made, or None."""
        return self._step.lr_scheduler

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self._step.plan

    @property
    def device(self) -> torch.device:
        """Where the step runs."""
        return self._step.device

    @property
    def metrics(self) -> Mapping[str, Number]:
        """The last step's metrics, on the device; ``grad_norm`` among them when clipping."""
        return self._step.metrics

    @property
    def num_steps(self) -> int:
        """Updates done, skipped ones included."""
        return self._step.num_steps

    @property
    def num_skipped(self) -> int:
        """Updates that fp16 or ``nonfinite="skip"`` skipped. Synchronizes: Yes."""
        return self._step.num_skipped

    def __repr__(self) -> str:
        return repr(self._step).replace("TrainStep", "Trainer", 1)
