"""This rank's part of a sharded tensor."""

from __future__ import annotations

from typing import cast

from torch import Tensor


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor (a ``DTensor``), any other as it is.

    The part shares its memory with the whole, so what is written to it is written to that. Asked by
    name, since importing the class takes longer than all of torchfast.
    """
    part = getattr(tensor, "_local_tensor", None)
    return tensor if part is None else cast(Tensor, part)
