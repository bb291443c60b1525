"""A model made ready for its optimizer, and the optimizer for the model.

There are two orders. An optimizer that is to be built (a callable) is built when the model is what
will be trained: on its device, converted, sharded; but the callable sees layers of the classes that
it knows. One that was given holds the model's parameters
already, so nothing may replace them, and the model is changed only when nothing can be refused any
more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from torchfast._core.building import (
    build_optimizer,
    build_scheduler,
    check_no_others,
    check_no_strays,
    move_to,
    release,
)
from torchfast._core.errors import PlanError
from torchfast._core.update_trials import check_takes_shards
from torchfast.ema import EMAOptions, WeightAverage, copied
from torchfast.memory import StepOffload
from torchfast.plan import Plan
from torchfast.precision import check_replicas
from torchfast.schedule import Schedule
from torchfast.transforms import ModelTransforms

OptimizerSource = Optimizer | Callable[[Iterable[nn.Parameter]], Optimizer]
SchedulerSource = Any  # an LRScheduler, an object with step(), or optimizer -> either


class Prepared(NamedTuple):
    """What trains a model.

    Attributes:
        optimizer: Of its parameters.
        scheduler: Of its learning rate, or None.
        schedule: What steps it after each update; None where that does not.
        average: Of its weights.
    """

    optimizer: Optimizer
    scheduler: Any
    schedule: Schedule | None
    average: WeightAverage


def prepare(
    model: nn.Module,
    source: OptimizerSource,
    scheduler: SchedulerSource,
    *,
    plan: Plan,
    transforms: ModelTransforms,
    offload: StepOffload,
    ema: EMAOptions | None,
    device: torch.device,
    is_moved: bool,
    clips: bool,
) -> Prepared:
    """Bring a model and its optimizer together, as a plan wants both.

    Args:
        model: Changed in place.
        source: The optimizer, or what builds it.
        scheduler: The scheduler, or what builds it, or None.
        plan: What is done.
        transforms: What changes the model.
        offload: What changes the optimizer, and where parameters are.
        ema: How to average its weights; None if not.
        device: Where it trains.
        is_moved: Whether that device was asked for.
        clips: Whether gradients are clipped.

    Raises:
        PlanError: An optimizer that is built, where the plan replaces what it holds; one that holds
            parameters whose gradients the ranks would not bring together, or others than those of
            the layers that are converted; one that is another than on other ranks, or cannot
            update shards.
    """
    is_new = not isinstance(source, Optimizer)
    is_fp16 = plan.precision_options.format == "fp16"
    if is_fp16:
        transforms.sharding.check_scaled()
    moves = _moves(model, device, transforms, is_moved=is_moved)
    # A sharded model cannot be copied any more.
    twin = copied(model) if ema is not None and transforms.sharding.is_sharded else None
    if is_new:
        if offload.moves_parameters:
            offload.place(model, device, moves=moves)
        elif moves:
            model.to(device)
        transforms.apply()
        if twin is not None:
            transforms.sharding.shard_twin(twin)
    elif (why := transforms.needs_factory or offload.needs_factory) is not None:
        raise PlanError(
            f"{why}, so the optimizer must be built after that, and the {type(source).__name__} "
            "given is built already; give Trainer a callable parameters -> Optimizer, such as "
            f"functools.partial({type(source).__name__}, lr=...)"
        )
    with transforms.as_given():
        optimizer = build_optimizer(offload.source(plan.optimizer_source(source)), model)
    if not is_new and offload.moves_parameters:
        release(optimizer)  # what it finds on the host would be another step's
        offload.place(model, device, optimizer, moves=moves)
    elif not is_new and moves:
        move_to(device, model, optimizer)
    if (sharded := plan.shard_options) is not None:
        check_no_others(model, optimizer)
        transforms.sharding.check_optimizer(optimizer)
        if transforms.sharding.is_sharded:
            check_takes_shards(optimizer)
    strategy = None if sharded is None else sharded.strategy
    check_replicas(optimizer, model, strategy, transforms.sharding.whole_parameters())
    built = build_scheduler(scheduler, optimizer)
    if is_fp16 and clips:
        check_no_strays(model, optimizer)
    can_skip = is_fp16 or plan.nonfinite_options.action == "skip"
    average = WeightAverage(model, ema, device, can_skip=can_skip, twin=twin)
    release(optimizer)
    if not is_new:
        transforms.apply()
    transforms.check_optimizer(optimizer)
    is_stepped = scheduler is not None and not isinstance(built, ReduceLROnPlateau)
    return Prepared(optimizer, built, Schedule(built) if is_stepped else None, average)


def _moves(
    model: nn.Module, device: torch.device, transforms: ModelTransforms, *, is_moved: bool
) -> bool:
    """Whether the model has yet to go to its device, in one piece."""
    first = next(model.parameters())
    if transforms.sharding.is_sharded or first.device.type == "meta":
        return False  # it goes there by parts
    return is_moved or first.device != device
