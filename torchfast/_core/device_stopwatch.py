"""What work takes on a CUDA device, without the time that the host needs to launch it.

As a graph replays it: where kernels are short or the host is slow, a clock around eager work times
the launches, which a graph saves. So the device is put to sleep while the host launches a block,
and events time it from there on.

It does not help where the work waits for the device, nor where it has more launches than the
device's queue holds (about a thousand): what is launched behind those, the host launches while the
device is at it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final, final

import torch

_LONGEST_SLEEP_S: Final = 0.25
# The ways that are timed have their turns in random order, and one launches more than another.
_NUM_KEPT: Final = 8
_CYCLES_PER_S: Final = 2e9  # no GPU with float8 units has many more


@final
class DeviceStopwatch:
    """Times blocks of work on a device, for `measure`.

    Args:
        device: A CUDA device.

    Synchronizes: At the end of each block.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._launches_s: deque[float] = deque(maxlen=_NUM_KEPT)  # of a unit in the latest blocks

    def __call__(self, work: Callable[[], object], units: int) -> float:
        """Run so many units; return the seconds that the device took."""
        # The sleep and the events are of the current device, which need not be the model's.
        with torch.cuda.device(self._device):
            return self._timed(work, units)

    def _timed(self, work: Callable[[], object], units: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        longest_s = max(self._launches_s, default=0.0)
        sleep_s = min(1.5 * longest_s * units, _LONGEST_SLEEP_S)
        if sleep_s:
            torch.cuda._sleep(int(sleep_s * _CYCLES_PER_S))
        start.record()
        started = time.perf_counter()
        for _ in range(units):
            work()
        launched_s = (time.perf_counter() - started) / units
        end.record()
        torch.cuda.synchronize(self._device)
        # A step that waits for the device has waited for the sleep too: no longer than that.
        self._launches_s.append(min(launched_s, _LONGEST_SLEEP_S))
        return float(start.elapsed_time(end)) / 1e3
