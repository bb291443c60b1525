"""TrainStep: one optimizer update, composed from the leaves as a Plan says.

A step is zero_grad, forward and backward of each micro-batch, clip, update, scheduler, in that
order; `TrainStep.forward_backward` and `TrainStep.update` are its two halves. Everything stays on
the device: the host reads no loss, no norm and no flag, so it can run ahead and keep the device's
queue full. Reading any of the tensors that come back (``float(loss)``) is what waits.

What is the user's stays the user's: the same model object with the same keys, the same optimizer
with Python floats in its groups, no hooks, no proxies.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchfast._core.arguments import check_int, check_positive, explain_keywords
from torchfast._core.batches import StepBatches
from torchfast._core.building import claim, device_decision, parameter_decisions, scheduler_decision
from torchfast._core.decisions import Decision, Report
from torchfast._core.device import resolve_device
from torchfast._core.errors import STEP_CLOSED, ClosedError
from torchfast._core.loss import LossParts, Number, SeveralOutput, check_loss_fn, with_norm
from torchfast._core.reachable import weak_hook, weak_method
from torchfast.compiled_loss import CompiledLoss, LossFn
from torchfast.ema import EMAOptions
from torchfast.gradients import Gradients
from torchfast.levers import apply_levers
from torchfast.memory import StepOffload
from torchfast.parallel import Ranks, start_ranks
from torchfast.plan import Plan
from torchfast.precision import Convolutions, LossScaler, PrecisionPolicy, SkipCounts, UpdateGuard
from torchfast.preparation import OptimizerSource, SchedulerSource, prepare
from torchfast.step_guards import StepSyncs
from torchfast.step_inputs import StepInputs
from torchfast.step_memory import StepMemory
from torchfast.training_state import TrainingState
from torchfast.transforms import ModelTransforms
from torchfast.unrolled import UnrolledSteps
from torchfast.update import Update

logger = logging.getLogger(__name__)


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
        check_loss_fn(loss_fn)
        self.plan = Plan.of(plan)
        self.memory = StepMemory(self.plan, model, loss_fn)  # before anything is moved to a device
        self.accumulate = check_int("accumulate", accumulate, minimum=1)
        self.max_grad_norm = (
            None if max_grad_norm is None else check_positive("max_grad_norm", max_grad_norm)
        )
        self._ema, self._closed = EMAOptions.of(ema), False
        options = self.plan.shard_options
        self.ranks = Ranks() if options is None else start_ranks(timeout_s=options.timeout_s)
        self.device = resolve_device(self.ranks.device_for(device, model), model)
        self.model = model
        self._plan_name = plan if isinstance(plan, str) else repr(plan)
        self._precision = PrecisionPolicy(self.plan.precision_options, self.device)
        self.num_steps = self.num_epochs = 0  # epochs are counted by fit(), for set_epoch
        self.metrics: dict[str, Number] = {}
        self._transforms = ModelTransforms(model, self.plan, self.device, self.ranks)
        self.sharding = self._transforms.sharding
        self._offload = StepOffload(self.plan.offload_options)
        try:
            with self.sharding.heard():
                self._build(optimizer, loss_fn, lr_scheduler, is_moved=device is not None)
        except BaseException:
            self._transforms.close()
            self._offload.put_back()
            raise
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
            OutOfMemoryError: The step does not fit into memory.
            ClosedError: After `close`.
        """
        with self.sharding.heard():
            self._check_open()
            group = self._inputs.of_step(batch, self.num_steps + 1)
            with self._average.around_step():
                output = self.memory.run(self._update.step, group)
            self.metrics = dict(output.metrics)
            self._after_update(output.skipped)
            return output.loss

    def steps(self, batches: StepBatches[Any]) -> Tensor:
        """Run several updates, in one replay where a graph can hold them; see `Trainer.steps`."""
        if (output := self.together(batches)) is None:
            return torch.stack([self(batch) for batch in batches])
        return output.losses

    def together(self, batches: StepBatches[Any]) -> SeveralOutput | None:
        """Run several updates in one replay; return None, with nothing done, where none can."""
        self._check_open()
        output = self.unrolled(self._inputs.of_steps(batches))
        if output is not None:
            self.metrics = output.metrics_of(-1)
            for skipped in output.flags():
                self._count_update(skipped)
        return output

    def forward_backward(self, batch: Any) -> Tensor:
        """Run the first half of a step: zero_grad, forward, backward. Always eager.

        Afterwards ``.grad`` holds the gradient that the update will clip and apply: divided over
        the group and, under fp16, unscaled. Under ``nonfinite="skip"`` a loss that is not finite
        is noted here; gradients are judged by `update`, as they are then.
        """
        with self.sharding.heard():
            self._check_open()
            group = self._inputs.of_step(batch, self.num_steps + 1)
            loss, self.metrics = self.memory.run(self._gradients, group)
            if self._graph is not None:
                self._graph.settle()
            return loss

    def update(self) -> None:
        """Run the second half of a step: clip, optimizer, scheduler. Always eager."""
        with self.sharding.heard():
            self._check_open()
            with self._average.around_step():
                norm, skipped = self.memory.run_update(self._update)
            self.metrics = with_norm(self.metrics, norm)
            self._after_update(skipped)

    def compute_loss(self, batch: Any, model: nn.Module | None = None) -> LossParts:
        """Run ``loss_fn`` as it was given, on the model or on its average, without a backward."""
        return self._gradients.compute_loss(batch, self.model if model is None else model)

    @property
    def ema_model(self) -> nn.Module | None:
        """The averaged model, or None without ``ema``: see ``Trainer.ema_model``."""
        return self._offload.averaged(self._average.current())

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

        Parameters that only the optimizer holds are in it by their places there. Optimizer state is
        in the form as given, so its part loads into a plain loop. Tensors are the live ones, as in
        torch: save at once, or deepcopy. ``torch.load(..., weights_only=True)`` loads a file of it.

        Synchronizes: Yes.
        """
        return self.state.save(
            plan=self.plan.to_json(), num_steps=self.num_steps, num_epochs=self.num_epochs
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what `state_dict` returned, the global random generators included.

        All checks come first, so a state that does not fit changes nothing. The plan may differ
        from the one it was saved under.

        Raises:
            TypeError: Not a mapping.
            StateMismatchError: A newer format, or keys, shapes or parts that do not fit.
        """
        self._check_open()
        self.state.load(state)
        self.num_steps = state["num_steps"]
        self.num_epochs = state["num_epochs"]

    def phase_times(self) -> list[dict[str, float]]:
        """Return what phases took in replays; see `CUDAGraphStep.phase_times`."""
        return [] if self._graph is None else self._graph.phase_times()

    def report(self) -> Report:
        """Return what the plan did, what stepped aside and why.

        Synchronizes: Under fp16 and ``nonfinite="skip"``, to read what was skipped.
        """
        counters = {"steps": self.num_steps, **self._guard.counters(), **self._compiled.counters()}
        counters |= self._update.counters() | self._offload.counters(self.optimizer)
        counters |= self.memory.counters() | self.unrolled.counters()
        counters |= self.syncs.counters() | ({} if self._graph is None else self._graph.counters())
        title, decisions = f"plan {self._plan_name!r} on {self.device}", tuple(self._decisions())
        return Report(title=title, decisions=decisions, counters=counters)

    def close(self) -> None:
        """Put the optimizer's form and the model's layout back; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._load_hook.remove()
        with ExitStack() as stack:  # all of it, whatever fails, the last first
            stack.callback(self._average.align)
            stack.callback(self._offload.close, self.optimizer)
            stack.callback(self._transforms.close)
            stack.callback(self._layout.close, self.optimizer)
            stack.callback(self._compiled.close)
            stack.callback(self._update.close)
            stack.callback(self.syncs.close)
            stack.callback(self.memory.close)
            stack.callback(self._form.close)
            if self._graph is not None:
                stack.callback(self._graph.close)

    def __repr__(self) -> str:
        return (
            f"TrainStep({type(self.model).__name__}, {type(self.optimizer).__name__}, "
            f"plan={self.plan!r}, accumulate={self.accumulate}, device={str(self.device)!r}"
            f"{'' if self._ema is None else f', ema={self._ema!r}'})"
        )

    def _build(
        self,
        source: OptimizerSource,
        loss_fn: LossFn,
        scheduler: SchedulerSource,
        *,
        is_moved: bool,
    ) -> None:
        """Put the step together: what refuses an argument first, then what changes something."""
        model = self.model
        given = {"accumulate": self.accumulate, "max_grad_norm": self.max_grad_norm}
        self.sharding.check_alike(self.plan.shared | given | {"ema": self._ema})
        self.memory.check_ranks(model, self.sharding)
        self.optimizer, self.lr_scheduler, self._schedule, self._average = prepare(
            model,
            source,
            scheduler,
            plan=self.plan,
            transforms=self._transforms,
            offload=self._offload,
            ema=self._ema,
            device=self.device,
            is_moved=is_moved,
            clips=self.max_grad_norm is not None,
        )
        is_fp16, nonfinite = self._precision.format == "fp16", self.plan.nonfinite_options
        can_skip = is_fp16 or nonfinite.action == "skip"
        self._offload.begin(model, self.device)
        self._compiled = CompiledLoss(model, loss_fn, self.plan, self.device)
        # Nothing below refuses an argument, and nothing above has changed a form or a layout.
        last, tried = self.plan.channels_last, self.plan.cudnn_benchmark
        self._layout = Convolutions(model, self.device, channels_last=last, benchmark=tried)
        levers = apply_levers(
            self.optimizer, self.plan, model, self.device, self._offload.no_graph, can_skip=can_skip
        )
        self._form, self._graph_decisions = levers.form, levers.decisions
        self._layout.align(self.optimizer)
        self._average.align()
        self._layout.followers.append(self._average.align)
        options, any_rank = self.plan.precision_options, self.sharding.any
        scaler = LossScaler(options, self.optimizer, self.device) if is_fp16 else None
        self._guard = UpdateGuard(
            model, loss_fn, self.optimizer, self.device, nonfinite, scaler=scaler, any_rank=any_rank
        )
        # What nonfinite="skip" counts, on the device, for whoever reads late.
        self.skip_counts: SkipCounts | None = self._guard.counts if self._guard.is_on else None
        self.syncs = StepSyncs(self.plan, self.device)  # what plan.sync_guard asks for
        self._gradients = Gradients(
            model,
            self.optimizer,
            compiled=self._compiled,
            precision=self._precision,
            layout=self._layout,
            guard=self._guard,
            syncs=self.syncs,
            device=self.device,
            max_grad_norm=self.max_grad_norm,
            sharding=self.sharding,
            forward=self._offload.forward,
            attention=self.memory.attention,
        )
        self._update = Update(
            self.optimizer,
            self.plan.compile_options,
            guard=self._guard,
            precision=self._precision,
            average=self._average,
            syncs=self.syncs,
            max_grad_norm=self.max_grad_norm,
            sharding=self.sharding,
            gradients=self._gradients,
        )
        parts = self._guard, self._average, self._transforms, self.device, loss_fn
        self.state = TrainingState(model, self.optimizer, self.lr_scheduler, *parts)
        self.memory.watch(
            model, self.optimizer, self._guard, self._average, self._offload, self._gradients
        )
        hook = weak_hook(self._after_load)
        self._load_hook = self.optimizer.register_load_state_dict_post_hook(hook)
        self._graph = levers.graphed(
            weak_method(self._update.whole),
            # What the guard decides between gradients and update cannot be parted from them.
            None if can_skip else weak_method(self._update.until_update),
            model,
            self.optimizer,
            [*([] if scaler is None else [scaler.held]), *self._average.named],
            loss_fn,
            self.memory.after_failed_capture,
            self.memory.after_trial,
            self.sharding,
        )
        self._update.run_through(self._graph, self._compiled, self.device)
        self._inputs = StepInputs(
            self._gradients, self._transforms, self.memory, self._graph, self.accumulate
        )
        self.unrolled = UnrolledSteps(  # what runs several steps in one replay
            self.plan,
            self.optimizer,
            self.lr_scheduler if self._schedule else None,
            average=self._average,
            compiled=self._compiled,
            memory=self.memory,
            graph=self._graph,
        )
        in_place = self._layout.active or self._compiled.changes_model or self._graph is not None
        in_place |= self._transforms.changes_model or self._offload.moves_parameters
        if in_place or self._form.form != "as_given":
            claim(self.optimizer, self.close)

    # --- the parts of a step ---------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(STEP_CLOSED)

    def _after_update(self, skipped: Tensor | None) -> None:
        """Do what the host does after an update."""
        self._count_update(skipped)
        if self._schedule is not None:
            self._schedule.step()

    def _count_update(self, skipped: Tensor | None) -> None:
        self.num_steps += 1
        self._compiled.after_step()
        self._average.after_update()
        self._guard.note(skipped, self.num_steps)

    def _decisions(self) -> list[Decision]:
        return [
            device_decision(self.device, self.model),
            self._precision.decision,
            *self._transforms.decisions(),
            *self._offload.decisions(self.optimizer),
            *self._layout.decisions(),
            *self._compiled.decisions(),
            self._form.decision,
            *self._update.decisions(),
            *self._guard.decisions(),
            *self._average.decisions(),
            *self.syncs.decisions(),
            *self.memory.decisions(),
            *self._graph_decisions,
            *([] if self._graph is None else self._graph.decisions()),
            *self.unrolled.decisions(),
            scheduler_decision(self.lr_scheduler, is_stepped=self._schedule is not None),
            *parameter_decisions(self.model, self.optimizer),
        ]

    def _after_load(self, optimizer: Optimizer) -> None:
        self._form.apply()
        self._layout.align(optimizer)
