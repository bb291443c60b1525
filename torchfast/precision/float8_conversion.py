"""Converts single layers by a recipe, where the device can multiply so."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn

from torchfast._core.device import float8_obstacle
from torchfast._core.errors import UnsupportedDeviceError
from torchfast._core.measure import first_line
from torchfast.precision.float8_forward import forward_class, products
from torchfast.precision.float8_layers import MULTIPLE
from torchfast.precision.torchao_modules import torchao_module


@final
class Float8Conversion:
    """Makes what converts a layer.

    Args:
        device: Where the layers train.
        emulate: Whether products are emulated, on any device.

    Raises:
        UnsupportedDeviceError: A device without float8 products, and nothing is emulated.
        ImportError: torchao is missing, too old or too new.
    """

    def __init__(self, device: torch.device, *, emulate: bool) -> None:
        self._device, self._emulate = device, emulate
        obstacle = None if emulate else float8_obstacle(device)
        if obstacle is not None:
            raise UnsupportedDeviceError(
                "float8 products need an NVIDIA GPU of compute capability 8.9 or later (Ada, "
                f"Hopper, Blackwell), but {obstacle}; use precision='bf16', or "
                "Float8Options(emulate=True) to test the numbers"
            )
        names = "Float8LinearConfig", "convert_to_float8_training"
        self._ao = torchao_module("torchao.float8", "precision='fp8'", *names)
        products()  # or a recipe that is measured would only be refused

    def by(self, recipe: str) -> Callable[[nn.Module], nn.Module]:
        """Return what converts a layer, or those within a module that a filter names."""
        config = dataclasses.replace(
            self._ao.Float8LinearConfig.from_recipe_name(recipe), emulate=self._emulate
        )

        def convert(module: nn.Module) -> nn.Module:
            converted: nn.Module = self._ao.convert_to_float8_training(module, config=config)
            kind: Any = type(converted)
            converted.__class__ = forward_class(kind)
            return converted

        return convert

    def probe(self, recipe: str) -> None:
        """Raise if this device refuses a recipe: which takes which differs between releases.

        Raises:
            UnsupportedDeviceError: It does.
        """
        # Not initialised by torch, which would draw from the generators of the run.
        layer = nn.utils.skip_init(nn.Linear, MULTIPLE, MULTIPLE, False, device=self._device)
        nn.init.ones_(layer.weight)
        convert = self.by(recipe)
        try:
            with torch.autocast(self._device.type, dtype=torch.bfloat16):
                out: Tensor = convert(layer)(torch.ones(MULTIPLE, MULTIPLE, device=self._device))
            out.float().sum().backward()
        except (RuntimeError, NotImplementedError, ValueError) as error:
            raise UnsupportedDeviceError(
                f"this device refuses float8 with recipe={recipe!r} ({first_line(error)}); use "
                "recipe='auto' or another, or precision='bf16'"
            ) from error
