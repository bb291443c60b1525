"""Gradients that are copied to the host in the backward, as each is complete.

A copy is right only where nobody changes the gradient behind it: clipping, a loss scale, other
ranks and further micro-batches do. The count of writes does not tell: collectives and the kernel of
a loss scale leave it as it is, and clipping that finds the norm small enough writes what was there.
So the bits are added up on the device, when a gradient is copied and once more before the update.

With several micro-batches a gradient is complete at its last one, and a copy before that is worth
nothing. How many there are is known from the update before. Where copies turn out to be worthless
for another reason, some updates go by without any, each time more of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor

from torchfast.memory.copy_streams import CopyStreams

_INTEGERS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LONGEST_PAUSE: Final = 64  # updates


class _Copy(NamedTuple):
    """A gradient that was copied."""

    gradient: Tensor
    checksum: Tensor
    copied: Any  # the event behind it


@final
class EarlyGradients:
    """Copies gradients to the host in the backward.

    Args:
        side: Streams of the device.
        out: The stream that copies.
        landings: Where the gradient of a parameter goes, by parameter.
    """

    def __init__(self, side: CopyStreams, out: Any, landings: Mapping[Tensor, Tensor]) -> None:
        self._side, self._out, self._landings = side, out, landings
        self._hooks: dict[Tensor, Any] = {}
        self._copies: dict[Tensor, _Copy] = {}
        self._calls: Counter[Tensor] = Counter()
        self._calls_before: Counter[Tensor] = Counter()
        self._pause = self._pause_left = 0

    def __contains__(self, parameter: object) -> bool:
        """Whether a parameter's gradient is on the host, or on its way."""
        return parameter in self._copies

    def watch(self, parameter: Tensor) -> None:
        """Copy a parameter's gradient in each backward from now on."""
        self._hooks[parameter] = parameter.register_post_accumulate_grad_hook(self._copy)

    def forget(self, parameter: Tensor) -> None:
        """Watch a parameter no more."""
        self._copies.pop(parameter, None)
        if (hook := self._hooks.pop(parameter, None)) is not None:
            hook.remove()

    def close(self) -> None:
        """Watch none any more."""
        for parameter in [*self._hooks]:
            self.forget(parameter)

    def arrived(self) -> list[Tensor]:
        """Return the parameters whose gradients were copied, in the order of the copies."""
        return [
            parameter for parameter, copy in self._copies.items() if copy.gradient is parameter.grad
        ]

    def wait_for(self, parameter: Tensor) -> None:
        """Have the host wait for a copy, and so for all before it."""
        self._copies[parameter].copied.synchronize()

    def drop_changed(self) -> None:
        """Forget the copies of gradients that are not what was copied any more.

        Synchronizes: With all that the caller has enqueued and ``out`` waits for, if there are any.
        """
        copies = self._copies
        kept = {p: copies[p] for p in self.arrived()}
        if kept:
            with self._side.on(self._out):
                now = torch.stack([_checksum(copy.gradient) for copy in kept.values()])
                then = torch.stack([copy.checksum for copy in kept.values()])
                is_same = now == then
                self._out.record_event().synchronize()  # as for the first copies anyway
            pairs = zip(kept.items(), is_same.tolist(), strict=True)
            kept = {p: copy for (p, copy), same in pairs if same}
        if len(kept) < len(copies):
            self._pause = min(_LONGEST_PAUSE, 2 * self._pause + 1)
            self._pause_left = self._pause + 1  # this update is counted, too
        elif kept:
            self._pause = 0
        self._copies = kept

    def end_update(self) -> None:
        """Let go of all copies; the next backward makes others."""
        self._copies.clear()
        self._calls_before, self._calls = self._calls, Counter()
        self._pause_left = max(0, self._pause_left - 1)

    def _copy(self, parameter: Tensor) -> None:
        """Copy a gradient that the backward has just made, or added to."""
        side, gradient = self._side, parameter.grad
        if gradient is None or gradient.layout is not torch.strided or side.is_capturing():
            return
        out, home = self._out, side.current()
        before = self._copies.pop(parameter, None)
        if before is not None:  # its memory may be given out again
            home.wait_event(before.copied)
        self._calls[parameter] += 1
        is_complete = self._calls[parameter] == max(1, self._calls_before[parameter])
        if self._pause_left or not is_complete:
            return
        out.wait_event(home.record_event())
        with side.on(out), torch.no_grad():
            # Before the copy: the caller's stream goes on meanwhile, and a write that comes between
            # the two must not be in the sum alone.
            checksum = _checksum(gradient)
            self._landings[parameter].copy_(gradient, non_blocking=True)
        self._copies[parameter] = _Copy(gradient, checksum, out.record_event())


def _checksum(gradient: Tensor) -> Tensor:
    """Return the sum of a gradient's bits, as whole numbers of its width."""
    real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    return real.detach().view(_INTEGERS[real.element_size()]).sum(dtype=torch.int64)
