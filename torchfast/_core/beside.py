"""What a loss function uses beside the model: a head, a criterion, a teacher in its closure."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from types import CellType, ModuleType
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor, nn

from torchfast._core.generators import generators_in, has_state, held_with_generators
from torchfast._core.proxies import is_dead
from torchfast._core.reachable import read_by, used_by
from torchfast._core.user_code import is_users

if TYPE_CHECKING:
    from torchfast._core.code_names import Read
    from torchfast._core.generators import Generator


_DEPTH: Final = 3
_LONGEST: Final = 256  # containers of more are data


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

    Those are the variables of its closure, global ones that its code names, its default values and
    those of a ``functools.partial``, the attributes of the object whose method it is, and what of
    all these is in dictionaries, lists and objects of the user's. Of objects only what code names
    counts.
    """
    read = read_by(function)
    found = dict(_named_tensors(function, "", _DEPTH, read))
    for table, names in read.globals:
        for name in sorted(names):
            path = f"{table.get('__name__')}.{name}"
            for key, tensor in _of_value(table[name], path, _DEPTH, read):
                found.setdefault(key, tensor)
    return found


def _named_tensors(value: Any, path: str, depth: int, read: Read) -> Iterator[tuple[str, Tensor]]:
    table: dict[str, Any] = {}
    while isinstance(value, functools.partial):
        table |= {f"partial.{place}": held for place, held in enumerate(value.args)}
        table |= {f"partial.{name}": held for name, held in value.keywords.items()}
        value = value.func
    if depth == 0 or isinstance(value, type | nn.Module):
        value = None
    if inspect.ismethod(value):
        if not isinstance(value.__self__, nn.Module):
            table |= getattr(value.__self__, "__dict__", {})
        value = value.__func__
    elif callable(value) and not inspect.isfunction(value):
        table |= getattr(value, "__dict__", {})
    if inspect.isfunction(value):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        table |= {name: cell.cell_contents for name, cell in cells if _is_filled(cell)}
        defaults = enumerate(value.__defaults__ or ())
        table |= {f"default.{place}": held for place, held in defaults}
        table |= {f"default.{name}": held for name, held in (value.__kwdefaults__ or {}).items()}
    for name, held in table.items():
        yield from _of_value(held, f"{path}{name}", depth, read)


def _of_value(held: Any, path: str, depth: int, read: Read) -> Iterator[tuple[str, Tensor]]:
    if is_dead(held):
        return
    if isinstance(held, Tensor):
        yield path, held
    elif depth == 0 or isinstance(held, type | nn.Module | ModuleType):
        return
    elif isinstance(held, dict | list | tuple):
        if len(held) <= _LONGEST:
            items = held.items() if isinstance(held, dict) else enumerate(held)
            for key, item in items:
                if isinstance(key, str | int):
                    yield from _of_value(item, f"{path}.{key}", depth - 1, read)
    elif callable(held):  # what a decorator wraps, say
        yield from _named_tensors(held, f"{path}.", depth - 1, read)
    elif is_users(getattr(sys.modules.get(type(held).__module__), "__file__", None) or "<frozen"):
        for name, item in getattr(held, "__dict__", {}).items():
            if read.all or name in read.names | read.called:
                yield from _of_value(item, f"{path}.{name}", depth - 1, read)


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
