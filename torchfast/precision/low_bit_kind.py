"""Whether an optimizer keeps its moments in low bits, asked without importing what would."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from torchfast._core.building import at_work, optimized
from torchfast._core.errors import PlanError
from torchfast._core.local import local

if TYPE_CHECKING:
    from torchfast.precision.low_bit import LowBitAdamW


def as_low_bit(optimizer: Optimizer) -> LowBitAdamW | None:
    """Return the optimizer if it is a `LowBitAdamW`, else None.

    There is none in a process that has not imported the class, which few do.
    """
    module = sys.modules.get("torchfast.precision.low_bit")
    return optimizer if module is not None and isinstance(optimizer, module.LowBitAdamW) else None


def check_replicas(
    optimizer: Optimizer, model: nn.Module, strategy: str | None, whole: Sequence[nn.Parameter]
) -> None:
    """Raise where replicas of a weight would be rounded by chance, each by its own draws.

    Args:
        optimizer: What updates them, offloaded or not.
        model: What is trained.
        strategy: How a plan spreads the model over ranks; None if it does not, and a person may
            have done it.
        whole: Parameters of a sharded model that every rank has whole.

    Raises:
        PlanError: They would drift apart.
    """
    low_bit = as_low_bit(at_work(optimizer))
    if low_bit is None or not low_bit.stochastic_rounding:
        return
    replicas = {id(p) for p in (_replicas_by_hand(model) if strategy is None else whole)}
    if not any(
        parameter.dtype == torch.bfloat16
        and (strategy in ("ddp", "hsdp") or id(parameter) in replicas)
        for parameter in optimized(optimizer)
    ):
        return
    what = f"shard={strategy!r}"
    if strategy == "fsdp":
        what = "parameters that 'fsdp' leaves whole"
    elif strategy is None:
        what = "a model that DistributedDataParallel or a mesh replicates"
    raise PlanError(
        f"stochastic rounding does not go with {what}: each replica would round its bf16 weights "
        "by draws of its own, and they would drift apart; take shard='fsdp' without ignored=, "
        "which has one copy of each weight, and fp32 for weights without dimensions"
    )


def _replicas_by_hand(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters that other ranks have too, of a model that its owner has spread."""
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            apart = module.parameters_to_ignore
            yield from (p for name, p in module.module.named_parameters() if name not in apart)
    for parameter in model.parameters():
        if local(parameter) is not parameter:
            spread: Any = parameter
            sizes = zip(spread.device_mesh.shape, spread.placements, strict=True)
            if any(size > 1 and not placement.is_shard() for size, placement in sizes):
                yield parameter
