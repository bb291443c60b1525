"""The modes of a model's modules, training or eval, put back one by one: they need not agree."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def preserved_modes(*models: nn.Module) -> Iterator[None]:
    """Put every module of some models back into its mode, whatever the body does.

    A class whose ``train()`` does more than to set the mode, as layers that merge their adapters
    into a weight for inference, is put back by it.
    """
    modes = [(module, module.training) for model in models for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            if type(module).train is not nn.Module.train and module.training != training:
                module.train(training)
        for module, training in modes:
            module.training = training


def put_into_eval(*models: nn.Module) -> None:
    """Put models into eval mode, but for those that are in it already."""
    for model in models:
        if any(module.training for module in model.modules()):
            model.eval()
