"""What torch's allocator keeps of the steps before a capture, and when it is let go of.

A graph's pool needs about what a step of the warm-up has left in the cache, and a capture gets
nothing from there: in the middle of one the allocator frees no segment. So where there is little
memory beside, the cache is emptied before. That makes the host wait for the device and for hundreds
of calls of ``cudaFree``, a tenth of a second and more, which the first replay would have to wait
for. Where there is plenty, the cache stays: the check of replays takes its memory from it, in place
of asking the driver for as much once more, and behind the check it is emptied. So at any time no
more is reserved than with an emptied cache, where the check fills it anew, and afterwards less.
"""

from __future__ import annotations

from typing import Final, final

import torch

# Beside so many times what a step needs there is plenty. A capture that ran out beside that would
# hardly have gone well with the cache, too.
_TIMES: Final = 2
_LEAST_BYTES: Final = 2**30


@final
class CachedMemory:
    """The cache of torch's allocator around captures.

    Args:
        device: A CUDA device.

    Synchronizes: Where it is emptied.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_kept = self._ran_out = False

    def before_capture(self) -> None:
        """Empty it, unless there is plenty beside."""
        self._is_kept = not self._ran_out and has_plenty(self._device)
        self._ran_out = False
        if not self._is_kept:
            torch.cuda.empty_cache()

    def after_check(self) -> None:
        """Empty it if it was kept: whatever ran eagerly is through."""
        if self._is_kept:
            torch.cuda.empty_cache()
        self._is_kept = False

    def has_run_out(self) -> bool:
        """Note that a capture ran out of memory; return whether the next one gets more."""
        self._ran_out = self._is_kept
        self._is_kept = False
        return self._ran_out


def has_plenty(device: torch.device) -> bool:
    """Whether a device has plenty of memory beside what is in the cache for another step.

    Measured is what there is for this process, which may be allowed only a part of the device.
    """
    if torch.cuda.get_allocator_backend() != "native":  # others do not tell
        return False
    stats = torch.cuda.memory_stats(device)
    reserved, allocated = (stats[f"{k}_bytes.all.current"] for k in ("reserved", "allocated"))
    # Of a step whose memory did not stay in the cache the peak tells, if nobody has reset it.
    step = max(reserved, stats["allocated_bytes.all.peak"]) - allocated
    free, total = torch.cuda.mem_get_info(device)
    allowed = int(total * torch.cuda.get_per_process_memory_fraction(device)) - reserved
    return bool(_TIMES * step + _LEAST_BYTES <= min(free, allowed))
