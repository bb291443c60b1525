"""Other work on a device, beside what is looked at.

Kernels that add by atomics add in the order in which their blocks come to it. Replays of a graph
are much alike in that, and may end in the same bits many times. With other kernels on the device
their blocks are placed otherwise, and what only follows from their order comes out differently;
everything else comes out as it does alone.
"""

from __future__ import annotations

import threading
from typing import final

import torch

from torchfast._core.stream_context import on_stream

# Read and written by each kernel: for some microseconds all multiprocessors have its blocks.
_NUM_BYTES = 2**25
_AT_A_TIME = 32


@final
class SideLoad:
    """Keeps a device at other work, on a stream of its own, while what the body launches runs.

    It can be entered again and again, and has one stream and one piece of memory. Without streams,
    or where that memory is missing, the body runs alone.

    Args:
        device: Where the body launches, on the current stream.

    Synchronizes: At the end, until all that the body has launched is done.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._block: torch.Tensor | None = None
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        if self._device.type != "cuda":
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
            with on_stream(self._stream):
                try:
                    self._block = torch.empty(_NUM_BYTES, dtype=torch.int8, device=self._device)
                except torch.OutOfMemoryError:
                    return
        if self._block is None:
            return
        self._work()  # there before the body comes
        self._ends.clear()
        # A step that is launched kernel by kernel keeps this thread busy.
        self._thread = threading.Thread(target=self._go_on, daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        if self._thread is None:
            return
        try:
            torch.cuda.current_stream(self._device).synchronize()
        finally:
            self._ends.set()
            self._thread.join()
            self._thread = None

    def _go_on(self) -> None:
        while not self._ends.is_set():
            self._work().synchronize()

    def _work(self) -> torch.cuda.Stream:
        assert self._stream is not None
        assert self._block is not None
        with on_stream(self._stream):
            for _ in range(_AT_A_TIME):
                self._block.bitwise_not_()
        return self._stream
