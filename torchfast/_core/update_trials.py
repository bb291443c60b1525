"""Whether an optimizer of torch's can update a kind of parameters: one update of a few elements.

A trial rather than a list: which classes, devices, dtypes and kinds of tensors work changes between
releases of torch.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchfast._core.building import optimized
from torchfast._core.errors import PlanError
from torchfast._core.local import local


def kinds_of(optimizer: Optimizer) -> list[Tensor]:
    """Return one parameter of each kind, by what decides whether an update takes it."""
    found: dict[Any, Tensor] = {}
    for parameter in optimized(optimizer):
        spread = getattr(parameter, "placements", None)
        key = str((parameter.device, parameter.dtype, spread, spread and parameter.dim()))
        found.setdefault(key, parameter)
    return [found[key] for key in sorted(found)]


def refusal(
    optimizer: Optimizer, like: Tensor, flags: Mapping[str, bool], *, as_part: bool = True
) -> str | None:
    """Run one update as the optimizer's first group has it; return torch's refusal, or None.

    Args:
        optimizer: Of a class of torch's own; stays as it is.
        like: What is updated is of its device and dtype.
        flags: Of the implementation, in place of the group's.
        as_part: Whether it is sharded where ``like`` is. Then all ranks call this.
    """
    accepted = inspect.signature(type(optimizer)).parameters
    group = optimizer.param_groups[0]
    values = {
        key: value
        for key, value in group.items()
        if key in accepted and key != "params" and not isinstance(value, Tensor)
    }
    values |= {flag: on for flag, on in flags.items() if flag in group}
    part = local(like)
    sample = torch.zeros([1] * max(1, like.dim()), device=part.device, dtype=like.dtype)
    if as_part and part is not like:
        sharded: Any = like
        sample = type(sharded).from_local(
            sample, sharded.device_mesh, sharded.placements, run_check=False
        )
    parameter = nn.Parameter(sample)
    parameter.grad = torch.zeros_like(parameter)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            type(optimizer)([parameter], **values).step()
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        return str(error).partition("\n")[0]
    return None


def check_takes_shards(optimizer: Optimizer) -> None:
    """Raise where the first update of sharded parameters would, with words that name no optimizer.

    All ranks call it. Only classes of torch's own are tried.

    Raises:
        PlanError: It would.
    """
    name = type(optimizer).__name__
    if not type(optimizer).__module__.startswith("torch.optim"):
        return
    for kind in kinds_of(optimizer):
        if local(kind) is kind:
            continue
        why = refusal(optimizer, kind, {})
        if why is not None and refusal(optimizer, kind, {}, as_part=False) is None:
            raise PlanError(
                f"torch.optim.{name} as it was built cannot update sharded parameters ({why}); "
                "take another optimizer, such as AdamW, another implementation of it (without "
                "fused=True), or shard='ddp'"
            )
