"""A model that is run to be measured, and then is as it was.

Parameters, gradients, buffers, random generators, and what modules keep in attributes are put back
(see `SavedModules`), and so are those of modules that the loss function holds. What is not found: a
generator of Python or NumPy that only a global name has, and what objects of a person's own keep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from torchfast._core.generators import held_with_generators
from torchfast._core.saved_modules import SavedModules


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
        eagerly: Whether nothing compiled runs in the body. Then only such parameters are copied
            as something is about to write to.
    """
    held = [] if function is None else held_with_generators(function)
    state = SavedModules([model, *held], device, eagerly=eagerly)
    state.drop_gradients()
    try:
        with state.keeping_writes() if eagerly else nullcontext():
            yield
    finally:
        state.put_back(thoroughly=True)
