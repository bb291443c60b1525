"""Torch's switches for how fp32 products and convolutions are computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def fp32_precision(value: str, kind: str) -> Iterator[None]:
    """Set how fp32 products and convolutions are computed; put the old values back after.

    Args:
        value: ``"ieee"`` or ``"tf32"``.
        kind: ``"cuda"`` or ``"cpu"``.
    """
    # The new interface alone: mixing it with allow_tf32 makes torch raise.
    backends: Any = torch.backends
    holders = (
        (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)
        if kind == "cuda"
        else (backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn)
    )
    old = [holder.fp32_precision for holder in holders]
    try:
        for holder in holders:
            holder.fp32_precision = value
        yield
    finally:
        for holder, before in zip(holders, old, strict=True):
            # What was inherited goes back to being inherited, not to a value of its own.
            holder.fp32_precision = "none"
            if holder.fp32_precision != before:
                holder.fp32_precision = before
