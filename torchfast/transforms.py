"""What a plan does to a model before its optimizer exists, in the one order that is right.

float8, then recompute, then compilation by region, then sharding, then the optimizer, then the
graph. Each stands on the one before: float8 changes the layers that recompute and compilation
enclose, and sharding replaces the parameters, so an optimizer that was built before it would train
tensors that nobody uses any more, without an error.

Compilation by region changes no parameter and is in place, so `CompiledLoss` applies it, behind
this; `ModelTransforms` has the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchfast._core.decisions import Decision
from torchfast.parallel import Ranks, Sharding
from torchfast.plan import Plan
from torchfast.precision import PrecisionPolicy, check_none_foreign, foreign_decisions

if TYPE_CHECKING:
    from torchfast.transform_float8 import Float8Transform

DTYPES_16_BIT = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


class Transform(Protocol):
    """One change to a model, in place. Its constructor checks, and changes nothing."""

    @property
    def needs_factory(self) -> str | None:
        """Why the optimizer must be built after it; None if it need not."""

    def apply(self) -> None:
        """Change the model."""

    def decisions(self) -> list[Decision]:
        """Say what was done, and what was not and why."""

    def close(self) -> None:
        """Put the model back; a second call does nothing, nor one before `apply`."""


@final
class ModelTransforms:
    """All changes that a plan makes to a model before the optimizer is built.

    Args:
        model: Changed in place by `apply`.
        plan: What to do.
        device: Where it trains.
        ranks: With whom.

    Attributes:
        sharding: What a step asks about the other ranks.

    Raises:
        PlanError: What the plan asks for cannot be done to this model. Nothing has changed then.
    """

    def __init__(
        self, model: nn.Module, plan: Plan, device: torch.device, ranks: Ranks | None = None
    ) -> None:
        number_format = PrecisionPolicy(plan.precision_options, device).format
        check_none_foreign(model, number_format)
        self._model = model
        gather_dtype = DTYPES_16_BIT.get(number_format)
        self.sharding = Sharding(model, plan.shard_options, ranks or Ranks(), device, gather_dtype)
        self._float8: Float8Transform | None = None
        self._parts: list[Transform] = []  # in the order in which they apply
        # Imported by those who want them: few plans do.
        if plan.float8_options is not None:
            from torchfast.transform_float8 import Float8Transform

            self._float8 = Float8Transform.of(model, plan, device, self.sharding)
            self._parts += [] if self._float8 is None else [self._float8]
        if (recompute := plan.recompute_options) is not None:
            is_compiled = plan.compile_options is not None and (
                plan.compile != "auto" or device.type == "cuda"
            )
            from torchfast.memory.recompute_transform import RecomputeTransform

            self._parts.append(RecomputeTransform(model, recompute, is_compiled=is_compiled))
        self._parts.append(self.sharding)

    @property
    def needs_factory(self) -> str | None:
        """Why the optimizer must be built after `apply`; None if it need not."""
        return next((part.needs_factory for part in self._parts if part.needs_factory), None)

    def apply(self) -> None:
        """Change the model; if that fails, it is as it was."""
        try:
            for part in self._parts:
                part.apply()
            if self._float8 is not None:
                self._float8.behind_sharding()
        except BaseException:
            self.close()
            raise

    def as_given(self) -> AbstractContextManager[None]:
        """Let layers be of the classes that they were given in, with the parameters of now.

        For callables of the user's that look at layers: one that decays the weights of what
        ``type(layer) is nn.Linear`` would find none of those that are converted.
        """
        return nullcontext() if self._float8 is None else self._float8.linears.left()

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raise if an optimizer holds other weights than the layers that are converted.

        Raises:
            PlanError: It does, and would train tensors that nothing reads.
        """
        if self._float8 is not None:
            self._float8.linears.check_optimizer(optimizer)

    def before_step(self, step: int, forward: Callable[[], Tensor]) -> None:
        """Do what needs a batch: measure, convert, compare.

        Args:
            step: The number of the update that is to come; the first is 1.
            forward: Runs the loss on the first micro-batch, as the plan does but not compiled.
        """
        if self._float8 is not None:
            self._float8.before_step(step, forward)

    def check_step(self, work: Callable[[], object]) -> None:
        """Take back what makes the first step slower.

        Args:
            work: Its forward and backward, as the plan runs them.
        """
        if self._float8 is not None:
            self._float8.check_step(work)

    def state_dict(self) -> dict[str, Any]:
        """Return what was measured, and has to be the same when a run is resumed."""
        return {} if self._float8 is None else self._float8.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` returned in place of measuring it; a state may have none of it."""
        if self._float8 is not None:
            self._float8.load_state_dict(state)

    def decisions(self) -> list[Decision]:
        """Say what was done, and what was not and why."""
        own = () if self._float8 is None else self._float8.linears.modules().values()
        decisions = [decision for part in self._parts for decision in part.decisions()]
        return [*decisions, *foreign_decisions(self._model, own)]

    @property
    def looks_at_batches(self) -> bool:
        """Whether `before_step` may do something."""
        return self._float8 is not None

    @property
    def changes_model(self) -> bool:
        """Whether there is anything to put back."""
        return self.sharding.is_on or len(self._parts) > 1

    def close(self) -> None:
        """Put the model back, the last change first."""
        with ExitStack() as stack:
            for part in self._parts:
                stack.callback(part.close)
