"""Which linear layers of a model can compute in float8, and why the others cannot.

torchao converts every ``nn.Linear`` that a filter lets through. What must not be let through: sizes
that the float8 units do not take, modules that compute otherwise (a forward of their own, a weight
that a hook makes), and layers that lose more than they gain.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchfast._core.arguments import suggestion
from torchfast._core.building import optimized
from torchfast._core.errors import PlanError
from torchfast._core.local import local
from torchfast.precision.float8_options import Float8Options
from torchfast.precision.float8_vocabulary import logits_layers

# The float8 units multiply tiles whose sides are multiples of it.
MULTIPLE: Final = 16
_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
# What torchao's layers have as attributes besides.
_SETTINGS: Final = (
    "config",
    "linear_mm_config",
    "scaling_type_input",
    "scaling_type_weight",
    "scaling_type_grad_output",
)


_SHOWN: Final = 4


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A linear layer of a model.

    Attributes:
        name: Its first name in the model.
        module: The layer.
        names: All its names: one that several modules hold has several.
        reason: Why it stays in bf16; None where float8 is possible.
    """

    name: str
    module: nn.Linear
    names: tuple[str, ...]
    reason: str | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Inputs and outputs."""
        return self.module.in_features, self.module.out_features


def check_no_layer(model: nn.Module) -> None:
    """Raise if the model is itself a linear layer: the type of a model stays.

    Raises:
        PlanError: It is.
    """
    if isinstance(model, nn.Linear):
        raise PlanError(
            f"the model is itself a {type(model).__name__}, whose class float8 would have to "
            "change; put it into a container: nn.Sequential(model)"
        )


def survey(model: nn.Module, options: Float8Options) -> list[Layer]:
    """Return the linear layers of a model, in its order, each with what speaks against float8.

    Raises:
        PlanError: The model is in float8 already; a layer has no sizes yet; a name that fits no
            layer; or a layer that ``only`` names and that cannot be converted.
    """
    found = _linears(model)
    for layer in found:
        if isinstance(layer.module.weight, nn.UninitializedParameter):
            raise PlanError(
                f"layer {layer.name!r} is a {type(layer.module).__name__} and has no sizes yet, on "
                "which float8 depends; call the model once with a batch before"
            )
    done = next((layer.name for layer in found if is_float8(layer.module)), None)
    if done is not None:
        raise PlanError(
            f"layer {done!r} is in float8 already; close what converted it, or give "
            "copy.deepcopy(model), whose layers are plain, or the model as it was before torchao, "
            "and leave the conversion to the plan"
        )
    names = [name for layer in found for name in layer.names]
    for argument in ("keep", "only"):
        for pattern in getattr(options, argument):
            if not any(fnmatchcase(name, pattern) for name in names):
                raise PlanError(
                    f"{argument} names {pattern!r}, but the model has no linear layer of that name"
                    f"{suggestion(pattern, names)}"
                )
    logits = logits_layers(model, [layer.module for layer in found])
    return [_judged(layer, options, logits.get(layer.module)) for layer in found]


def is_float8(module: nn.Module) -> bool:
    """Whether torchao has converted this layer; asked without importing torchao."""
    return any(kind.__name__ == "Float8Linear" for kind in type(module).__mro__)


def layer_input(args: tuple[Any, ...], named: Mapping[str, Any]) -> Tensor | None:
    """Return what a linear layer is called with, by position or by name."""
    given = args[0] if args else named.get("input")
    return given if isinstance(given, Tensor) else None


def _linears(model: nn.Module) -> list[Layer]:
    names: dict[nn.Linear, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Linear):
            names.setdefault(module, []).append(name)
    return [Layer(name=of[0], module=module, names=tuple(of)) for module, of in names.items()]


def _judged(layer: Layer, options: Float8Options, gives_logits: str | None) -> Layer:
    obstacle = obstacle_of(layer.module)
    named = next((name for name in layer.names if name in options.only), None)
    if obstacle is not None and named is not None:
        raise PlanError(
            f"only names layer {named!r}, which cannot be in float8: {obstacle}; take it out of "
            "only"
        )
    return dataclasses.replace(layer, reason=obstacle or _unwanted(layer, options, gives_logits))


def obstacle_of(module: nn.Linear) -> str | None:
    """Return what makes float8 impossible."""
    if type(module) is not nn.Linear:
        return f"it is a {type(module).__name__}, not nn.Linear itself"
    if module._modules:
        return f"it has modules of its own ({', '.join(module._modules)})"
    if module._parameters.get("weight") is None:
        return "its weight is no parameter of it"
    if taken := [name for name in _SETTINGS if name in vars(module)]:
        return f"it has an attribute {taken[0]!r}, which torchao's layers use"
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


def _unwanted(layer: Layer, options: Float8Options, gives_logits: str | None) -> str | None:
    """Return why the options leave out a layer that could be converted."""
    if _is_named(layer, options.keep):
        return "keep names it"
    if any(name in options.only for name in layer.names):
        return None
    if options.only and not _is_named(layer, options.only):
        return "only names others"
    if gives_logits is not None and not options.vocabulary:
        return gives_logits
    if options.recipe != "auto" and min(layer.shape) < options.smallest:
        return f"too small to gain: {layer.shape[0]} to {layer.shape[1]} features"
    return None


def _is_named(layer: Layer, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for name in layer.names for pattern in patterns)


def check_held(optimizer: Optimizer, model: nn.Module, layers: Sequence[Layer]) -> None:
    """Raise if an optimizer holds a tensor in place of the weight of a layer that can be in float8.

    Raises:
        PlanError: It was built on another model, or on this one before its weights were replaced.
    """
    held = {id(p) for p in optimized(optimizer)}
    own = {id(p) for p in model.parameters()}
    # What the loss trains besides the model is there too, but has no such shape.
    foreign = {tuple(p.shape) for p in optimized(optimizer) if id(p) not in own}
    lacking = [
        layer.name
        for layer in layers
        if layer.reason is None
        and layer.module.weight.requires_grad
        and id(layer.module.weight) not in held
        and tuple(layer.module.weight.shape) in foreign
    ]
    if lacking:
        raise PlanError(
            f"{type(optimizer).__name__} holds {len(held - own)} parameters that this model "
            f"does not have and lacks the weight of {lacking[0]!r}, so it would train tensors "
            "that nothing reads; build it on this model's parameters, or pass a callable "
            "parameters -> Optimizer"
        )


def shown(names: list[str]) -> str:
    """Return some names, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"
