"""The forward of a converted layer: under autocast on any device, with any number of rows.

torchao's own asks for the autocast of CUDA alone, by a call that torch has deprecated, and so does
not cast on a CPU, where emulation is tested, and raises where warnings are errors. The product is
torchao's; what stands around it is here.

Where the whole forward is under autocast, a part of it that turns autocast off and computes in fp32
does so since its author found that 16 bits are too few. 8 are too, so the layer computes as it is.

The product that gives the gradient of the weight sums over the rows (batch times sequence), and the
float8 units take sums over multiples of 16 only. A last batch, or the tokens that an expert gets,
may be any number, none among them. Rows of zeros make up the rest: they change no scale and add
nothing to a sum, so the numbers are those of the rows that there are.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchfast._core.errors import PlanError
from torchfast.precision.float8_forms import UNDER_AUTOCAST, form_of
from torchfast.precision.float8_layers import MULTIPLE
from torchfast.precision.torchao_modules import torchao_module


def products() -> tuple[Any, Any]:
    """Return torchao's product, and what says in its settings that one is in bf16.

    Raises:
        ImportError: torchao is missing, too old or too new.
    """
    names = "matmul_with_hp_or_float8_args", "ScalingType"
    linear = torchao_module("torchao.float8.float8_linear", "precision='fp8'", names[0])
    config = torchao_module("torchao.float8.config", "precision='fp8'", names[1])
    return linear.matmul_with_hp_or_float8_args, config.ScalingType.DISABLED


@functools.cache  # one class for all layers, so that the compiler compiles one forward
def forward_class(converted: type[nn.Module]) -> type[nn.Module]:
    """Return torchao's class of converted layers with another forward.

    Args:
        converted: The class of a layer that torchao has converted.
    """
    product, disabled = products()

    def forward(self: Any, input: Tensor) -> Tensor:
        """Multiply in float8, in the type that autocast says or that the input has."""
        if not torch.compiler.is_compiling():
            check_call(self, input)
        kind = input.device.type
        if self._torchfast_under_autocast and is_outside_autocast(input):
            if not torch.compiler.is_compiling():
                note_fp32(self)
            return F.linear(input, self.weight, self.bias)
        if torch.is_autocast_enabled(kind):
            input = input.to(torch.get_autocast_dtype(kind))
        sums_rows = self.config.cast_config_input_for_grad_weight.scaling_type != disabled
        rows = math.prod(input.shape[:-1])
        given, more = input, rows_to_add(rows, sums_rows=sums_rows)
        if more:
            given = F.pad(input.reshape(rows, input.shape[-1]), (0, 0, 0, more))
        if self.config.emulate:
            check_sizes(given, self.weight, sums_rows=sums_rows)
        out: Tensor = product.apply(given, self.weight.t(), self.linear_mm_config, self.config)
        if more:
            out = out[:rows].reshape(*input.shape[:-1], out.shape[-1])
        # To autograd torchao's product is a view, which nothing may write to: as in bf16 it is new.
        new: Tensor = torch.ops.aten._unsafe_view(out, out.shape)
        return new if self.bias is None else out + self.bias.to(out.dtype)

    return type("Float8Linear", (converted,), {"forward": forward, UNDER_AUTOCAST: False})


def is_outside_autocast(input: Tensor) -> bool:
    """Whether a layer would compute in fp32, since what calls it has turned autocast off."""
    return input.dtype == torch.float32 and not torch.is_autocast_enabled(input.device.type)


def note_fp32(module: nn.Module) -> None:
    """Note, for the report, that a layer was called so in training."""
    form = form_of(module)
    if form is not None and module.training and torch.is_grad_enabled():
        form.was_in_fp32 = True


def rows_to_add(rows: int, *, sums_rows: bool) -> int:
    """Return how many rows of zeros the products of a layer need beside those that it gets.

    Args:
        rows: Those that it gets.
        sums_rows: Whether the gradient of the weight is a float8 product.
    """
    if rows == 0:
        return MULTIPLE  # there is no largest value of nothing
    return -rows % MULTIPLE if sums_rows else 0


def check_call(module: nn.Module, input: Tensor) -> None:
    """Raise where a layer is called in a way that torchao's product does not know.

    Raises:
        PlanError: With a nested tensor, or within a transform of ``torch.func``.
    """
    if input.is_nested:
        what = "a nested tensor"
    elif torch._C._are_functorch_transforms_active():
        what = "a call within a transform of torch.func"
    else:
        return
    form = form_of(module)
    name = "" if form is None else form.name
    raise PlanError(
        f"layer {name!r} is in float8 and got {what}, which float8 products do not take; leave it "
        f"out with Float8Options(keep=({name!r},))"
    )


def check_sizes(input: Tensor, weight: Tensor, *, sums_rows: bool) -> None:
    """Raise where the float8 units would: emulation alone would take every size.

    Raises:
        RuntimeError: Sides of a product that are not divisible by 16, in torch's words.
    """
    outputs, inputs = weight.shape
    sides = {"inputs": inputs, "outputs": outputs}
    if sums_rows:
        sides["rows"] = math.prod(input.shape[:-1])
    for name, size in sides.items():
        if size == 0 or size % MULTIPLE:
            raise RuntimeError(
                f"float8 products take {name} divisible by {MULTIPLE}, got {size} "
                f"(input {tuple(input.shape)}, weight {tuple(weight.shape)})"
            )
