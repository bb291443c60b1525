"""torch without its compiler, for what compiles within itself."""

from __future__ import annotations

import torch


class EagerTorch:
    """torch, but for torch.compile, which does nothing: torchao's update as it is written."""

    def __getattr__(self, name):
        return getattr(torch, name)

    @staticmethod
    def compile(function, **_):
        return function
