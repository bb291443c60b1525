"""A model that is run to be measured, and then is as it was.

Parameters, gradients, buffers, random generators, and what modules keep in attributes are put back
(see `SavedModules`), and so are those of modules that the loss function holds. What is not found: a
generator of Python or NumPy that only a global name has, and what objects of a person's own keep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from torchfast._core.generators import held_with_generators
from torchfast._core.reachable import used_by
from torchfast._core.saved_modules import SavedModules

_SMALL_BYTES: Final = 2**26  # more than this may be data


@final
class _EagerLook:
    """Whether a model is run to be looked at, as it is: nothing of that is to be compiled or told.

    Attributes:
        is_on: Whether it is, in any thread: a backward may run what it recomputes in another.
    """

    def __init__(self) -> None:
        self.is_on = False

    @contextmanager
    def within(self) -> Iterator[None]:
        """Look in the body, perhaps within another look."""
        before, self.is_on = self.is_on, True
        try:
            yield
        finally:
            self.is_on = before


EAGER_LOOK: Final = _EagerLook()


@final
class TrialRun:
    """What is run on trial, beside the loss function in it: what that uses is put back, too.

    Args:
        run: Runs it.
        loss_fn: The loss function.
    """

    def __init__(self, run: Callable[[], Any], loss_fn: Callable[..., Any]) -> None:
        self._run, self.loss_fn = run, loss_fn

    def __call__(self) -> Any:
        """Run it."""
        return self._run()


@contextmanager
def untouched(
    model: nn.Module,
    device: torch.device,
    function: Callable[..., Any] | None = None,
    *,
    eagerly: bool = False,
) -> Iterator[None]:
    """Let the body run forwards and backwards of a model, and put back what they change.

    Args:
        model: The model.
        device: Whose generator is put back beside those of the host.
        function: What is run, if it may hold modules, tensors and generators of its own.
        eagerly: Let nothing compiled run in the body. Then only such parameters are copied as
            something is about to write to.
    """
    state = SavedModules([model, *holders_in(function, eagerly=eagerly)], device, eagerly=eagerly)
    state.drop_gradients()
    try:
        if eagerly:
            with EAGER_LOOK.within(), state.keeping_writes():
                yield
        else:
            yield
    finally:
        state.put_back(thoroughly=True)


def holders_in(function: Callable[..., Any] | None, *, eagerly: bool = False) -> list[Any]:
    """Return what a function holds, and what the loss function has by global names.

    Large tensors are left out, unless only those are copied that are written to.
    """
    if function is None:
        return []
    loss_fn = function.loss_fn if isinstance(function, TrialRun) else function
    held = [*held_with_generators(function), *used_by(loss_fn)]
    return [v for v in held if eagerly or not isinstance(v, Tensor) or v.nbytes <= _SMALL_BYTES]
