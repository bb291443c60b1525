"""float8 as a step has it: converted before the optimizer, measured and watched before a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchfast._core.decisions import Decision
from torchfast._core.errors import PlanError
from torchfast.plan import Plan
from torchfast.precision import Float8Linears, Float8Options, Float8Watch


@final
class Float8Transform:
    """Applies ``Plan(precision="fp8")`` to a model.

    Args:
        model: Changed in place by `apply`.
        options: Which layers and how.
        device: Where it trains.
        is_compiled: Whether the plan compiles the layers.
        is_sharded: Whether the model will be sharded behind this.
        are_many: Whether other ranks train replicas, which must compute alike.

    Raises:
        PlanError: Recipes to be measured in a sharded model.
        UnsupportedDeviceError: The device cannot multiply in float8.
        ImportError: torchao is missing or too old.
    """

    # Parameters keep their identity, so an optimizer may be there before.
    needs_factory: str | None = None

    def __init__(
        self,
        model: nn.Module,
        options: Float8Options,
        device: torch.device,
        *,
        is_compiled: bool,
        is_sharded: bool,
        are_many: bool,
    ) -> None:
        if is_sharded and options.recipe == "auto":
            raise PlanError(
                "recipe='auto' measures layers at the first step, when a sharded model can no "
                "longer be converted; name one: Float8Options(recipe='tensorwise')"
            )
        self.linears = Float8Linears(model, options, device)
        self.watch = Float8Watch(model, self.linears)
        self._is_compiled, self._is_sharded = is_compiled, is_sharded
        self._are_many = are_many

    @classmethod
    def of(
        cls, model: nn.Module, plan: Plan, device: torch.device, *, is_sharded: bool
    ) -> Float8Transform | None:
        """Return what a plan asks for, or None."""
        options = plan.float8_options
        if options is None:
            return None
        is_compiled = plan.compile is not False and (plan.compile != "auto" or device.type != "cpu")
        are_many = plan.shard_options is not None and dist.is_initialized()
        return cls(
            model,
            options,
            device,
            is_compiled=is_compiled,
            is_sharded=is_sharded,
            are_many=are_many,
        )

    def apply(self) -> None:
        """Convert the layers, unless their recipes are yet to be measured."""
        self.linears.apply()

    def before_step(self, step: int, forward: Callable[[], Tensor]) -> None:
        """Measure and convert before the first step; compare with bf16 before some.

        Args:
            step: The number of the update that is to come; the first is 1.
            forward: Runs the loss on the first micro-batch.
        """
        if self.linears.is_undecided:
            agree = _first_ranks if self._are_many else dict
            self.linears.decide(forward, compiled=self._is_compiled, agree=agree)
        self.watch.look(step, forward)

    def decisions(self) -> list[Decision]:
        """Say which layers are in float8, what was measured, and how far the numbers drift."""
        receipt = self.linears.receipt
        measured = (
            []
            if receipt is None
            else [Decision(lever="float8 receipt", outcome="applied", detail=str(receipt))]
        )
        return [self.linears.decision(), *measured, *self.watch.decisions()]

    def close(self) -> None:
        """Put the plain layers back; a sharded model keeps these, to which it is bound."""
        if not self._is_sharded:
            self.linears.close()


def _first_ranks(recipes: dict[str, str]) -> dict[str, str]:
    """Return what the first rank chose: each has measured, and noise may tell them apart."""
    chosen = [recipes]
    dist.broadcast_object_list(chosen, src=0)
    return chosen[0]
