"""What a loss function uses beside the model: a head, a criterion, a teacher in its closure."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from types import CellType
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor, nn

from torchfast._core.generators import generators_in, has_state, held_with_generators
from torchfast._core.proxies import is_dead
from torchfast._core.reachable import used_by

if TYPE_CHECKING:
    from torchfast._core.generators import Generator


_DEPTH: Final = 3


def modules_beside(model: nn.Module, function: Callable[..., Any]) -> dict[str, nn.Module]:
    """Return the modules that a function uses and the model does not have, each once.

    Their names say where they were found, and are the same in a process that is built alike. A
    module that has the model in it, as one whose method is the loss function, is among them.
    """
    seen = set(map(id, model.modules()))
    found: dict[str, nn.Module] = {}
    roots = [value for value in used_by(function) if isinstance(value, nn.Module)]
    for number, root in enumerate(roots):
        for path, module in root.named_modules():
            if id(module) not in seen:
                seen.add(id(module))
                found[f"{number}.{path}" if path else str(number)] = module
    return found


def tensors_beside(function: Callable[..., Any]) -> dict[str, Tensor]:
    """Return the tensors that a function has under names of their own, by these.

    Those are the variables of its closure, and the attributes of the object whose method it is. A
    container in which tensors come and go gives none of them a name.
    """
    return dict(_named_tensors(function, "", _DEPTH))


def _named_tensors(value: Any, path: str, depth: int) -> Iterator[tuple[str, Tensor]]:
    while isinstance(value, functools.partial):
        value = value.func
    if depth == 0 or isinstance(value, type | nn.Module):
        return
    table: dict[str, Any] = {}
    if inspect.ismethod(value):
        table = (
            {} if isinstance(value.__self__, nn.Module) else getattr(value.__self__, "__dict__", {})
        )
    elif inspect.isfunction(value):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        table = {name: cell.cell_contents for name, cell in cells if _is_filled(cell)}
    elif callable(value):
        table = getattr(value, "__dict__", {})
    for name, held in table.items():
        if is_dead(held):
            continue
        if isinstance(held, Tensor):
            yield f"{path}{name}", held
        elif callable(held):  # what a decorator wraps, say
            yield from _named_tensors(held, f"{path}{name}.", depth - 1)


def _is_filled(cell: CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:  # of a variable that is not bound yet
        return False
    return True


def generators_of(model: nn.Module, function: Callable[..., Any]) -> dict[str, Generator]:
    """Return the generators that modules have in attributes, and a function holds, each once.

    They are torch's, NumPy's and Python's, of the model and of `modules_beside`.
    """
    found: dict[str, Generator] = {}
    seen: set[int] = set()
    for name, generator in _generators(model, function):
        if id(generator) not in seen:
            seen.add(id(generator))
            found[name] = generator
    return found


def _generators(model: nn.Module, function: Callable[..., Any]) -> Iterator[tuple[str, Generator]]:
    modules = {f"model.{path}": module for path, module in model.named_modules()}
    modules |= {f"loss.{path}": module for path, module in modules_beside(model, function).items()}
    for path, module in modules.items():
        for name, value in vars(module).items():
            for place, generator in enumerate(generators_in(value)):
                yield f"{path}.{name}.{place}", generator
    for place, generator in enumerate(filter(has_state, held_with_generators(function))):
        yield f"loss.{place}", generator
