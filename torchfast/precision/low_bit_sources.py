"""A `LowBitAdamW` in place of the AdamW that a callable builds, as a plan asks for it."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from torchfast._core.building import optimized
from torchfast._core.errors import PlanError
from torchfast.precision.low_bit import LowBitAdamW
from torchfast.precision.low_bit_options import LowBitOptions


def low_bit_source(source: Any, options: LowBitOptions) -> Any:
    """Return what builds an optimizer with low-bit state where ``source`` builds an AdamW.

    Raises:
        PlanError: ``source`` is an optimizer that is built, and keeps its state or rounds
            otherwise; or nothing that it updates is bf16, where weights are to be rounded.
    """
    if isinstance(source, LowBitAdamW) and _is_as(source, options):
        return source
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
        optimizer = LowBitAdamW.like(
            source(parameters),
            state=options.state,
            stochastic_rounding=options.stochastic_rounding,
            compiled=options.compiled,
        )
        found = {parameter.dtype for parameter in optimized(optimizer)}
        if options.stochastic_rounding and torch.bfloat16 not in found:
            kinds = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in found))
            raise PlanError(
                "stochastic_rounding=True rounds bf16 weights, and the optimizer has none, but "
                f"{kinds}; train model.to(torch.bfloat16), or leave stochastic_rounding out"
            )
        return optimizer

    return build


def _is_as(source: LowBitAdamW, options: LowBitOptions) -> bool:
    """Whether an optimizer that was given does what the options say, or more."""
    return (
        source.kind == options.state
        and (source.stochastic_rounding or not options.stochastic_rounding)
        and (options.compiled is None or source.compiled == options.compiled)
    )
