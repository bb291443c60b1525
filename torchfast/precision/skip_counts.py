"""How many updates were skipped, which were the last, how many in a row: counted on the device.

A step adds no kernel for it. It leaves its flag, which is there anyway, in a list; once in many
steps, or when somebody asks, the list is counted in one go.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

NUM_LAST = 8
_SETTLED_EVERY = 64
_NONE = -1


class Skips(NamedTuple):
    """What was counted, on the host.

    Attributes:
        num_skipped: Updates skipped in all.
        in_a_row: Those since the last update that was done.
        longest: Most in a row since `SkipCounts.forget_longest`.
        last_steps: Numbers of the last skipped steps, at most eight; the first step is 1.
    """

    num_skipped: int
    in_a_row: int
    longest: int
    last_steps: tuple[int, ...]


@final
class SkipCounts:
    """Counts skipped updates without reading their flags.

    Args:
        device: Where the flags are.

    Synchronizes: Only `read`.
    """

    def __init__(self, device: torch.device) -> None:
        self._pending: list[Tensor] = []
        self._first = 0  # the number of the step that left the first pending flag
        self._num_skipped = torch.zeros((), dtype=torch.int64, device=device)
        self._in_a_row = torch.zeros_like(self._num_skipped)
        self._longest = torch.zeros_like(self._num_skipped)
        self._last = torch.full((NUM_LAST,), _NONE, dtype=torch.int64, device=device)

    def note(self, flag: Tensor, step: int) -> None:
        """Take the flag (0 or 1) of the step of this number; nobody may change it afterwards."""
        if self._pending and step != self._first + len(self._pending):
            self._settle()
        if not self._pending:
            self._first = step
        self._pending.append(flag)
        if len(self._pending) >= _SETTLED_EVERY:
            self._settle()

    def num_skipped(self) -> Tensor:
        """Return how many were skipped in all, on the device."""
        self._settle()
        return self._num_skipped

    def longest(self) -> Tensor:
        """Return the most in a row since `forget_longest`, on the device."""
        self._settle()
        return self._longest

    def forget_longest(self) -> None:
        """Begin to look for the longest run anew; a run that goes on keeps its length."""
        self._settle()
        self._longest = torch.zeros_like(self._longest)

    def read(self) -> Skips:
        """Return all counts. Synchronizes: Yes, once."""
        self._settle()
        counts = torch.stack([self._num_skipped, self._in_a_row, self._longest])
        num_skipped, in_a_row, longest, *last = torch.cat([counts, self._last]).tolist()
        steps = tuple(sorted(step for step in last if step != _NONE))
        return Skips(num_skipped, in_a_row, longest, steps)

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes, as ints. Synchronizes: Yes."""
        found = self.read()
        return {
            "num_skipped": found.num_skipped,
            "in_a_row": found.in_a_row,
            "last_steps": list(found.last_steps),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what `state_dict` returned; what it lacks begins anew."""
        self._pending = []
        device = self._last.device
        steps = list(state.get("last_steps", ()))[-NUM_LAST:]
        steps = [_NONE] * (NUM_LAST - len(steps)) + steps
        # New tensors: what was handed out before may be on its way to the host.
        self._num_skipped = torch.tensor(state.get("num_skipped", 0), device=device)
        self._in_a_row = torch.tensor(state.get("in_a_row", 0), device=device)
        self._longest = torch.zeros_like(self._in_a_row)
        self._last = torch.tensor(steps, device=device)

    def _settle(self) -> None:
        if not self._pending:
            return
        with torch.no_grad():
            skipped = torch.stack(self._pending) > 0
            place = torch.arange(len(skipped), device=skipped.device)
            # For each step the last one that was done, at or before it; those before the first
            # are as if the run of skips that is under way had begun right after one.
            before = -(1 + self._in_a_row)
            done = torch.where(skipped, before, place)
            last_done = torch.where(place[:, None] >= place, done, before).amax(1)
            runs = place - last_done
            self._num_skipped = self._num_skipped + skipped.sum()
            self._in_a_row = runs[-1]
            self._longest = torch.maximum(self._longest, runs.max())
            steps = (place + self._first - _NONE) * skipped + _NONE  # _NONE where it was done
            self._last = torch.cat([self._last, steps]).topk(NUM_LAST).values
        self._pending = []
