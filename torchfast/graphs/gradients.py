"""Which gradients a step makes anew, and to which it adds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, final

from torch import Tensor


class Gradients(NamedTuple):
    """What a step has done with gradients, parameter by parameter.

    Attributes:
        made: With the gradient that it made anew, or None.
        added_to: With the gradient that was there before and that it changed: it is state.
        from_none: Those without a gradient before, which have one now.
    """

    made: list[tuple[Tensor, Tensor | None]]
    added_to: list[tuple[Tensor, Tensor]]
    from_none: list[Tensor]

    @property
    def adds(self) -> bool | None:
        """Whether the step adds to gradients that are there; None if that did not show."""
        if self.added_to:
            return True
        return False if len(self.made) > len(self.from_none) else None


@final
class GradientsBefore:
    """The gradients before a step.

    Args:
        parameters: Theirs.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._before = [
            (p, p.grad, -1 if p.grad is None else p.grad._version)
            for p in parameters
            if p.requires_grad
        ]

    def compared(self) -> Gradients:
        """Return what has become of them."""
        found = Gradients([], [], [])
        for parameter, old, version in self._before:
            new = parameter.grad
            if old is None and new is None:
                continue
            if new is not old:
                found.made.append((parameter, new))
                if old is None:
                    found.from_none.append(parameter)
            elif old is not None and old._version != version:
                found.added_to.append((parameter, old))
        return found
