"""Iterators that a step draws from: a replay draws nothing, and would repeat what was drawn once.

How far an iterator has got cannot be asked of most, so a step whose code names one that it reaches
counts as drawing from it. Not so where it only asks for attributes that the iterator does not have:
the name is then another object's, as of a tensor in ``parameter.data.mul_(x)``.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import BuiltinMethodType, CodeType, FunctionType, MethodWrapperType
from typing import Any

from torchfast._core.code_names import Read, is_in_strings, loads_of
from torchfast._core.proxies import is_dead
from torchfast.graphs.holders import is_own_class, parts_of


def iterator_in(value: Any) -> str | None:
    """Return what kind of iterator there is in a value, in a container too; None if none is."""
    for part in parts_of(value):
        if isinstance(part, BuiltinMethodType | MethodWrapperType):
            part = part.__self__  # of ``itertools.count().__next__``
        if is_dead(part):
            continue
        kind = part.__class__
        if issubclass(kind, Iterator) and not (_is_file(kind) or _is_watched(kind)):
            is_builtin = kind.__module__ == "builtins"
            return kind.__qualname__ if is_builtin else f"{kind.__module__}.{kind.__qualname__}"
    return None


def lines_drawing(name: str, value: Any, holder: object, read: Read) -> tuple[bool, str | None]:
    """Return whether code may draw from an iterator in a value by its name; and the first line.

    Args:
        name: Of the value.
        value: It, or a container of it.
        holder: What has it. Methods of that which call a captured step draw for it, and not in it.
        read: Where the name is found.
    """
    around = _codes_around_steps(holder)
    loads = list(loads_of(name, read.codes))
    drawing = [
        load
        for load in loads
        if not (load.is_tested or load.code in around)
        and (load.asked is None or hasattr(value, load.asked))
    ]
    is_drawn = bool(drawing) or not loads or read.all or is_in_strings(name, read.codes)
    places = [load for load in drawing if load.place is not None]
    first = min(places, key=lambda load: (load.code.co_filename, load.line), default=None)
    return is_drawn, None if first is None else first.place


def _codes_around_steps(holder: object) -> set[CodeType]:
    """Return the code of an object's methods that call a `CUDAGraphStep` that it has.

    Such a method may have the name of one that the step calls of something else: a ``step`` that is
    found for ``optimizer.step()``, a ``train`` for ``model.train()``.
    """
    held = getattr(holder, "__dict__", {})
    runners = [name for name, value in held.items() if hasattr(type(value), "_runs_steps")]
    if not runners:
        return set()
    methods = [f for kind in type(holder).__mro__ for f in vars(kind).values()]
    codes = [f.__code__ for f in methods if isinstance(f, FunctionType)]
    return {
        load.code
        for name in runners
        for load in loads_of(name, codes)
        if load.is_own and load.is_called
    }


def _is_file(kind: type) -> bool:
    """Whether it is a file's class: a step may write to one, and hardly reads the next line."""
    return hasattr(kind, "readline")


def _is_watched(kind: type) -> bool:
    """Whether it is a class in Python, of which each attribute is looked at that its code reads."""
    drawing = inspect.getattr_static(kind, "__next__")
    return is_own_class(kind) and isinstance(drawing, FunctionType)
