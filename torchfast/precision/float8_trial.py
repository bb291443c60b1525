"""A forward, and a backward, that leave no trace: to look at a model before or beside its step.

What a trial would leave is put back (see `torchfast._core.untouched`); and it runs eagerly, so that
no code is compiled for a form of the model that no step has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from torchfast._core.untouched import untouched


@contextmanager
def without_trace(
    model: nn.Module, device: torch.device, forward: Callable[[], object]
) -> Iterator[None]:
    """Run the body eagerly, and put the model back behind it.

    Synchronizes: To read the state of the device's generator, and to compare buffers.
    """
    with (
        untouched(model, device, forward, eagerly=True),
        torch.compiler.set_stance("force_eager"),
    ):
        yield
