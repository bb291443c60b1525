"""Which gradients a step makes anew, and to which it adds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

Gradients = list[tuple[nn.Parameter, Tensor | None]]
AddedTo = list[tuple[nn.Parameter, Tensor]]


class GradientsBefore:
    """The gradients before a step, none of them None.

    A step that adds to gradients writes them where there are none. So where there is none, zeros
    stand in, and a step that adds to these cannot be captured at this call.

    Args:
        parameters: Theirs.

    Attributes:
        added_to_none: Whether the step added to zeros that stand in; known after `compared`.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.added_to_none = False
        self._before: list[tuple[nn.Parameter, Tensor, int, bool]] = []
        for parameter in parameters:
            stands_in = parameter.grad is None
            if stands_in:
                if not parameter.requires_grad or not parameter.is_leaf:
                    continue
                parameter.grad = torch.zeros_like(parameter)
            assert parameter.grad is not None
            self._before.append((parameter, parameter.grad, parameter.grad._version, stands_in))

    def compared(self) -> tuple[Gradients, AddedTo]:
        """Return each parameter with the gradient that the step made, and that it added to."""
        made: Gradients = []
        added_to: AddedTo = []
        for parameter, old, version, stands_in in self._before:
            new = parameter.grad
            if new is not old:
                made.append((parameter, new))
            elif not stands_in:
                added_to.append((parameter, old))
            else:
                self.added_to_none |= old._version != version
                parameter.grad = None
                made.append((parameter, None))
        return made, added_to
