"""Gradients that are copied to the host in the backward, as each is complete.

A copy is right only where nobody changes the gradient behind it: clipping, a loss scale, other
ranks and further micro-batches do. The count of writes does not tell: collectives and the kernel of
a loss scale leave it as it is, and clipping that finds the norm small enough writes what was there.
So the bits are hashed on the device (`BitHash`), when a gradient is copied and once more before the
update. What is changed while it is copied and changed back behind that is not noticed.

With several micro-batches a gradient is complete at its last one, and a copy before that is worth
nothing. How many there are is known from the update before. Where copies turn out to be worthless
for another reason, some updates go by without any, each time more of them.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor

from torchfast.memory.bit_hash import BitHash
from torchfast.memory.copy_streams import CopyStreams

_LONGEST_PAUSE: Final = 63  # updates


class _Copy(NamedTuple):
    """A gradient that was copied."""

    gradient: Tensor
    memory: Tensor  # that it had: whoever gives ``.data`` another lets go of it beneath the copy
    layout: tuple[Any, ...]
    hashed: Tensor
    copied: Any  # the event behind it


@final
class EarlyGradients:
    """Copies gradients to the host in the backward.

    Args:
        side: Streams of the device.
        out: The stream that copies.
        landings: Where the gradient of a parameter goes, by parameter.

    Attributes:
        is_on: Whether the next backward copies.
    """

    def __init__(self, side: CopyStreams, out: Any, landings: Mapping[Tensor, Tensor]) -> None:
        self._side, self._out, self._landings = side, out, landings
        self._hash = BitHash()
        self._hooks: dict[Tensor, Any] = {}
        self._copies: dict[Tensor, _Copy] = {}
        self._calls: Counter[Tensor] = Counter()
        self._calls_before: Counter[Tensor] = Counter()
        self._pause = self._pause_left = 0
        self._is_closed, self.is_on = False, True
        # Who drops it without close() is not told of each backward any more.
        weakref.finalize(self, _remove_all, self._hooks).atexit = False

    def __contains__(self, parameter: object) -> bool:
        """Whether a parameter's gradient is on the host, or on its way."""
        return parameter in self._copies

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Copy the gradients of parameters in each backward from now on, but of frozen ones."""
        for parameter in () if self._is_closed else parameters:
            if parameter not in self._hooks and parameter.requires_grad:
                told = partial(_tell, weakref.ref(self))
                self._hooks[parameter] = parameter.register_post_accumulate_grad_hook(told)

    def forget(self, parameter: Tensor) -> None:
        """Watch a parameter no more."""
        self._copies.pop(parameter, None)
        if (hook := self._hooks.pop(parameter, None)) is not None:
            hook.remove()

    def close(self) -> None:
        """Watch none any more."""
        self._is_closed = True
        self.drop_all()
        _remove_all(self._hooks)

    def arrived(self) -> list[Tensor]:
        """Return the parameters whose gradients were copied, in the order of the copies."""
        return [
            p
            for p, copy in self._copies.items()
            if copy.gradient is p.grad and copy.layout == _layout(copy.gradient)
        ]

    def wait_for(self, parameter: Tensor) -> None:
        """Have the host wait for a copy, and so for all before it."""
        self._copies[parameter].copied.synchronize()

    def drop_changed(self) -> None:
        """Forget the copies of gradients that are not what was copied any more.

        ``out`` must wait already for whatever may have changed them.

        Synchronizes: With ``out``, if there is anything to look at.
        """
        same: set[Tensor] = set()
        if parameters := self.arrived():
            with self._side.on(self._out):
                now = self._hash(*(self._copies[p].gradient for p in parameters))
                then = torch.cat([self._copies[p].hashed for p in parameters])
                is_same = now == then
                self._out.record_event().synchronize()
            pairs = zip(parameters, is_same.tolist(), strict=True)
            same = {parameter for parameter, is_the_same in pairs if is_the_same}
        if len(same) < len(self._copies):
            self._pause = min(_LONGEST_PAUSE, 2 * self._pause + 1)
            self._pause_left = self._pause + 1  # this update is counted, too
        elif same:
            self._pause = 0
        self._copies = {p: copy for p, copy in self._copies.items() if p in same}

    def end_update(self) -> None:
        """Let go of all copies; the next backward makes others."""
        self._copies.clear()
        self._calls_before, self._calls = self._calls, Counter()
        if self.is_on:
            self._pause_left = max(0, self._pause_left - 1)

    def drop_all(self) -> None:
        """Let go of gradients that are thrown away without an update."""
        if self._copies and not self._side.is_capturing():  # whose memory may go back to the driver
            self._side.current().wait_event(self._out.record_event())
        self._copies.clear()
        self._calls.clear()

    def copy(self, parameter: Tensor) -> None:
        """Copy a gradient that the backward has just made, or added to."""
        side, gradient = self._side, parameter.grad
        if gradient is None or gradient.layout is not torch.strided or side.is_capturing():
            return
        out, home = self._out, side.current()
        before = self._copies.pop(parameter, None)
        if before is not None:  # whose memory may go back to the driver
            home.wait_event(before.copied)
        self._calls[parameter] += 1
        is_complete = self._calls[parameter] == max(1, self._calls_before[parameter])
        if self._pause_left or not (is_complete and self.is_on):
            return
        out.wait_event(home.record_event())
        with side.on(out), torch.no_grad():
            # Before the copy: the caller's stream goes on meanwhile, and a write that comes between
            # the two must not be in the hash alone.
            hashed = self._hash(gradient)
            self._landings[parameter].copy_(gradient, non_blocking=True)
        self._copies[parameter] = _Copy(
            gradient, gradient.detach(), _layout(gradient), hashed, out.record_event()
        )


def _tell(early: weakref.ref[EarlyGradients], parameter: Tensor) -> None:
    if (there := early()) is not None:
        there.copy(parameter)


def _layout(gradient: Tensor) -> tuple[Any, ...]:
    """Return what says how to read the memory of a gradient."""
    return gradient.shape, gradient.stride(), gradient.is_conj(), gradient.is_neg()


def _remove_all(hooks: dict[Tensor, Any]) -> None:
    for hook in hooks.values():
        hook.remove()
    hooks.clear()
