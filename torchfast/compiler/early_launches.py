"""The first matrix products of a process, computed while it waits for something else.

The first product starts cuBLAS and cuBLASLt: libraries of hundreds of megabytes, of which the GPU
gets the kernels when they are first asked for. That takes some tenths of a second, for most of
which Python's lock is free. So a thread that has to wait for the keys of the compile caches (see
`torchfast.compiler.early_keys`) meanwhile computes two small products, in the stream in which it is
about to train: what they start, and the workspace that they take, the model's own need.
"""

from __future__ import annotations

import logging

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import _disable_current_modes

logger = logging.getLogger(__name__)

_SIZE = 64


def launch_early() -> None:
    """Compute the products on the current GPU, if the process uses one.

    Nothing is drawn, nothing is waited for, and no mode of the caller's sees them. Nothing of it
    raises: whoever computes next meets the same error, where it can be answered.
    """
    if not torch.cuda.is_initialized():
        return
    try:
        if torch.cuda.is_current_stream_capturing():
            return
        with torch.no_grad(), _disable_current_modes():
            ones = torch.ones(_SIZE, _SIZE, dtype=torch.bfloat16, device="cuda")
            ones @ ones
            F.linear(ones, ones, ones[0])  # with a bias: by cuBLASLt
    except Exception as error:  # a GPU that is full, or what settings forbid
        logger.debug("the first matrix products were not computed early: %s", error)
