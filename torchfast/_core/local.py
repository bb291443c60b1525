"""This rank's part of a sharded tensor, and the whole of it."""

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


def whole(tensor: Tensor) -> Tensor:
    """Return all of a sharded tensor, which all ranks ask for at once; any other as it is."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else cast(Tensor, gather())
