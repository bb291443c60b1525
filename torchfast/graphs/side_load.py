"""Other work on a device, beside what is looked at.

Kernels that add by atomics add in the order in which their blocks come to it. Replays of a graph
are much alike in that, and may end in the same bits many times. With other kernels on the device
their blocks are placed otherwise, and what only follows from their order comes out differently;
everything else comes out as it does alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from torchfast._core.stream_context import on_stream

# What each kernel reads and writes: for some microseconds all multiprocessors have its blocks.
_NUM_BYTES = 2**25
_AT_A_TIME = 32


@contextmanager
def side_load(device: torch.device) -> Iterator[None]:
    """Keep a device at other work, on a stream of its own, while what the body launches runs.

    Without streams, or where memory for it is missing, the body runs alone.

    Args:
        device: Where the body launches, on the current stream.

    Synchronizes: Until all that the body has launched is done.
    """
    if device.type != "cuda":
        yield
        return
    current, beside = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    with on_stream(beside):
        try:
            block = torch.empty(_NUM_BYTES, dtype=torch.int8, device=device)
        except torch.OutOfMemoryError:
            block = torch.empty(0, dtype=torch.int8, device=device)

    def work() -> None:
        with on_stream(beside):
            for _ in range(_AT_A_TIME):
                block.bitwise_not_()

    work()
    yield
    done = current.record_event()
    while not done.query():
        work()
        beside.synchronize()
