"""The update of one parameter by an AdamW whose moments may be codes.

One function for one parameter, rather than one for all: compiled, it is two or three kernels, and
one graph serves every parameter of the same shape.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchfast.precision.low_bit_codes import Codec

# Where inductor begins another buffer in an expression: by default after 30 operations, and where
# four read. An update is one expression of some hundred, of which each value is read or written
# once and what would lie in between is 16 bytes a parameter, written and read again.
_IN_ONE = {
    "realize_opcount_threshold": 1000,
    "realize_reads_threshold": 100,
    "realize_acc_reads_threshold": 100,
}


def make_update(
    codecs: tuple[Codec, Codec] | None, rounded: Callable[[Tensor], Tensor] | None
) -> Callable[..., None]:
    """Return the update of one parameter, in fp32, in the order of torchao's."""

    def update(
        parameter: Tensor,
        gradient: Tensor,
        step: Tensor,
        rate: Tensor,
        moments: tuple[Tensor, Tensor],
        scales: tuple[Tensor, Tensor],
        tables: tuple[Tensor, Tensor],
        *,
        is_coded: bool,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        is_rounded: bool,
    ) -> None:
        weight, slope = parameter.float(), gradient.float()
        if is_coded:
            # In the rows in which each has a scale, so that one kernel can do all.
            assert codecs is not None
            weight, slope = (t.reshape(len(scales[0]), -1) for t in (weight, slope))
            codes = [moment.reshape(len(scales[0]), -1) for moment in moments]
            old = [c.decode(*m) for c, *m in zip(codecs, codes, scales, tables, strict=True)]
        else:
            old = [moment.float() for moment in moments]
        weight = weight - rate * weight_decay * weight
        first = old[0].lerp(slope, 1 - betas[0])
        second = old[1].lerp(slope.square(), 1 - betas[1])
        if is_coded:
            assert codecs is not None
            new = [c.encode(*m) for c, *m in zip(codecs, (first, second), tables, strict=True)]
            for moment, scale, (new_codes, new_scale) in zip(moments, scales, new, strict=True):
                moment.copy_(new_codes.view(moment.shape))
                scale.copy_(new_scale)
        else:
            moments[0].copy_(first)
            moments[1].copy_(second)
        denominator = second.sqrt() / (1 - betas[1] ** step).sqrt() + eps
        weight = weight - rate * (first / (1 - betas[0] ** step)) / denominator
        if is_rounded:
            assert rounded is not None
            weight = rounded(weight)
        parameter.copy_(weight.view(parameter.shape))

    return update


def compiled_update(function: Callable[..., None]) -> Callable[..., None]:
    """Return the update compiled: once for each shape, however many there are."""
    call = torch.compile(function, fullgraph=True, dynamic=False, options=_in_one())

    def compiled(*args: Any, **options: Any) -> None:
        from torch._dynamo.utils import disable_cache_limit

        with disable_cache_limit():
            call(*args, **options)

    return compiled


def _in_one() -> dict[str, Any]:
    """Return the settings of inductor for a whole update; without those that this torch lacks."""
    from torch._inductor import config

    return {name: value for name, value in _IN_ONE.items() if hasattr(config, name)}
