"""Whether an optimizer keeps its moments in low bits, asked without importing what would."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim import Optimizer

from torchfast._core.building import optimized
from torchfast._core.errors import PlanError

if TYPE_CHECKING:
    from torchfast.precision.low_bit import LowBitAdamW


def as_low_bit(optimizer: Optimizer) -> LowBitAdamW | None:
    """Return the optimizer if it is a `LowBitAdamW`, else None.

    There is none in a process that has not imported the class, which few do.
    """
    module = sys.modules.get("torchfast.precision.low_bit")
    return optimizer if module is not None and isinstance(optimizer, module.LowBitAdamW) else None


def check_replicas(optimizer: Optimizer, strategy: str, whole: Sequence[nn.Parameter]) -> None:
    """Raise where replicas of a weight would be rounded by chance, each by its own draws.

    Args:
        optimizer: What updates them.
        strategy: How the model is spread over ranks.
        whole: Parameters of a sharded model that every rank has whole.

    Raises:
        PlanError: They would drift apart.
    """
    low_bit = as_low_bit(optimizer)
    if low_bit is None or not low_bit.stochastic_rounding:
        return
    replicas = {id(parameter) for parameter in whole}
    if not any(
        parameter.dtype == torch.bfloat16 and (strategy != "fsdp" or id(parameter) in replicas)
        for parameter in optimized(optimizer)
    ):
        return
    what = f"shard={strategy!r}" if strategy != "fsdp" else "parameters that 'fsdp' leaves whole"
    raise PlanError(
        f"stochastic rounding does not go with {what}: each replica would round its bf16 weights "
        "by draws of its own, and they would drift apart; take shard='fsdp' without ignored=, "
        "which has one copy of each weight, and fp32 for weights without dimensions"
    )
