"""A `LowBitAdamW` in place of the AdamW that a callable builds, as a plan asks for it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.optim import Optimizer

from torchfast._core.building import optimized
from torchfast._core.errors import PlanError
from torchfast.precision.low_bit import LowBitAdamW
from torchfast.precision.low_bit_options import LowBitOptions
from torchfast.precision.low_bit_saved import unmet


def low_bit_source(source: Any, options: LowBitOptions) -> Any:
    """Return what builds an optimizer with low-bit state where ``source`` builds an AdamW.

    What it returns raises PlanError too, where ``source`` builds what cannot be replaced, or a
    `LowBitAdamW` that keeps its state or rounds otherwise.

    Raises:
        PlanError: ``source`` is an optimizer that is built, and keeps its state or rounds
            otherwise; or nothing that it updates is bf16, where weights are to be rounded.
    """
    wanted = dataclasses.asdict(options)
    if isinstance(source, LowBitAdamW) and not unmet(source, wanted):
        return _rounding(source, options)
    if isinstance(source, Optimizer):
        more = ", stochastic_rounding=True" if options.stochastic_rounding else ""
        raise PlanError(
            f"optimizer={options.word or options!r} builds another optimizer in place of the "
            f"{type(source).__name__} that was given built; give Trainer a callable parameters -> "
            f"AdamW, such as functools.partial(AdamW, lr=...), or "
            f"LowBitAdamW(..., state={options.state!r}{more})"
        )
    if not callable(source) or isinstance(source, type):
        return source  # for whoever builds it to refuse

    def build(parameters: Any) -> LowBitAdamW:
        return _rounding(LowBitAdamW.like(source(parameters), **wanted), options)

    return build


def _rounding(optimizer: LowBitAdamW, options: LowBitOptions) -> LowBitAdamW:
    """Return an optimizer if it has weights to round, or none are to be rounded."""
    found = {parameter.dtype for parameter in optimized(optimizer)}
    if options.stochastic_rounding and torch.bfloat16 not in found:
        kinds = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in found))
        raise PlanError(
            "stochastic_rounding=True rounds bf16 weights, and the optimizer has none, but "
            f"{kinds}; train model.to(torch.bfloat16), or leave stochastic_rounding out"
        )
    return optimizer
