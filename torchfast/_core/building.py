"""Building and moving what a step trains: the optimizer and the scheduler of a model."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from torchfast._core.arguments import describe
from torchfast._core.decisions import Decision
from torchfast._core.errors import PlanError, UnsupportedOptimizerError


def build_optimizer(source: object, model: nn.Module) -> Optimizer:
    """Return the optimizer given, or the one that the callable given makes.

    Raises:
        TypeError: An optimizer class, or something else entirely.
        ValueError: No parameters, or one twice.
        UnsupportedOptimizerError: Its ``step`` needs a closure.
    """
    if isinstance(source, type):
        name = source.__name__
        raise TypeError(
            f"optimizer must be an instance or a callable parameters -> Optimizer, got the class "
            f"{name}; write functools.partial({name}, lr=...) or {name}(model.parameters(), lr=...)"
        )
    optimizer = source
    if not isinstance(optimizer, Optimizer):
        if not callable(optimizer):
            is_several = isinstance(optimizer, list | tuple | dict)
            several = "; of several, each goes with a Trainer, or a step, of its own" * is_several
            raise TypeError(
                "optimizer must be a torch.optim.Optimizer or a callable parameters -> Optimizer, "
                f"got {describe(optimizer)}{several}"
            )
        # A list, which may be gone through more than once: for groups with and without decay.
        optimizer = optimizer([*model.parameters()])
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                "the optimizer callable must return a torch.optim.Optimizer, got "
                f"{type(optimizer).__name__}"
            )
    _check(optimizer)
    own = {id(p) for p in model.parameters()}
    if own.isdisjoint(id(p) for p in optimized(optimizer)):
        raise ValueError(
            f"{type(optimizer).__name__} holds no parameter of this {type(model).__name__}, so "
            "nothing would train; build it on this model's parameters (a copied, wrapped or "
            "sharded model has new ones)"
        )
    return optimizer


def _check(optimizer: Optimizer) -> None:
    if not hasattr(optimizer, "_optimizer_load_state_dict_post_hooks"):
        kind = type(optimizer).__name__
        raise TypeError(
            f"{kind} has not called Optimizer.__init__(), so it lacks what torch.optim.Optimizer "
            f"has; call super().__init__(params, defaults) in {kind}.__init__()"
        )
    parameters = list(optimized(optimizer))
    if not parameters:
        raise ValueError("optimizer holds no parameters; pass it model.parameters()")
    if len({id(p) for p in parameters}) != len(parameters):
        positions: dict[int, int] = {}
        for position, parameter in enumerate(parameters):
            first = positions.setdefault(id(parameter), position)
            if first != position:
                raise ValueError(
                    f"optimizer holds a parameter twice (positions {first} and {position}, shape "
                    f"{tuple(parameter.shape)}), so it would be updated twice a step; give it once"
                )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UnsupportedOptimizerError(
            f"{type(optimizer).__name__}.step() needs a closure that runs the model several times "
            "an update, which is not one step; use AdamW, SGD or another optimizer whose step() "
            "takes no argument, or keep a loop of your own for it"
        )


def build_scheduler(source: Any, optimizer: Optimizer) -> Any:
    """Return the scheduler given, or the one that the callable given makes; None stays None."""
    if source is None:
        return None
    scheduler = source
    if not callable(getattr(scheduler, "step", None)):
        if not callable(scheduler) or isinstance(scheduler, type):
            raise TypeError(
                "lr_scheduler must be a torch.optim.lr_scheduler, an object whose step() takes no "
                f"argument, or a callable optimizer -> scheduler, got {scheduler!r} "
                f"({type(scheduler).__name__})"
            )
        scheduler = scheduler(optimizer)
        if not callable(getattr(scheduler, "step", None)):
            raise TypeError(
                f"the lr_scheduler callable must return a scheduler, got {type(scheduler).__name__}"
            )
    elif isinstance(scheduler, type):
        raise TypeError(
            f"lr_scheduler must be an instance or a callable optimizer -> scheduler, got the class "
            f"{scheduler.__name__}"
        )
    if isinstance(scheduler, LRScheduler | ReduceLROnPlateau) and (
        scheduler.optimizer is not optimizer
    ):
        raise ValueError(
            f"lr_scheduler ({type(scheduler).__name__}) drives another optimizer than the one "
            "that is trained; build it on the same object, or pass a callable "
            "optimizer -> scheduler"
        )
    return scheduler


def move_to(device: torch.device, model: nn.Module, optimizer: Optimizer) -> None:
    """Move a model and its optimizer's state in place.

    Raises:
        RuntimeError: The move replaced parameter objects, so the optimizer would train others.
    """
    if all(p.device == device for p in model.parameters()):
        return
    before = [id(p) for p in model.parameters()]
    model.to(device)
    if [id(p) for p in model.parameters()] != before:
        raise RuntimeError(
            f"moving the model to {device} replaced its parameters, so the optimizer holds the old "
            "ones; move the model first, or pass a callable parameters -> Optimizer"
        )
    if optimizer.state:
        # Loading its own state is how torch moves each entry by its own rule: moments to the
        # parameter's device, counters where the optimizer keeps them.
        optimizer.load_state_dict(optimizer.state_dict())


def claim(optimizer: Optimizer, close: Callable[[], None]) -> None:
    """Note on the optimizer who has changed it, and how to undo that."""
    optimizer._torchfast_close = weakref.WeakMethod(close)  # type: ignore[attr-defined]


def release(optimizer: Optimizer) -> None:
    """Close whoever changed the optimizer before, so that what is found is what the user gave.

    A trainer built anew on the same optimizer, as in a notebook cell run twice, would otherwise
    take the other's form for the user's.
    """
    reference = optimizer.__dict__.pop("_torchfast_close", None)
    close = None if reference is None else reference()
    if close is not None:
        close()


def optimized(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield every parameter that the optimizer holds."""
    return (p for group in optimizer.param_groups for p in group["params"])


