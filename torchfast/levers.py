"""How a plan's levers on the optimizer are applied: its form, and whether a graph holds its update.

The two hang together. A graph needs step counters and learning rates on the device, which only some
forms have; and a form may only be chosen for the graph's sake where the plan lets it change the
numbers, or where it changes none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from torchfast import graphs
from torchfast._core.building import at_work
from torchfast._core.decisions import Decision
from torchfast.graphs import (
    CUDAGraphOptions,
    GraphForm,
    OptimizerForm,
    graph_decision,
    graph_form,
)
from torchfast.parallel import Sharding
from torchfast.plan import Plan
from torchfast.precision import as_low_bit

if TYPE_CHECKING:
    from torchfast.graphs import GraphedUpdate
    from torchfast.graphs.graph_form import Numerics
    from torchfast.graphs.graphed_update import Half

# DistributedDataParallel builds its buckets anew behind its first step, and times some later ones.
WARM_UP_OF_REPLICAS = 11
# What computes something else than the plain step, to the bit.
_ONLY_CLOSE = ("precision", "channels_last", "cudnn_benchmark", "optimizer", "compile")
# The optimizer makes its state in the first step, and its update is compiled in the second.
WARM_UP_OF_COMPILED_UPDATES = 2


class Levers(NamedTuple):
    """What became of the optimizer, and what can be captured.

    Attributes:
        form: Its form.
        decisions: What was decided about the graph.
        options: How to capture; None if nothing is captured.
        in_graph: How its update is part of the graph; None if it is not.
    """

    form: OptimizerForm
    decisions: list[Decision]
    options: CUDAGraphOptions | None = None
    in_graph: GraphForm | None = None

    def graphed(
        self,
        whole: Half,
        until_update: Half | None,
        model: nn.Module,
        optimizer: Optimizer,
        named: Sequence[object],
        loss_fn: Callable[..., Any],
        after_failure: Callable[[], None],
        after_trial: Callable[[], None],
        sharding: Sharding,
    ) -> GraphedUpdate | None:
        """Return what runs a step through a graph, or None if nothing is captured."""
        if self.options is None:
            return None
        graphed = graphs.GraphedUpdate(
            whole,
            until_update,
            model=model,
            optimizer=optimizer,
            named=named,
            loss_fn=loss_fn,
            options=self.options,
            rate_dtype=None if self.in_graph is None else self.in_graph.rate_dtype,
            device=next(model.parameters()).device,
            after_failure=after_failure,
            after_trial=after_trial,
            ranks=sharding.ranks.group,
        )
        sharding.build_on(graphed.side_stream)
        return graphed


def apply_levers(
    optimizer: Optimizer,
    plan: Plan,
    model: nn.Module,
    device: torch.device,
    no_graph: str | None = None,
    *,
    can_skip: bool,
) -> Levers:
    """Bring an optimizer to the form that a plan asks for, and find out what a graph can hold.

    Args:
        optimizer: Changed in place.
        plan: What is wanted.
        model: Searched for sparse embeddings.
        device: Where it trains.
        no_graph: Why no graph can hold the step, whatever its optimizer; None if one can.
        can_skip: Whether an update may be called off on the device.

    Synchronizes: Yes.
    """
    form = _form(optimizer, plan, model, device, can_skip=can_skip)
    state = [] if (low_bit := as_low_bit(at_work(optimizer))) is None else [low_bit.decision()]
    if plan.graph_options is None:
        return Levers(form, [*state, graph_decision("left alone", "every step runs as it is")])
    if not has_graphs(device):
        detail = f"there are no graphs on {device.type}, only on CUDA"
        return Levers(form, [*state, graph_decision("left alone", detail)])
    if no_graph is not None:
        detail = f"nothing is captured: {no_graph}; cuda_graph=False says so"
        return Levers(form, [*state, graph_decision("stepped aside", detail)])
    found, decision = graph_form(optimizer, _numerics(plan))
    if found is not None and found.form != form.form:
        before = form.form
        form.close()
        form = OptimizerForm(optimizer, found.form, model)
        if form.form == "as_given":  # for a reason that only the whole model shows
            found, decision = None, form.decision
            form = OptimizerForm(optimizer, before, model)
    if found is None and can_skip:
        why = "nothing is captured, since whether to update is decided behind the gradients"
        return Levers(form, [graph_decision("stepped aside", f"{why}; {decision.detail}")])
    return Levers(form, [*state, decision], _graph_options(plan), found)


def _numerics(plan: Plan) -> Numerics:
    """Return what a graph may do to the update's form."""
    if plan.optimizer != "as_given":
        return "close"
    return "compiled" if plan.compiles_update else "exact"


def _graph_options(plan: Plan) -> CUDAGraphOptions:
    """Return how to capture; replicas warm up for as long as their reducer goes on settling."""
    options, sharding = plan.graph_options, plan.shard_options
    assert options is not None
    least = WARM_UP_OF_COMPILED_UPDATES if plan.compiles_update else 1
    if sharding is not None and not sharding.is_sharded:
        least = WARM_UP_OF_REPLICAS
    parity = options.parity
    if parity == "auto":
        as_given = Plan(cuda_graph=plan.cuda_graph)
        is_exact = all(getattr(plan, name) == getattr(as_given, name) for name in _ONLY_CLOSE)
        parity = "exact" if is_exact else "close"
    return dataclasses.replace(
        options, warm_up_steps=max(options.warm_up_steps, least), parity=parity
    )


def has_graphs(device: torch.device) -> bool:
    """Whether a step on this device can be captured."""
    return device.type == "cuda"


def _form(
    optimizer: Optimizer, plan: Plan, model: nn.Module, device: torch.device, *, can_skip: bool
) -> OptimizerForm:
    # What keeps its state in low bits has one form, which a graph can hold.
    is_low_bit = as_low_bit(at_work(optimizer)) is not None
    is_plain = plan.optimizer == "fused" and not is_low_bit
    form = OptimizerForm(optimizer, "fused" if is_plain else "as_given", model)
    if is_low_bit:
        if plan.low_bit_options is not None:
            detail = "LowBitAdamW, with the groups and hyperparameters given"
            form.decision = Decision(lever="optimizer", outcome="applied", detail=detail)
        return form
    if form.is_fused or device.type == "cpu":
        return form
    if plan.compiles_update and all("capturable" in g for g in optimizer.param_groups):
        # What torch's compiler would make of it, put back by close() and absent from files.
        return OptimizerForm(optimizer, "capturable", model)
    if not can_skip:
        return form
    is_fp16 = plan.precision_options.format == "fp16"
    if not is_fp16 and all(g.get("capturable") for g in optimizer.param_groups):
        return form
    # The plan does not ask for a form, but whether to skip the update is decided on the device,
    # which needs one whose state lives there.
    fused = OptimizerForm(optimizer, "fused", model)
    return fused if fused.form == "fused" else OptimizerForm(optimizer, "capturable", model)
