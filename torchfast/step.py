"""TrainStep: one optimizer update, composed from the leaves as a Plan says.

A step is zero_grad, forward and backward of each micro-batch, clip, update, scheduler, in that
order; `TrainStep.forward_backward` and `TrainStep.update` are its two halves. Everything stays on
the device: the host reads no loss, no norm and no flag, so it can run ahead and keep the device's
queue full. Reading any of the tensors that come back (``float(loss)``) is what waits.

What is the user's stays the user's: the same model object with the same keys, the same optimizer
with Python floats in its groups, no hooks, no proxies.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from torchfast._core.arguments import (
    check_callable,
    check_int,
    check_positive,
    explain_keywords,
)
from torchfast._core.batches import as_group, to_device
from torchfast._core.building import (
    build_optimizer,
    build_scheduler,
    check_no_strays,
    claim,
    device_decision,
    move_to,
    release,
    scheduler_decision,
    untrained_decisions,
)
from torchfast._core.decisions import Decision, Report
from torchfast._core.device import resolve_device
from torchfast._core.errors import ClosedError
from torchfast._core.loss import (
    LossParts,
    Number,
    StepOutput,
    check_differentiable,
    detached,
    unpack_loss,
)
from torchfast._core.reachable import weak_method
from torchfast._core.rng import get_rng_state, set_rng_state
from torchfast._core.state import FORMAT, check_training_state
from torchfast._core.weights import combine
from torchfast.compiled_loss import CompiledLoss
from torchfast.ema import EMAOptions, WeightAverage
from torchfast.levers import apply_levers
from torchfast.plan import Plan
from torchfast.precision import ChannelsLast, LossScaler, PrecisionPolicy, SkipCounts, UpdateGuard

logger = logging.getLogger(__name__)

LossFn = Callable[[Any, Any], Any]
OptimizerSource = Optimizer | Callable[[Iterable[nn.Parameter]], Optimizer]
SchedulerSource = Any  # an LRScheduler, an object with step(), or optimizer -> either


@final
class TrainStep:
    """One optimizer update as a callable.

    Faster than a plain loop because the whole step is one graph where a graph can hold it, because
    nothing in it waits for the device, and as far as its plan goes (fused update, bf16, compiled).

    Args:
        model: Any module; trained in place.
        optimizer: A ``torch.optim.Optimizer``, or a callable ``parameters -> Optimizer``.
        loss_fn: ``loss_fn(model, batch)`` returns the loss; or ``(loss, metrics)``; or
            ``(loss, metrics, weight)``, where ``loss`` is a sum over items and ``weight`` their
            number. Metrics are scalars by name and are means over the batch.
        plan: A preset's name or a `Plan`.
        max_grad_norm: Clip the total gradient norm of ``model.parameters()`` at this.
        accumulate: Most micro-batches in a step.
        lr_scheduler: Stepped once after each update; or a callable ``optimizer -> scheduler``.
            A ReduceLROnPlateau is left to `Trainer.fit`, which steps it after evaluation.
        device: Where to train; None means where the parameters are. The model and the
            optimizer's state are moved there in place.
        ema: Keep an exponential moving average of the weights in `ema_model`: its decay, or
            `EMAOptions`.

    Raises:
        TypeError: An argument of the wrong kind.
        ValueError: No parameters, a parameter twice in the optimizer, a bad device or number.
        UnsupportedOptimizerError: The optimizer needs a closure (LBFGS).
        PlanError: A plan that does not exist or contradicts itself.

    Numerics: ``eager`` and ``exact`` are bitwise the plain loop; ``fast`` is close, as is
        ``nonfinite="skip"`` where it needs another form of the optimizer.
    Synchronizes: Never in a steady step, given batches on the device or in pinned memory.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> step = TrainStep(model, optimizer, lambda m, x: m(x).square().mean())
        >>> before = float(step(torch.ones(4, 3)))
        >>> float(step(torch.ones(4, 3))) < before
        True
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
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        check_callable("loss_fn", loss_fn, "loss_fn(model, batch)")
        self.plan = Plan.of(plan)
        self.accumulate = check_int("accumulate", accumulate, minimum=1)
        self.max_grad_norm = (
            None if max_grad_norm is None else check_positive("max_grad_norm", max_grad_norm)
        )
        self._ema = EMAOptions.of(ema)
        self.device = resolve_device(device, model)
        self.model = model
        self._loss_fn = loss_fn
        self._plan_name = plan if isinstance(plan, str) else repr(plan)

        self._precision = PrecisionPolicy(self.plan.precision_options, self.device)
        is_new = not isinstance(optimizer, Optimizer)
        if is_new and device is not None:
            model.to(self.device)
        self.optimizer = build_optimizer(optimizer, model)
        if not is_new and device is not None:
            move_to(self.device, model, self.optimizer)
        self.lr_scheduler = build_scheduler(lr_scheduler, self.optimizer)
        is_late = isinstance(self.lr_scheduler, ReduceLROnPlateau)
        self._steps_scheduler = lr_scheduler is not None and not is_late
        if self._precision.format == "fp16" and self.max_grad_norm is not None:
            check_no_strays(model, self.optimizer)
        nonfinite = self.plan.nonfinite_options
        can_skip = self._precision.format == "fp16" or nonfinite.action == "skip"
        self._average = WeightAverage(model, self._ema, self.device, can_skip=can_skip)
        release(self.optimizer)
        self._compiled = CompiledLoss(model, loss_fn, self.plan, self.device)
        # Nothing below refuses an argument, and nothing above has changed a form or a layout.
        self._layout = ChannelsLast(model, self.plan.channels_last)
        levers = apply_levers(self.optimizer, self.plan, model, self.device, can_skip=can_skip)
        self._form, self._graph_decisions = levers.form, levers.decisions
        self._layout.align(self.optimizer)
        self._average.align()
        scaler = (
            LossScaler(self.plan.precision_options, self.optimizer, self.device)
            if self._precision.format == "fp16"
            else None
        )
        self._guard = UpdateGuard(model, self.optimizer, self.device, nonfinite, scaler=scaler)
        # What nonfinite="skip" counts, on the device, for whoever reads late.
        self.skip_counts: SkipCounts | None = self._guard.counts if self._guard.is_on else None
        self._load_hook = self.optimizer.register_load_state_dict_post_hook(self._after_load)
        self._graph = levers.graphed(
            weak_method(self._whole),
            # What the guard decides between gradients and update cannot be parted from them.
            None if can_skip else weak_method(self._until_update),
            model,
            self.optimizer,
            [*([] if scaler is None else [scaler.held]), *self._average.named],
            loss_fn,
            self._guard.forget,
        )
        self._closed = False
        self.num_steps = 0
        self.num_epochs = 0  # counted by fit(), for set_epoch
        self.metrics: dict[str, Number] = {}
        in_place = self._layout.active or self._compiled.changes_model or self._graph is not None
        if in_place or self._form.form != "as_given":
            claim(self.optimizer, self.close)
        for decision in self._decisions():
            if decision.outcome == "stepped aside":
                logger.warning("%s: %s", decision.lever, decision.detail)

    def __call__(self, batch: Any) -> Tensor:
        """Run one update and return its loss.

        Args:
            batch: What ``loss_fn`` takes; a `MicroBatches` where ``accumulate`` is above 1.
                Tensors elsewhere are copied to the device, asynchronously from pinned memory:
                do not overwrite a pinned batch until the step that took it is done.

        Returns:
            The mean loss over the group, shape ``()``, on the device, detached.

        Raises:
            TypeError: A bare batch where `MicroBatches` is due, or a wrong return of loss_fn.
            ValueError: More micro-batches than ``accumulate``, or a loss that is no scalar.
            LossError: A loss without a graph.
            ClosedError: After `close`.
        """
        group = self._group(batch)
        with self._average.around_step():
            if self._graph is None:
                output = self._whole(group)
            else:
                is_whole = self._graph.is_whole
                output = self._graph(group)
                if not is_whole:
                    with self._precision.step():
                        self.optimizer.step()
                    self._precision.after_update()
                    self._average.update(None)  # what can be skipped is not parted from the graph
        self.metrics = dict(output.metrics)
        self._after_update(output.skipped)
        return output.loss

    def forward_backward(self, batch: Any) -> Tensor:
        """Run the first half of a step: zero_grad, forward, backward. Always eager.

        Afterwards ``.grad`` holds the gradient that the update will clip and apply: divided over
        the group and, under fp16, unscaled. Under ``nonfinite="skip"`` a loss that is not finite
        is noted here; gradients are judged by `update`, as they are then.
        """
        loss, self.metrics = self._first_half(self._group(batch))
        if self._graph is not None:
            self._graph.settle()
        return loss

    def update(self) -> None:
        """Run the second half of a step: clip, optimizer, scheduler. Always eager."""
        self._check_open()
        with self._average.around_step():
            norm, skipped = self._second_half()
        if norm is not None:
            self.metrics["grad_norm"] = norm
        self._after_update(skipped)

    def compute_loss(self, batch: Any, model: nn.Module | None = None) -> LossParts:
        """Run ``loss_fn`` as it was given, on the model or on its average, without a backward."""
        with self._precision.step():
            return self._forward(batch, self._loss_fn, self.model if model is None else model)

    @property
    def ema_model(self) -> nn.Module | None:
        """The averaged model, or None without ``ema``: see ``Trainer.ema_model``."""
        return self._average.current()

    @property
    def num_skipped(self) -> int:
        """Updates skipped under fp16 or ``nonfinite="skip"``. Synchronizes: Yes."""
        return self._guard.counts.read().num_skipped if self._guard.can_skip else 0

    def check_skips(self) -> None:
        """Raise if ``stop_after`` updates in a row were skipped: see ``Trainer.check_skips``."""
        self._guard.check_skips()

    @property
    def channels_last(self) -> bool:
        """Whether 4-d batch tensors are laid out as NHWC."""
        return self._layout.active

    def state_dict(self) -> dict[str, Any]:
        """Return model, optimizer, scheduler, loss scale, average, step count and generators.

        Optimizer state is in the form as given, so its part loads into a plain loop. Tensors
        are the live ones, as in torch: save at once, or deepcopy. A file of it loads with
        ``torch.load(..., weights_only=True)``.

        Synchronizes: Yes.
        """
        scheduler_state = getattr(self.lr_scheduler, "state_dict", dict)
        return {
            "format": FORMAT,
            "plan": self.plan.to_json(),
            "num_steps": self.num_steps,
            "num_epochs": self.num_epochs,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "lr_scheduler": None if self.lr_scheduler is None else scheduler_state(),
            **self._guard.state_dict(),
            **self._average.state_dict(),
            "rng": get_rng_state(self.device),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what `state_dict` returned, the global random generators included.

        All checks come first, so a state that does not fit changes nothing. The plan may differ
        from the one it was saved under.

        Raises:
            TypeError: Not a mapping.
            StateMismatchError: A newer format, or keys, shapes or parts that do not fit.
        """
        self._check_open()
        check_training_state(state, self.model, self.optimizer, self.lr_scheduler)
        self._average.check_state_dict(state)
        self.model.load_state_dict(state["model"])
        # A copy: torch keeps tensors that need no conversion, so two trainers that load one
        # state would share their moments.
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        if hasattr(self.lr_scheduler, "load_state_dict"):
            self.lr_scheduler.load_state_dict(copy.deepcopy(state["lr_scheduler"]))
        self._guard.load_state_dict(state)
        self._average.load_state_dict(state)
        self.num_steps = state["num_steps"]
        self.num_epochs = state["num_epochs"]
        set_rng_state(state["rng"], self.device)

    def report(self) -> Report:
        """Return what the plan did, what stepped aside and why.

        Synchronizes: Under fp16 and ``nonfinite="skip"``, to read what was skipped.
        """
        counters = {"steps": self.num_steps, **self._guard.counters(), **self._compiled.counters()}
        if self._graph is not None:
            counters |= self._graph.counters()
        title = f"plan {self._plan_name!r} on {self.device}"
        return Report(title=title, decisions=tuple(self._decisions()), counters=counters)

    def close(self) -> None:
        """Put the optimizer's form and the model's layout back; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._load_hook.remove()
        with ExitStack() as stack:  # all of it, whatever fails, the last first
            stack.callback(self._average.align)
            stack.callback(self._layout.close, self.optimizer)
            stack.callback(self._compiled.close)
            stack.callback(self._form.close)
            if self._graph is not None:
                stack.callback(self._graph.close)

    def __repr__(self) -> str:
        return (
            f"TrainStep({type(self.model).__name__}, {type(self.optimizer).__name__}, "
            f"plan={self.plan!r}, accumulate={self.accumulate}, device={str(self.device)!r}"
            f"{'' if self._ema is None else f', ema={self._ema!r}'})"
        )

    # --- the parts of a step ---------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this step was closed; build a new Trainer to go on training")

    def _group(self, batch: Any) -> tuple[Any, ...]:
        self._check_open()
        group = as_group(batch, self.accumulate)
        if self._compiled.is_undecided:
            self._compiled.decide(lambda: self._first_half(group)[0], group)
        return group

    def _whole(self, group: Sequence[Any]) -> StepOutput:
        """Run a step on the device: what a graph can hold, and nothing else."""
        loss, metrics = self._first_half(group)
        norm, skipped = self._second_half()
        if norm is not None:
            metrics = {**metrics, "grad_norm": norm}
        return StepOutput(loss, metrics, skipped)

    def _until_update(self, group: Sequence[Any]) -> StepOutput:
        """Run a step on the device but for the update itself."""
        loss, metrics = self._first_half(group)
        norm = self._clip()
        if norm is not None:
            metrics = {**metrics, "grad_norm": norm}
        return StepOutput(loss, metrics, None)

    def _first_half(self, group: Sequence[Any]) -> tuple[Tensor, dict[str, Number]]:
        with self._precision.step():
            self.optimizer.zero_grad(set_to_none=True)
            self._guard.begin()
            parts = [self._backward(micro_batch, len(group)) for micro_batch in group]
            loss, metrics = combine(
                parts, self.model, self.optimizer, self.device, self.max_grad_norm
            )
            # After the division, so that what fp16 judges finite is what will be applied.
            self._guard.end_backward([part.loss for part in parts])
            return loss, metrics

    def _second_half(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradient norm and whether the update was skipped, where there are such."""
        with self._precision.step():
            self._guard.judge()
            norm = self._clip()
            with nullcontext() if self._graph is None else self._graph.rates_on_device():
                skipped = self._guard.update(norm)
        self._precision.after_update()
        self._average.update(skipped)
        return norm, skipped

    def _clip(self) -> Tensor | None:
        if self.max_grad_norm is None:
            return None
        return clip_grad_norm_(self.model.parameters(), self.max_grad_norm)

    def _after_update(self, skipped: Tensor | None) -> None:
        """Do what the host does after an update."""
        self.num_steps += 1
        self._compiled.after_step()
        self._average.after_update()
        self._guard.note(skipped, self.num_steps)
        if self._steps_scheduler:
            self.lr_scheduler.step()

    def _forward(self, batch: Any, loss_fn: LossFn, model: nn.Module) -> LossParts:
        moved = to_device(batch, self.device, channels_last=self._layout.active)
        with self._precision.forward():
            return unpack_loss(loss_fn(model, moved))

    def _backward(self, batch: Any, num_micro_batches: int) -> LossParts:
        loss, metrics, weight = self._forward(batch, self._compiled, self.model)
        check_differentiable(loss)
        if weight is None and num_micro_batches > 1:
            loss = loss / num_micro_batches
        self._guard.scale(loss).backward()
        return LossParts(detached(loss), metrics, weight)

    def _decisions(self) -> list[Decision]:
        return [
            device_decision(self.device, self.model),
            self._precision.decision,
            self._layout.decision,
            *self._compiled.decisions(),
            self._form.decision,
            *self._guard.decisions(),
            *self._average.decisions(),
            *self._graph_decisions,
            *([] if self._graph is None else self._graph.decisions()),
            scheduler_decision(self.lr_scheduler, is_stepped=self._steps_scheduler),
            *untrained_decisions(self.model, self.optimizer),
        ]

    def _after_load(self, optimizer: Optimizer) -> None:
        self._form.apply()
        self._layout.align(optimizer)
