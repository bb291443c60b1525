"""The first half of a step: zero_grad, then forward and backward of each micro-batch.

Everything that a plan does to the forward comes together here: the batch on its device and in its
layout, autocast, the compiled loss, the scale of fp16. What a group of micro-batches leaves is the
gradient that the update is to apply: divided over the group, unscaled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchfast._core.batches import map_batch, to_device
from torchfast._core.loss import LossParts, Number, check_differentiable, detached, unpack_loss
from torchfast._core.phases import BACKWARD, FORWARD, phase
from torchfast._core.reachable import used_by
from torchfast._core.weights import combine
from torchfast.compiled_loss import CompiledLoss
from torchfast.memory import SplitBatch
from torchfast.memory.attention_watch import AttentionWatch
from torchfast.memory.before_step import BeforeStep
from torchfast.parallel import Sharding
from torchfast.precision import Convolutions, PrecisionPolicy, UpdateGuard
from torchfast.precision.convolutions import as_nchw
from torchfast.step_guards import StepSyncs

_NEEDS_NCHW = (
    "The plan's channels_last=True lays 4-d tensors out as NHWC, of which view(...) cannot join "
    "dimensions; use reshape(...), or leave it out: plan.replace(channels_last=False)."
)


@final
class Gradients:
    """Computes the gradients of a group of micro-batches.

    Args:
        model: What is trained.
        optimizer: Whose gradients are zeroed, and divided by weights.
        compiled: The loss function, as the plan compiles it and as the user gave it.
        precision: Autocast and matmul precision.
        layout: Whether 4-d batch tensors become NHWC, and how kernels are chosen.
        guard: What scales the loss, and what judges it.
        syncs: What finds lines that wait.
        device: Where batches go.
        max_grad_norm: Whether the norm will be among the metrics.
        sharding: The other ranks, over which gradients are averaged.
        forward: Returns the context of a forward, under which what it saves may go elsewhere.
        attention: Looks at the first forwards.

    Attributes:
        model: As given, and so are ``compiled``, ``device`` and ``sharding``.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        compiled: CompiledLoss,
        precision: PrecisionPolicy,
        layout: Convolutions,
        guard: UpdateGuard,
        syncs: StepSyncs,
        device: torch.device,
        max_grad_norm: float | None,
        sharding: Sharding,
        forward: Callable[[], AbstractContextManager[Any]] = nullcontext,
        attention: AttentionWatch | None = None,
    ) -> None:
        self.model, self._optimizer = model, optimizer
        self.compiled, self._precision, self._layout = compiled, precision, layout
        self._guard, self._syncs = guard, syncs
        self.device, self._max_grad_norm = device, max_grad_norm
        self.sharding, self._around_forward = sharding, forward
        self._attention = AttentionWatch() if attention is None else attention

    def __call__(self, group: Sequence[Any]) -> tuple[Tensor, dict[str, Number]]:
        """Return the mean loss over the group, detached, and its metrics; fill ``.grad``."""
        self.compiled.begin()
        with self._precision.step(), self._layout.measured(group), self._syncs:
            self._optimizer.zero_grad(set_to_none=True)
            self._guard.begin()
            shared = self.sharding.shared
            with self.sharding.around_gradients(), shared.opened():
                parts = [
                    self._backward(micro_batch, divisor=len(group), is_last=number == len(group))
                    for number, micro_batch in enumerate(group, start=1)
                ]
            with shared.opened():
                self.sharding.end_backward()
            loss, metrics = combine(
                parts,
                self.model,
                self._optimizer,
                self.device,
                self._max_grad_norm,
                self.sharding.mean,
            )
            # After the division, so that what fp16 judges finite is what will be applied.
            self._guard.end_backward([part.loss for part in parts])
            return loss, metrics

    def compute_loss(self, batch: Any, model: nn.Module) -> LossParts:
        """Run the loss function as it was given, without a backward."""

        def run() -> LossParts:
            moved = self._moved(batch)
            with self._precision.step(), phase(FORWARD), self._precision.forward():
                whole = self.sharding.whole
                return unpack_loss(whole(lambda: self.compiled.as_given(model, moved), model))

        return self._laid_out(run, ends_trial=False)

    def _moved(self, batch: Any) -> Any:
        moved = to_device(batch, self.device, channels_last=self._layout.active)
        # Whoever made it may have been told of NHWC.
        return map_batch(moved, as_nchw) if self._layout.is_undone else moved

    def _forward(self, batch: Any, *, is_last: bool) -> LossParts:
        look = self._attention

        def run() -> LossParts:
            moved = self._moved(batch)
            with phase(FORWARD), self._precision.forward(), self._around_forward(), look.forward():
                run = self.sharding.run
                return unpack_loss(run(lambda: self.compiled(self.model, moved), is_last=is_last))

        parts = self._laid_out(run)
        look.after_forward(parts.loss)
        return parts

    def _laid_out(self, run: Callable[[], LossParts], *, ends_trial: bool = True) -> LossParts:
        """Run a forward; where the first of the training cannot bear NHWC, once more without."""
        layout = self._layout
        before = None
        if layout.is_on_trial:
            before = BeforeStep(self.model, self.device, lambda: used_by(self.compiled.loss_fn))
        try:
            parts = run()
        except RuntimeError as error:
            if not layout.cannot_bear(error):
                raise
            if before is None:
                error.add_note(_NEEDS_NCHW)
                raise
        else:
            layout.is_on_trial &= not ends_trial
            return parts
        before.put_back()
        layout.step_aside(self._optimizer)
        return run()

    def _backward(self, batch: Any, *, divisor: float, is_last: bool) -> LossParts:
        """Run a micro-batch; in the backward of the last one the ranks come together."""
        if isinstance(batch, SplitBatch):  # its parts, each for its share of a mean
            last = len(batch.parts)
            results = [
                self._backward(part, divisor=divisor / share, is_last=is_last and number == last)
                for number, (part, share) in enumerate(batch, start=1)
            ]
            return batch.merge(results)
        loss, metrics, weight = self._forward(batch, is_last=is_last)
        check_differentiable(loss)
        if weight is None and divisor > 1:
            loss = loss / divisor
        with phase(BACKWARD):
            self._guard.scale(loss).backward()
        return LossParts(detached(loss), metrics, weight)
