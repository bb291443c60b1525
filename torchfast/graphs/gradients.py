"""Which gradients a step makes anew, and to which it adds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from torchfast._core.building import optimized
from torchfast.graphs.named_state import NamedState


class Gradients(NamedTuple):
    """What a step has done with gradients, parameter by parameter.

    Attributes:
        made: With the gradient that it made anew, or None.
        added_to: With the gradient that was there before, and that it changed or read: it is state.
        let_go: Those whose gradient was there before and was used so, and is gone.
        gone: Those whose gradient was there before and is gone, in a step that leaves none: it may
            have been used.
        anew: Those whose gradient was there before and was not used.
        from_none: Those without a gradient before.
    """

    made: list[tuple[Tensor, Tensor | None]]
    added_to: list[tuple[Tensor, Tensor]]
    let_go: list[Tensor]
    gone: list[Tensor]
    anew: list[Tensor]
    from_none: list[Tensor]


@final
class GradientsBefore:
    """The gradients before a step.

    Args:
        state: Of its parameters, and with the optimizers that update in the step.
    """

    def __init__(self, state: NamedState) -> None:
        self._before = [
            (p, p.grad, -1 if p.grad is None else p.grad._version)
            for p in state.parameters
            if p.requires_grad
        ]
        self._optimizers = state.optimizers

    def compared(self) -> Gradients:
        """Return what has become of them."""
        found = Gradients([], [], [], [], [], [])
        kept = []
        for parameter, old, version in self._before:
            new = parameter.grad
            if new is not old:
                found.made.append((parameter, new))
            if old is None:
                found.from_none.append(parameter)
            elif new is not old:
                is_used = old._version != version
                (found.let_go if is_used else found.anew).append(parameter)
            elif old._version != version:
                found.added_to.append((parameter, old))
            else:
                kept.append((parameter, old))
        if found.added_to or found.let_go or any(new is not None for _, new in found.made):
            return found
        # Perhaps without a backward: then an update reads what was there. Versions do not tell of
        # that, nor of what foreach writes.
        updated = {id(p) for optimizer in self._optimizers for p in optimized(optimizer)}
        added_to = [(p, old) for p, old in kept if id(p) in updated]
        gone = [p for p in found.anew if id(p) in updated]
        anew = [p for p in found.anew if id(p) not in updated]
        return found._replace(added_to=added_to, gone=gone, anew=anew)


@final
class GradientHabits:
    """What steps were seen to do with gradients that were there before them."""

    def __init__(self) -> None:
        self._added, self._anew = WeakTensorKeyDictionary(), WeakTensorKeyDictionary()

    def note(self, found: Gradients) -> None:
        """Remember what a step has done."""
        for parameter in (*found.let_go, *(p for p, _ in found.added_to)):
            self._added[parameter] = True
        for parameter in found.anew:
            self._anew[parameter] = True

    @contextmanager
    def learning(self, state: NamedState, device: torch.device) -> Iterator[None]:
        """Remember what the body, a step, does; and which tensors that nobody named it writes to.

        Synchronizes: If there are any on the device.
        """
        before = GradientsBefore(state)
        with state.noting_writes(device):
            yield
        self.note(before.compared())

    def unsure(self, found: Gradients) -> list[Tensor]:
        """Return those without a gradient to which, with one, the step might have added.

        A step that was seen to make some anew, and to add to none, makes all anew.
        """
        if self._anew and not self._added:
            return []
        return [p for p in found.from_none if p in self._added or p not in self._anew]

    def adds_to_any(self, parameters: Sequence[Tensor]) -> bool:
        """Whether a step was seen to add to a gradient of one of them."""
        return any(parameter in self._added for parameter in parameters)


def none_left(optimizers: Sequence[Optimizer]) -> list[tuple[Tensor, Tensor | None]]:
    """Return the parameters of some optimizers that have no gradient now, each with None."""
    return [(p, None) for o in optimizers for p in optimized(o) if p.grad is None]
