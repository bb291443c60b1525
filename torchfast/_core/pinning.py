"""Host memory pinned where it lies.

torch's pinned allocator rounds each allocation up to a power of two, and cannot pin what others
have allocated, such as memory that is shared between processes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

import torch

_PORTABLE: Final = 1  # pinned for each device of this process


def pin_in_place(
    address: int, num_bytes: int, device: torch.device
) -> tuple[int, Callable[[], None]]:
    """Register memory with CUDA.

    Returns:
        CUDA's code, 0 if the memory is pinned; and what takes that back, for which the memory must
        still be there.

    Synchronizes: Yes.
    """
    runtime = torch.cuda.cudart()
    with torch.cuda.device(device):
        code = int(runtime.cudaHostRegister(address, num_bytes, _PORTABLE))
        if code != 0:
            # The driver remembers a thread's error, and the next kernel would be blamed for it.
            with suppress(RuntimeError):
                torch.zeros(1, device=device)
    return code, partial(_unpin, runtime, address)


def _unpin(runtime: Any, address: int) -> None:
    # What it returns is of no use: where CUDA is gone already, so is the pinning.
    runtime.cudaHostUnregister(address)