def at_work(optimizer: Optimizer) -> Optimizer:
    """Return what updates the parameters: the optimizer that an offloaded one is made of.

    Its kind, its state and its rules for loading are those of the training; what is around it only
    says where the update runs. All others are at work themselves.
    """
    inner: Optimizer | None = getattr(optimizer, "_torchfast_inner", None)
    return optimizer if inner is None else inner


def device_decision(device: torch.device, model: nn.Module) -> Decision:
    """Say where the step runs."""
    detail = str(device)
    if device.type == "cuda":
        detail += f" ({torch.cuda.get_device_name(device)})"
    others = {str(p.device) for p in model.parameters()} - {str(device)}
    if others:
        detail += f"; some parameters lie on {sorted(others)}, batches go to {device}"
    return Decision(lever="device", outcome="applied", detail=detail)


def scheduler_decision(scheduler: Any, *, is_stepped: bool) -> Decision:
    """Say who steps the scheduler."""
    name = type(scheduler).__name__
    if scheduler is None:
        detail = "none given; step yours after each update"
        return Decision(lever="lr_scheduler", outcome="left alone", detail=detail)
    when = "after each update" if is_stepped else "by fit() after each evaluation, else by you"
    return Decision(lever="lr_scheduler", outcome="applied", detail=f"{name} is stepped {when}")


def check_no_strays(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise if a trainable parameter is not in the optimizer.

    Under fp16 its gradient would never be unscaled nor zeroed, and enter the clipped norm.
    """
    names = _strays(model, optimizer)
    if names:
        raise ValueError(
            f"with fp16 and max_grad_norm every trainable parameter must be in the optimizer, but "
            f"{len(names)} are not ({', '.join(names[:3])}): their scaled gradients would enter "
            "the norm; requires_grad_(False) them, or use precision='bf16'"
        )


def parameters_of_others(model: nn.Module, optimizer: Optimizer) -> dict[int, Tensor]:
    """Return the parameters that the optimizer holds and the model does not, by their places."""
    own = {id(p) for p in model.parameters()}
    return {place: p for place, p in enumerate(optimized(optimizer)) if id(p) not in own}


def check_no_others(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise if the optimizer holds trainable parameters that the model does not.

    Ranks bring the gradients of the model together; others would drift apart from rank to rank.

    Raises:
        PlanError: It does.
    """
    others = [p for p in parameters_of_others(model, optimizer).values() if p.requires_grad]
    if others:
        raise PlanError(
            f"the optimizer holds {len(others)} parameters that are not the model's (of shape "
            f"{_shapes(others)}), whose gradients shard=... would leave different on each rank; "
            "make them part of the model, such as "
            "nn.ModuleDict({'model': model, 'loss': criterion})"
        )


def parameter_decisions(model: nn.Module, optimizer: Optimizer) -> list[Decision]:
    """Name the parameters that are the model's or the optimizer's alone, if there are any."""
    details = []
    if names := _strays(model, optimizer):
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        details.append(
            f"{len(names)} trainable parameters are not in the optimizer ({shown}): they stay as "
            "they are, and their gradients are never zeroed but count in the clipped norm; "
            "requires_grad_(False) frees both"
        )
    if others := [*parameters_of_others(model, optimizer).values()]:
        details.append(
            f"the optimizer holds {len(others)} parameters that are not the model's (of shape "
            f"{_shapes(others)}): they are trained and saved, but not clipped, averaged or moved "
            "to the device; make them part of the model, such as "
            "nn.ModuleDict({'model': model, 'loss': criterion})"
        )
    return [Decision(lever="parameters", outcome="left alone", detail=text) for text in details]


def _shapes(some: list[Tensor]) -> str:
    return ", ".join(str(tuple(p.shape)) for p in some[:3]) + (", ..." if len(some) > 3 else "")


def _strays(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Return the names of trainable parameters that the optimizer does not hold."""
    held = {id(p) for p in optimized(optimizer)}
    return [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in held]
