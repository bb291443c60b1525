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


def make_update(
    codec: Codec | None, rounded: Callable[[Tensor], Tensor] | None
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
        weight = weight - rate * weight_decay * weight
        if is_coded:
            assert codec is not None
            old = [
                codec.decode(m.reshape(-1), s, t).view(parameter.shape)
                for m, s, t in zip(moments, scales, tables, strict=True)
            ]
        else:
            old = [moment.float() for moment in moments]
        first = old[0].lerp(slope, 1 - betas[0])
        second = old[1].lerp(slope.square(), 1 - betas[1])
        for new, moment, scale, table in zip((first, second), moments, scales, tables, strict=True):
            if is_coded:
                assert codec is not None
                new_codes, new_scale = codec.encode(new.reshape(-1), table)
                moment.copy_(new_codes.view(moment.shape))
                scale.copy_(new_scale)
            else:
                moment.copy_(new)
        denominator = second.sqrt() / (1 - betas[1] ** step).sqrt() + eps
        weight = weight - rate * (first / (1 - betas[0] ** step)) / denominator
        if is_rounded:
            assert rounded is not None
            weight = rounded(weight)
        parameter.copy_(weight)

    return update


def compiled_update(function: Callable[..., None]) -> Callable[..., None]:
    """Return the update compiled: once for each shape, however many there are."""
    call = torch.compile(function, fullgraph=True, dynamic=False)

    def compiled(*args: Any, **options: Any) -> None:
        from torch._dynamo.utils import disable_cache_limit

        with disable_cache_limit():
            call(*args, **options)

    return compiled
