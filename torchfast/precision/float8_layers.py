"""Which linear layers of a model can compute in float8, and why the others cannot.

torchao converts every ``nn.Linear`` that a filter lets through. What must not be let through: sizes
that the float8 units do not take, modules that are more than their weight (hooks, a forward of
their own, which the replacement would not have), and layers that lose more than they gain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final

import torch
from torch import Tensor, nn

from torchfast._core.arguments import suggestion
from torchfast._core.errors import PlanError
from torchfast._core.local import local
from torchfast.precision.float8_options import Float8Options

# The float8 units multiply tiles whose sides are multiples of it.
MULTIPLE: Final = 16
_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
_HOOKS: Final = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A linear layer of a model.

    Attributes:
        name: Its first name in the model.
        places: Where modules hold it: the parent and the attribute.
        module: The layer.
        reason: Why it stays in bf16; None where float8 is possible.
    """

    name: str
    places: tuple[tuple[nn.Module, str], ...]
    module: nn.Linear
    reason: str | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Inputs and outputs."""
        return self.module.in_features, self.module.out_features


def check_no_layer(model: nn.Module) -> None:
    """Raise if the model is itself a linear layer: what holds it is not ours to change.

    Raises:
        PlanError: It is.
    """
    if isinstance(model, nn.Linear):
        raise PlanError(
            f"the model is itself a {type(model).__name__}, which float8 would have to replace by "
            "another object; put it into a container: nn.Sequential(model)"
        )


def survey(model: nn.Module, options: Float8Options) -> list[Layer]:
    """Return the linear layers of a model, in its order, each with what speaks against float8.

    Raises:
        PlanError: The model is in float8 already; a layer has no sizes yet; a name that fits no
            layer; or a layer that ``only`` names and that cannot be converted.
    """
    found = list(_linears(model))
    for layer in found:
        if isinstance(layer.module.weight, nn.UninitializedParameter):
            raise PlanError(
                f"layer {layer.name!r} is a {type(layer.module).__name__} and has no sizes yet, on "
                "which float8 depends; call the model once with a batch before"
            )
    done = next((layer.name for layer in found if is_float8(layer.module)), None)
    if done is not None:
        raise PlanError(
            f"layer {done!r} is in float8 already; close what converted it, or give the model as "
            "it was and leave the conversion to the plan"
        )
    names = [layer.name for layer in found]
    for argument in ("keep", "only"):
        for pattern in getattr(options, argument):
            if not any(fnmatchcase(name, pattern) for name in names):
                raise PlanError(
                    f"{argument} names {pattern!r}, but the model has no linear layer of that name"
                    f"{suggestion(pattern, names)}"
                )
    vocabularies = _vocabularies(model, found)
    return [_judged(layer, options, vocabularies) for layer in found]


def is_float8(module: nn.Module) -> bool:
    """Whether torchao has converted this layer; asked without importing torchao."""
    return any(kind.__name__ == "Float8Linear" for kind in type(module).__mro__)


def layer_input(args: tuple[Any, ...], named: Mapping[str, Any]) -> Tensor | None:
    """Return what a linear layer is called with, by position or by name."""
    given = args[0] if args else named.get("input")
    return given if isinstance(given, Tensor) else None


def _linears(model: nn.Module) -> Iterator[Layer]:
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for attribute, child in parent._modules.items():
            if isinstance(child, nn.Linear):
                places.setdefault(child, []).append((parent, attribute))
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            yield Layer(name=name, places=tuple(places[module]), module=module)


def _vocabularies(model: nn.Module, layers: list[Layer]) -> set[tuple[int, ...]]:
    """Return the shapes of the layers that give logits over what an embedding looks up.

    A table of positions can have the shape of a block's layers: 1024 positions of 1024 features.
    So a table of which there is a larger one counts only where no more than one layer is like it.
    """
    shapes = {tuple(m.weight.shape) for m in model.modules() if type(m) is nn.Embedding}
    largest: dict[int, int] = {}
    for rows, features in shapes:
        largest[features] = max(rows, largest.get(features, 0))
    alike = Counter(tuple(layer.module.weight.shape) for layer in layers)
    return {shape for shape in shapes if largest[shape[1]] == shape[0] or alike[shape] == 1}


def _judged(layer: Layer, options: Float8Options, vocabularies: set[tuple[int, ...]]) -> Layer:
    obstacle = _obstacle(layer.module)
    if obstacle is not None and layer.name in options.only:
        raise PlanError(
            f"only names layer {layer.name!r}, which cannot be in float8: {obstacle}; take it out "
            "of only"
        )
    reason = obstacle or _unwanted(layer, options, vocabularies)
    return Layer(name=layer.name, places=layer.places, module=layer.module, reason=reason)


def _obstacle(module: nn.Linear) -> str | None:
    """Return what makes float8 impossible."""
    if type(module) is not nn.Linear:
        return f"it is a {type(module).__name__}, not nn.Linear itself"
    hooks: list[Any] = [getattr(module, name) for name in _HOOKS]
    if any(hooks):
        return "it has hooks, which the converted layer would not have"
    if "forward" in vars(module):
        return "its forward was replaced"
    own = type(local(module.weight))
    if own not in (Tensor, nn.Parameter):
        return f"its weight is a {own.__name__}, which has products of its own"
    if module.weight.dtype not in _DTYPES:
        return f"its weight is {module.weight.dtype}"
    sizes = module.in_features, module.out_features
    if any(size % MULTIPLE for size in sizes):
        return f"{sizes[0]} to {sizes[1]} features are not divisible by {MULTIPLE}"
    return None


def _unwanted(
    layer: Layer, options: Float8Options, vocabularies: set[tuple[int, ...]]
) -> str | None:
    """Return why the options leave out a layer that could be converted."""
    if any(fnmatchcase(layer.name, pattern) for pattern in options.keep):
        return "keep names it"
    if layer.name in options.only:
        return None
    if options.only and not any(fnmatchcase(layer.name, pattern) for pattern in options.only):
        return "only names others"
    if not options.vocabulary and tuple(layer.module.weight.shape) in vocabularies:
        return "it gives the logits of the vocabulary"
    if options.recipe != "auto" and min(layer.shape) < options.smallest:
        return f"too small to gain: {layer.shape[0]} to {layer.shape[1]} features"
    return None
