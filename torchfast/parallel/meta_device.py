"""Models that were built on the meta device: shapes without memory, until they are sharded.

A model that does not fit one host, or one GPU, is built under ``torch.device("meta")``, which
allocates nothing. It is sharded as it is; then each rank gives its own shards memory, and fills
them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from torchfast._core.errors import PlanError


def is_on_meta(model: nn.Module) -> bool:
    """Whether any parameter or buffer has no memory.

    Raises:
        PlanError: Some have memory and others have none.
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    on_meta = [name for name, tensor in tensors if tensor.device.type == "meta"]
    if on_meta and any(p.device.type != "meta" for p in model.parameters()):
        raise PlanError(
            f"some parameters have memory and {len(on_meta)} tensors have none "
            f"({', '.join(on_meta[:3])}); build the whole model under torch.device('meta'), or "
            "none of it"
        )
    return bool(on_meta)


def has_no_memory(model: nn.Module) -> bool:
    """Whether no parameter has memory; one that its user spreads over devices may have some."""
    devices = {parameter.device.type for parameter in model.parameters()}
    return devices == {"meta"}


def check_initialization(model: nn.Module, initialize: Callable[[Any], Any] | None) -> None:
    """Raise unless there is something to fill every parameter and buffer with.

    Raises:
        PlanError: A module that holds some has no ``reset_parameters()``, and no function is given.
    """
    if initialize is not None:
        return
    odd = [
        f"{path or 'the model'} ({type(module).__name__})"
        for path, module in model.named_modules()
        if _holds_tensors(module) and not callable(getattr(module, "reset_parameters", None))
    ]
    if odd:
        raise PlanError(
            f"the model was built on the meta device, and these modules have no "
            f"reset_parameters() to fill what they hold: {', '.join(odd[:3])}; pass "
            "ShardOptions(initialize=...), a function of the model that fills all of it"
        )


def give_memory(model: nn.Module, device: torch.device) -> None:
    """Give a model memory on ``device``, whatever is in it; what was tied stays so."""
    tied = _tied(model)
    model.to_empty(device=device)
    for (first, name), *others in tied:
        for module, other_name in others:
            module._parameters[other_name] = first._parameters[name]


def materialize(
    model: nn.Module, device: torch.device, initialize: Callable[[Any], Any] | None
) -> None:
    """Give a model memory on ``device``, sharded or not, and fill it."""
    give_memory(model, device)
    with torch.no_grad():
        if initialize is not None:
            initialize(model)
            return
        for module in model.modules():
            if _holds_tensors(module):
                cast("Any", module).reset_parameters()


def _tied(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Return where parameters stand that stand in several places, of which torch makes several."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, name))
    return [found for found in places.values() if len(found) > 1]


def _holds_tensors(module: nn.Module) -> bool:
    own = (*module._parameters.values(), *module._buffers.values())
    return any(tensor is not None for tensor in own)
