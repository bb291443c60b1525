"""Where regions stand in a model: whether they may, and what has become of their places."""

from __future__ import annotations

from torch import nn
from torch.nn.parameter import is_lazy

from torchfast._core.compiled_code import is_compiled_by_torch
from torchfast.compiler.in_place import Region, region_of
from torchfast.compiler.options import CompileOptions
from torchfast.compiler.region_kind import RegionKind
from torchfast.compiler.regions import RegionChoice

# How the state of a region begins that does not run what was compiled.
ASIDE = ("eager", "set aside")

_REPLACED = (
    "eager: the module that was compiled there has been replaced or taken out. Remedy: make the "
    "CompiledModule, or the Trainer, when the model is complete"
)
_SET_ASIDE = (
    "set aside: compile() of the module was called since, and what that made runs in its place. "
    "Remedy: leave that call out, or compile with it alone"
)


def check_places(model: object) -> None:
    """Raise unless a model can be compiled in place; take out regions that nobody owns any more.

    Raises:
        TypeError: Not a module.
        ValueError: The model, or a module in it, is compiled already, or parameters of it are not
            initialized yet.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {model!r} ({type(model).__name__})")
    for name, parameter in model.named_parameters():
        # A trace puts the generators back behind it: each block would draw the same numbers.
        if is_lazy(parameter):
            raise ValueError(
                f"the parameter {name} of {type(model).__name__} is not initialized yet, and in "
                "compiled code it would begin otherwise than without; call the model once, on a "
                "batch, before it is compiled"
            )
    for path, module in model.named_modules():
        where = f"its module {path}" if path else f"{type(model).__name__}"
        if is_compiled_by_torch(module):
            raise ValueError(
                f"model is compiled already: {where} is what torch.compile returned; give the "
                "module that was given to torch.compile, or leave it as it is and do without "
                "CompiledModule"
            )
        region = region_of(module)
        if region is None:
            continue
        if region.module is not module:  # a shallow copy, which has taken it along
            delattr(module, Region.ATTRIBUTE)
            continue
        if not region.is_abandoned:
            raise ValueError(
                f"model is compiled by another CompiledModule already ({where}); close that, or "
                "the Trainer that made it, first"
            )
        region.undo()


def made_regions(
    choice: RegionChoice, options: CompileOptions
) -> tuple[tuple[RegionKind, ...], tuple[Region, ...]]:
    """Return the kinds and the regions of what was chosen; they stand nowhere yet."""
    kinds, regions = [], []
    for chosen in choice.kinds:
        kind = RegionKind(
            chosen.class_name,
            chosen.names,
            options,
            calls=chosen.regions[0][1].forward,
            num_regions=len(chosen.regions),
        )
        kinds.append(kind)
        regions += [Region(path, module, kind) for path, module in chosen.regions]
    return tuple(kinds), tuple(regions)


def state_of_place(model: nn.Module, region: Region, *, is_suspended: bool) -> str | None:
    """Return what has become of the place of a region; None if it stands there.

    Args:
        model: The model that it was put into.
        region: The region.
        is_suspended: Whether it was taken out for a while, by its owner.
    """
    try:
        is_there = model.get_submodule(region.path) is region.module
    except (AttributeError, RuntimeError):  # the latter of a script, in which nothing is replaced
        is_there = region.path == "" and region.module is model
    if not is_there:
        return _REPLACED
    return None if region.is_in_place or is_suspended else _SET_ASIDE


def told_of_place(path: str, state: str) -> str:
    """Return what `state_of_place` says, for a report."""
    verb = "runs" if state.startswith("eager") else "is"
    return f"{path or 'the model'} {verb} {state}"
