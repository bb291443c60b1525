"""Which linear layers of a model can compute in float8, and why the others cannot.

torchao converts every ``nn.Linear`` that a filter lets through. What must not be let through: sizes
that the float8 units do not take, modules that compute otherwise (a forward of their own, a weight
that a hook makes), and layers that lose more than they gain.
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
# What torchao's layers have as attributes besides.
_SETTINGS: Final = (
    "config",
    "linear_mm_config",
    "scaling_type_input",
    "scaling_type_weight",
    "scaling_type_grad_output",
)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A linear layer of a model.

    Attributes:
        name: Its first name in the model.
        module: The layer.
        reason: Why it stays in bf16; None where float8 is possible.
    """

    name: str
    module: nn.Linear
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
            f"layer {done!r} is in float8 already; close what converted it, or give "
            "copy.deepcopy(model), whose layers are plain, or the model as it was before torchao, "
            "and leave the conversion to the plan"
        )
    names = [layer.name for layer in found]
    for argument in ("keep", "only"):
        for pattern in getattr(options, argument):
            if not any(fnmatchcase(name, pattern) for name in names):
                raise PlanError(
                    f"{argument} names {pattern!r}, but the model has no linear layer of that name"
                    f"{suggestion(pattern, names)}"
                )
    logits = _logits_layers(model, found)
    return [_judged(layer, options, gives_logits=layer.module in logits) for layer in found]


def is_float8(module: nn.Module) -> bool:
    """Whether torchao has converted this layer; asked without importing torchao."""
    return any(kind.__name__ == "Float8Linear" for kind in type(module).__mro__)


def layer_input(args: tuple[Any, ...], named: Mapping[str, Any]) -> Tensor | None:
    """Return what a linear layer is called with, by position or by name."""
    given = args[0] if args else named.get("input")
    return given if isinstance(given, Tensor) else None


def _linears(model: nn.Module) -> Iterator[Layer]:
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            yield Layer(name=name, module=module)


def _logits_layers(model: nn.Module, layers: list[Layer]) -> set[nn.Linear]:
    """Return the layers that give logits over what an embedding looks up.

    Surely those that share its weight, and those that the model itself names, as models of
    transformers do. Of others there is the shape only, which layers of a block may have too: of as
    many tables of a shape as many layers count, the last ones, for heads stand at the end.

    A table of positions can have the shape of a block's layers: 1024 positions of 1024 features.
    So a table of which there is a larger one counts only where no more layers are like it.
    """
    linears = [layer.module for layer in layers]
    tables = {id(m.weight): m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    # A table need not be a module: F.embedding takes a parameter of any.
    looked_up = {
        id(p) for m in model.modules() if not isinstance(m, nn.Linear) for p in _own_weights(m)
    }
    known = {m for m in linears if id(m.weight) in looked_up} | _named_outputs(model, linears)
    settled = {tuple(m.weight.shape) for m in known}
    largest: dict[int, int] = {}
    for weight in tables.values():
        rows, features = weight.shape
        largest[features] = max(rows, largest.get(features, 0))
    untied = Counter(tuple(weight.shape) for weight in tables.values())
    for shape, count in untied.items():
        alike = [m for m in linears if tuple(m.weight.shape) == shape]
        is_sure = len(alike) <= count or largest[shape[1]] == shape[0]
        if is_sure and shape not in settled:
            known.update(alike[-count:])
    return known


def _own_weights(module: nn.Module) -> Iterator[nn.Parameter]:
    return (p for p in module._parameters.values() if p is not None)


def _named_outputs(model: nn.Module, linears: list[nn.Linear]) -> set[nn.Linear]:
    """Return the layers that models within this one say they give their logits by."""
    found: set[nn.Module] = set()
    for module in model.modules():
        ask = getattr(module, "get_output_embeddings", None)
        if not callable(ask):
            continue
        try:
            output = ask()
        except (AttributeError, NotImplementedError):  # one that has no such layer
            continue
        if isinstance(output, nn.Module):
            found.update(output.modules())
    return {m for m in linears if m in found}


def _judged(layer: Layer, options: Float8Options, *, gives_logits: bool) -> Layer:
    obstacle = obstacle_of(layer.module)
    if obstacle is not None and layer.name in options.only:
        raise PlanError(
            f"only names layer {layer.name!r}, which cannot be in float8: {obstacle}; take it out "
            "of only"
        )
    reason = obstacle or _unwanted(layer, options, gives_logits=gives_logits)
    return Layer(name=layer.name, module=layer.module, reason=reason)


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


def _unwanted(layer: Layer, options: Float8Options, *, gives_logits: bool) -> str | None:
    """Return why the options leave out a layer that could be converted."""
    if any(fnmatchcase(layer.name, pattern) for pattern in options.keep):
        return "keep names it"
    if layer.name in options.only:
        return None
    if options.only and not any(fnmatchcase(layer.name, pattern) for pattern in options.only):
        return "only names others"
    if gives_logits and not options.vocabulary:
        return "it gives the logits of the vocabulary"
    if options.recipe != "auto" and min(layer.shape) < options.smallest:
        return f"too small to gain: {layer.shape[0]} to {layer.shape[1]} features"
    return None
