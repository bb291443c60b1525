"""Iterators that a step draws from: a replay draws nothing, and would repeat what was drawn once.

How far an iterator has got cannot be asked of most, so a step whose code names one that it reaches
counts as drawing from it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from io import IOBase
from types import BuiltinMethodType, FunctionType, MethodWrapperType
from typing import Any

from torchfast._core.proxies import is_dead
from torchfast.graphs.places import is_own_class, parts_of


def iterator_in(value: Any) -> str | None:
    """Return what kind of iterator there is in a value, in a container too; None if none is."""
    for part in parts_of(value):
        if isinstance(part, BuiltinMethodType | MethodWrapperType):
            part = part.__self__  # of ``itertools.count().__next__``
        if is_dead(part):
            continue
        kind = part.__class__
        if issubclass(kind, Iterator) and not (issubclass(kind, IOBase) or _is_watched(kind)):
            is_builtin = kind.__module__ == "builtins"
            return kind.__qualname__ if is_builtin else f"{kind.__module__}.{kind.__qualname__}"
    return None


def _is_watched(kind: type) -> bool:
    """Whether it is a class in Python, of which each attribute is looked at that its code reads."""
    drawing = inspect.getattr_static(kind, "__next__")
    return is_own_class(kind) and isinstance(drawing, FunctionType)
