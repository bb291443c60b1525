"""float8 as a step has it: converted before the optimizer, measured and watched before a step."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, final

import torch
from torch import Tensor, nn

from torchfast._core.decisions import Decision
from torchfast.parallel import Sharding
from torchfast.plan import Plan
from torchfast.precision import Float8Linears, Float8Options, Float8Watch
from torchfast.precision.float8_choice import of_graphs
from torchfast.precision.float8_step import StepCheck, check_step

logger = logging.getLogger(__name__)


@final
class Float8Transform:
    """Applies ``Plan(precision="fp8")`` to a model.

    Args:
        model: Changed in place by `apply`.
        options: Which layers and how.
        device: Where it trains.
        sharding: The other ranks, and whether the model will be sharded behind this.
        is_compiled: Whether the plan compiles the layers.
        in_graph: Whether a graph will hold the step.

    Raises:
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
        sharding: Sharding,
        *,
        is_compiled: bool,
        in_graph: bool,
    ) -> None:
        self._model = model
        is_sharded = sharding.is_sharded
        if not is_sharded:  # on one rank there is nothing to gather
            options = dataclasses.replace(options, all_gather=False)
        # A trainer is often dropped as it is, as in a notebook, and its model trained by another.
        self.linears = Float8Linears(
            model,
            options,
            device,
            is_sharded=is_sharded,
            until_dropped=True,
            under_autocast=True,
        )
        self.watch = Float8Watch(model, self.linears, sharding if sharding.is_on else None)
        self._is_compiled, self._in_graph, self._sharding = is_compiled, in_graph, sharding
        self._is_checked = options.recipe != "auto"
        self._check: StepCheck | None = None
        self._unchecked: str | None = None

    @classmethod
    def of(
        cls, model: nn.Module, plan: Plan, device: torch.device, sharding: Sharding
    ) -> Float8Transform | None:
        """Return what a plan asks for, or None."""
        options = plan.float8_options
        if options is None:
            return None
        is_compiled = plan.compile is not False and (plan.compile != "auto" or device.type != "cpu")
        in_graph = plan.graph_options is not None and device.type == "cuda"
        return cls(model, options, device, sharding, is_compiled=is_compiled, in_graph=in_graph)

    def apply(self) -> None:
        """Convert the layers, unless their recipes are yet to be measured."""
        self.linears.apply()

    def behind_sharding(self) -> None:
        """Gather shards in float8, if that is wanted."""
        gather = self.linears.gather()
        if gather is not None:
            self._sharding.around_gradients = gather.scaled

    def before_step(self, step: int, forward: Callable[[], Tensor]) -> None:
        """Measure and convert before the first step; compare with bf16 before some.

        Args:
            step: The number of the update that is to come; the first is 1.
            forward: Runs the loss on the first micro-batch.
        """
        if self.linears.is_undecided:
            # Each rank has measured, and noise may tell them apart.
            agree = self._sharding.ranks.of_first
            timer = of_graphs if self._in_graph else None
            self.linears.decide(forward, compiled=self._is_compiled, agree=agree, timer=timer)
        self.watch.look(step, forward)

    def check_step(self, work: Callable[[], object]) -> None:
        """Have all that was measured in float8, or nothing, if the first step is faster so.

        Ranks that train together do not: each would run as many backwards as its own time allows,
        and wait for the others in one of them.

        Args:
            work: The step's forward and backward on the first batch, as the plan runs them.
        """
        if self._is_checked or self.linears.is_undecided:
            return
        self._is_checked = True
        if not self.linears.recipes:
            return
        if self._sharding.is_on:
            self._unchecked = "the whole step is not timed where several ranks train together"
            return
        self._check = check_step(
            work,
            self.linears.left,
            self._model,
            self.linears.device,
            widened=self.linears.widened if self.linears.others else None,
            budget_s=self.linears.options.budget_s,
            in_graph=self._in_graph,
        )
        if not self._check.is_kept:
            logger.info("float8 is taken back: %s", self._check)
            self.linears.give_up(f"{self._check}")
        elif self._check.takes_all:
            self.linears.widen()

    def state_dict(self) -> dict[str, Any]:
        """Return the recipes that were measured, if they were: a resumed run takes the same."""
        is_measured = self.linears.options.recipe == "auto" and not self.linears.is_undecided
        return {"float8": {"recipes": dict(self.linears.recipes)}} if is_measured else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the recipes that `state_dict` returned, where none were measured yet."""
        if "float8" in state and self.linears.take_over(state["float8"]["recipes"]):
            self._is_checked = True

    def decisions(self) -> list[Decision]:
        """Say which layers are in float8, what was measured, and how far the numbers drift."""
        receipt = self.linears.receipt
        measured = (
            []
            if receipt is None
            else [Decision(lever="float8 receipt", outcome="applied", detail=str(receipt))]
        )
        checked = [] if self._check is None else [self._check.decision()]
        if self._unchecked is not None:
            lever = "float8 step"
            checked = [Decision(lever=lever, outcome="left alone", detail=self._unchecked)]
        return [self.linears.decision(), *measured, *checked, *self.watch.decisions()]

    def close(self) -> None:
        """Put the plain layers back."""
        self._sharding.around_gradients = nullcontext
        self.linears.close()
