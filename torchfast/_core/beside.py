"""What a loss function uses beside the model: a head, a criterion, a teacher in its closure."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from types import CellType, ModuleType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from torch import Tensor, nn

from torchfast._core.generators import generators_in, has_state, held_with_generators
from torchfast._core.proxies import is_dead
from torchfast._core.reachable import behind_partials, read_by, used_by
from torchfast._core.user_code import is_users

if TYPE_CHECKING:
    from torchfast._core.code_names import Read
    from torchfast._core.generators import Generator


_DEPTH: Final = 3
_PLAIN: Final = (bool, int, float, str, bytes, type(None))
_LONGEST: Final = 256  # containers of more are data
_MOST: Final = 512  # of containers and objects that one variable leads to: more are data


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


class Kept(NamedTuple):
    """A tensor, or what may have some in it, and where another may be put: a table or a cell."""

    value: Any
    holder: Any = None
    key: Any = None

    def replace(self, tensor: Tensor) -> bool:
        """Put another one there, if there is a place for it."""
        if isinstance(self.holder, CellType):
            self.holder.cell_contents = tensor
        elif self.holder is not None:
            self.holder[self.key] = tensor
        return self.holder is not None


def tensors_beside(function: Callable[..., Any]) -> dict[str, Kept]:
    """Return the tensors that a function has under names of their own, by these.

    Those are the variables of its closure, global ones that its code names, its default values and
    those of a ``functools.partial``, the attributes of the object whose method it is, and what of
    all these is in dictionaries, lists and objects of the user's. Of objects only what code names
    counts.
    """
    read = read_by(function)
    found = dict(_named_tensors(function, "", _DEPTH, read, None))
    for table, names in read.globals:
        for name in sorted(names):
            path = f"{table.get('__name__')}.{name}"
            kept = Kept(table[name], table, name)
            for key, tensor in _of_value(kept, path, _DEPTH, read, iter(range(_MOST))):
                found.setdefault(key, tensor)
    return found


def unread_of(function: Callable[..., Any]) -> set[str]:
    """Return attributes of the object whose method a function is that its code does not name."""
    read, function = read_by(function), behind_partials(function)
    owner = function.__self__ if inspect.ismethod(function) else function
    if read.all or inspect.isfunction(owner):
        return set()
    return {name for name in _table_of(owner) if name not in read.names | read.called}


def _named_tensors(
    value: Any, path: str, depth: int, read: Read, room: Iterator[int] | None
) -> Iterator[tuple[str, Kept]]:
    table: dict[str, Kept] = {}
    while isinstance(value, functools.partial):
        table |= {f"partial.{place}": Kept(held) for place, held in enumerate(value.args)}
        table |= _all_in(value.keywords, "partial.")
        value = value.func
    if depth == 0 or isinstance(value, type | nn.Module):
        value = None
    if inspect.ismethod(value):
        if not isinstance(value.__self__, nn.Module):
            table |= _all_in(_table_of(value.__self__))
        value = value.__func__
    elif callable(value) and not inspect.isfunction(value):
        table |= _all_in(_table_of(value))
    if inspect.isfunction(value):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        table |= {n: Kept(cell.cell_contents, cell) for n, cell in cells if _is_filled(cell)}
        defaults = enumerate(value.__defaults__ or ())
        table |= {f"default.{place}": Kept(held) for place, held in defaults}
        table |= _all_in(value.__kwdefaults__ or {}, "default.")
    for name, kept in table.items():
        own = iter(range(_MOST)) if room is None else room
        yield from _of_value(kept, f"{path}{name}", depth, read, own)


def _of_value(
    kept: Kept, path: str, depth: int, read: Read, room: Iterator[int]
) -> Iterator[tuple[str, Kept]]:
    held = kept.value
    if is_dead(held):
        return
    if isinstance(held, Tensor):
        yield path, kept
        return
    is_end = isinstance(held, (*_PLAIN, type, nn.Module, ModuleType))
    if depth == 0 or is_end or next(room, None) is None:
        return
    if isinstance(held, dict | list | tuple):
        if len(held) <= _LONGEST:
            items = held.items() if isinstance(held, dict) else enumerate(held)
            holder = None if isinstance(held, tuple) else held
            for key, item in items:
                if isinstance(key, str | int) and type(item) not in _PLAIN:
                    inner = Kept(item, holder, key)
                    yield from _of_value(inner, f"{path}.{key}", depth - 1, read, room)
    elif callable(held):  # what a decorator wraps, say
        yield from _named_tensors(held, f"{path}.", depth - 1, read, room)
    elif _is_of_users(type(held)):
        for name, inner in _all_in(_table_of(held)).items():
            if read.all or name in read.names | read.called:
                yield from _of_value(inner, f"{path}.{name}", depth - 1, read, room)


def _all_in(table: Any, before: str = "") -> dict[str, Kept]:
    holder = table if isinstance(table, dict) else None  # that of a class is only read
    return {f"{before}{name}": Kept(value, holder, name) for name, value in table.items()}


def _table_of(value: Any) -> Any:
    try:
        return vars(value)
    except Exception:  # it has none, and what it says instead is its own affair
        return {}


def _is_of_users(kind: type) -> bool:
    # A notebook is no file.
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return kind.__module__ == "__main__" or is_users(file or "<frozen")


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
