"""The loss function of a step, compiled as its plan says.

A step calls ``loss_fn(model, batch)``. Whole means that this call is compiled: the model, the loss
and all between them, so that the last layer is fused with the loss too. By regions means that
modules are compiled where they stand in the model, and the rest runs as it is. The model stays the
user's object either way, and whatever else calls it (evaluation, the averaged model) finds it as
usual.

The first steps compile, forward and backward, before a graph is captured. Under a graph nothing of
it is left in a step but its kernels: neither guards nor Python.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, final

import torch
from torch import nn
from typing_extensions import override

from torchfast._core.closing import Closing
from torchfast._core.decisions import Decision
from torchfast.compiler import (
    CompiledCallable,
    CompiledModule,
    CompileOptions,
    Mode,
    choose_regions,
    compile_callable,
    compile_decision,
)
from torchfast.plan import Plan

LossFn = Callable[[Any, Any], Any]

# What these modes add to another are graphs of torch's own, for which a graph of the whole step has
# no room.
WITHIN_A_GRAPH: dict[str, Mode] = {
    "reduce-overhead": "default",
    "max-autotune": "max-autotune-no-cudagraphs",
}


@final
class CompiledLoss(Closing):
    """Calls ``loss_fn(model, batch)`` with what a plan compiles of it.

    Args:
        model: What the step trains.
        loss_fn: As the user gave it; it is not changed.
        plan: What to compile, and what else is done to the step.
        device: Where it trains.

    Raises:
        ValueError: A region that the model does not have, or a model that is compiled already.

    Numerics: May differ by rounding.
    Synchronizes: While it compiles only.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFn, plan: Plan, device: torch.device) -> None:
        self._function = loss_fn
        self._compiled: CompiledCallable | CompiledModule | None = None
        options, self._decisions = _resolved(plan, device)
        if options is None:
            return
        choice = choose_regions(model, options.regions)
        # Named regions are compiled as named, though it be the model itself.
        if choice.is_whole and not isinstance(options.regions, tuple):
            self._compiled = self._function = compile_callable(
                loss_fn, options, model=model, context=plan.to_json()
            )
            self._decisions.append(compile_decision("applied", f"the loss function with {choice}"))
        else:
            fields = {f.name: getattr(options, f.name) for f in dataclasses.fields(options)}
            self._compiled = CompiledModule(model, **fields)

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        """Return what the loss function returns."""
        return self._function(model, batch)

    @property
    def is_compiled(self) -> bool:
        """Whether anything is to be compiled."""
        return self._compiled is not None

    def after_step(self) -> None:
        """Note that a step is done: see `CompiledModule.after_step`."""
        if self._compiled is not None:
            self._compiled.after_step()

    def decisions(self) -> list[Decision]:
        """Return what is compiled, what became of it, and what to do about the rest."""
        return [*self._decisions, *([] if self._compiled is None else self._compiled.decisions())]

    def counters(self) -> dict[str, int | float | str]:
        """Return graphs, breaks, recompiles, seconds and the use of caches; empty if none."""
        if self._compiled is None:
            return {}
        counted = self._compiled.report().counters
        return {
            f"compile_{name.removeprefix('compile_')}": number
            for name, number in counted.items()
            if number or name == "graphs"
        }

    @override
    def close(self) -> None:
        """Give the eager model back, and keep what was compiled."""
        if self._compiled is not None:
            self._compiled.close()


def _resolved(plan: Plan, device: torch.device) -> tuple[CompileOptions | None, list[Decision]]:
    """Return how to compile on this device, or None, and what there is to say about it."""
    options = plan.compile_options
    if options is None:
        return None, [compile_decision("left alone", "nothing is compiled")]
    if plan.compile == "auto" and device.type != "cuda":
        return None, [
            compile_decision(
                "left alone",
                f"'auto' compiles on CUDA devices only; compile=True does on {device.type} too",
            )
        ]
    in_graph = plan.graph_options is not None and device.type == "cuda"
    other = WITHIN_A_GRAPH.get(options.mode) if in_graph else None
    if other is None:
        return options, []
    why = f"mode {options.mode!r} makes graphs of its own; within the step's it is {other!r}"
    return dataclasses.replace(options, mode=other), [compile_decision("applied", why)]
