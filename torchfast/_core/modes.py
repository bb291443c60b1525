"""The modes of a model's modules, training or eval, put back one by one: they need not agree."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def preserved_modes(*models: nn.Module) -> Iterator[None]:
    """Put every module of some models back into its mode, whatever the body does."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
