"""Layers in float8 that a step finds in its model and did not put there.

They are those of another trainer that lives and shares layers with this one, of `Float8Linears` in
a loop of one's own, or of torchao by hand. Such a step computes in float8 whatever its plan says.
"""

from __future__ import annotations

import gc
from collections.abc import Collection

from torch import nn

from torchfast._core.decisions import Decision
from torchfast._core.errors import PlanError
from torchfast.precision.float8_forms import form_of
from torchfast.precision.float8_layers import is_float8

_SHOWN = 4
# In these the plan promises the numbers of the layers as they are; the others round anyway.
_FORMATS_AS_THEY_ARE = ("as_given", "fp32", "tf32")


def check_none_foreign(model: nn.Module, number_format: str) -> None:
    """Raise if the numbers would be others than a plan promises.

    Layers that torchao has converted by hand are the model as it was given.

    Raises:
        PlanError: They would.
    """
    if number_format not in _FORMATS_AS_THEY_ARE or not _converted(model):
        return
    gc.collect()  # a trainer that was dropped gives layers back, and hangs in a cycle until then
    names = _converted(model)
    if names:
        raise PlanError(
            f"precision={number_format!r} leaves numbers as they are, but another trainer, or "
            f"Float8Linears, has layer {names[0]!r} in float8; close() that, or give "
            "copy.deepcopy(model), whose layers are plain"
        )


def foreign_decisions(model: nn.Module, own: Collection[nn.Module]) -> list[Decision]:
    """Name the layers in float8 that are not a step's own, if there are any."""
    mine = {id(module) for module in own}
    names = [repr(name) for name, m in model.named_modules() if is_float8(m) and id(m) not in mine]
    if not names:
        return []
    more = f" and {len(names) - _SHOWN} more" if names[_SHOWN:] else ""
    detail = (
        f"{len(names)} layers are in float8 by another trainer, Float8Linears or torchao, and this "
        f"one computes so too: {', '.join(names[:_SHOWN])}{more}"
    )
    return [Decision(lever="float8 of others", outcome="left alone", detail=detail)]


def _converted(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if form_of(module)]
