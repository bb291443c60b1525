"""What may hold values that a step reads, told by its type wherever the type tells it.

Thousands of values are looked at in a walk, and nearly all are of some ten types: numbers, strings,
tensors, modules, the tables of modules. Of these the type is asked once in a walk.
"""

from __future__ import annotations

import functools
import inspect
import operator
import sys
import weakref
from argparse import Namespace
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Iterator
from enum import Enum
from pathlib import PurePath
from types import (
    FunctionType,
    MethodType,
    ModuleType,
    NoneType,
    SimpleNamespace,
)
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchfast._core.code_names import is_users_module
from torchfast._core.proxies import is_dead
from torchfast._core.reachable import behind_partials
from torchfast._core.user_code import is_users

CONTAINERS: Final = (list, tuple, dict, set, frozenset, deque)
LONGEST: Final = 256  # containers of more are data
AROUND_DATA: Final = (UserDict, UserList, ChainMap)
# They lead to what no code names.
READ_BY_VALUE: Final = (operator.attrgetter, operator.methodcaller, weakref.ref)
_VALUES = (bool, int, float, complex, str, bytes, range, slice, Enum, np.generic)
NAMESPACES = (SimpleNamespace, Namespace)
_WATCHED_ELSEWHERE = (nn.Module, torch.Generator, torch.amp.GradScaler, np.ndarray)
_HOLDERS = (FunctionType, functools.partial, Optimizer)
_LIBRARIES = frozenset(("torch", "torchfast", "numpy"))
# Classes of libraries of whose objects not only what code names counts, or whose objects never
# change; and what is looked through in ways of its own.
OTHERWISE: Final = (
    *(*AROUND_DATA, *READ_BY_VALUE, *CONTAINERS, PurePath),
    *(*_HOLDERS, type, MethodType, Tensor, *_WATCHED_ELSEWHERE),
)

# What a value is by its type. The first three hold nothing that a walk goes on to.
PLAIN: Final = 0  # it says all about itself
TENSOR: Final = 1
WATCHED: Final = 2  # elsewhere
CONTAINER: Final = 3
HOLDER: Final = 4
UNSURE: Final = 5  # the value is to be asked itself
_GROUPS = (
    (PLAIN, (NoneType, *_VALUES)),
    (TENSOR, (Tensor,)),
    (WATCHED, _WATCHED_ELSEWHERE),
    (CONTAINER, CONTAINERS),
    (HOLDER, (*_HOLDERS, MethodType)),
    (UNSURE, (type, *READ_BY_VALUE, *AROUND_DATA)),
)


@final
class Kinds(dict[type, int]):
    """What values are, by their types: each type is looked at once.

    It lives as long as a walk: what it knows of would be kept alive by it, and a class may change.
    """

    def __missing__(self, kind: type) -> int:
        found = [group for group, classes in _GROUPS if issubclass(kind, classes)]
        # What is of two groups is what the order of questions makes it; and some lie.
        is_sure = len(found) == 1 and not any(map(_speaks_for_itself, kind.__mro__[:-1]))
        self[kind] = found[0] if is_sure else UNSURE
        return self[kind]


def _speaks_for_itself(kind: type) -> bool:
    """Whether a class in Python has a say in what its objects are an instance of."""
    own = vars(kind)
    return "__class__" in own or isinstance(own.get("__getattribute__"), FunctionType)


def items_of(value: Any) -> list[Any]:
    """Return what is in a container."""
    return [*value.values()] if isinstance(value, dict) else [*value]


def parts_of(value: Any, within: tuple[int, ...] = ()) -> Iterator[Any]:
    """Yield a value and what is in it, if it is a container and no data."""
    if is_dead(value):
        return
    yield value
    if isinstance(value, CONTAINERS) and len(value) <= LONGEST and id(value) not in within:
        for item in items_of(value):
            yield from parts_of(item, (*within, id(value)))


def is_plain(value: Any) -> bool:
    """Whether a value says all about itself."""
    return value is None or (not is_dead(value) and isinstance(value, _VALUES))


def is_tensor(value: Any) -> bool:
    """Whether it is a tensor, or says so."""
    return not is_dead(value) and isinstance(value, Tensor)


def is_holder(value: Any, kinds: Kinds) -> bool:
    """Whether values that a step reads may be in it, and not only what else is watched."""
    if is_dead(value):
        return False
    if isinstance(value, CONTAINERS):
        # One of plain values says by itself what is in it.
        return len(value) <= LONGEST and not _are_plain(items_of(value), kinds)
    if isinstance(value, _HOLDERS) or inspect.ismethod(value):
        return True
    if isinstance(value, type):
        return is_own_class(value)
    if is_plain(value) or isinstance(value, (Tensor, *_WATCHED_ELSEWHERE)):
        return False
    return _has_attributes(value) and (
        type(value) in NAMESPACES
        or isinstance(value, AROUND_DATA)
        or is_own_class(type(value))
        or is_of_library(value)
    )


def is_of_library(value: Any) -> bool:
    """Whether only what code names counts of what an object holds, as a library's class made it.

    So it is of a module of the user's own.
    """
    if is_dead(value) or is_plain(value):
        return False
    if issubclass(type(value), ModuleType):
        return is_users_module(value)
    if isinstance(value, OTHERWISE) or type(value) in NAMESPACES or is_own_class(type(value)):
        return False
    return _has_attributes(value)


def _has_attributes(value: Any) -> bool:
    return isinstance(getattr(value, "__dict__", None), dict) or bool(slots_of(type(value)))


def _are_plain(values: list[Any], kinds: Kinds) -> bool:
    for value in values:
        kind = kinds[type(value)]
        if kind != PLAIN and (kind != UNSURE or not is_plain(value)):
            return False
    return True


def is_own_class(kind: type) -> bool:
    """Whether a class is neither a library's nor torchfast's."""
    owner = kind.__module__.partition(".")[0]
    return not (owner in _LIBRARIES or owner in sys.stdlib_module_names)


def is_own(function: object) -> bool:
    """Whether a function is of the user's own code; of objects, whether their class is."""
    function = behind_partials(function)
    function = function.__func__ if inspect.ismethod(function) else function
    if isinstance(function, FunctionType):
        return is_users(function.__code__.co_filename)
    return is_own_class(type(function))


def _is_private(name: str) -> bool:
    """Whether Python puts the class before a name that is written in it."""
    return name.startswith("__") and not name.endswith("__")


def slots_of(kind: type) -> list[str]:
    """Return the names of a class's slots, as ``dataclass(slots=True)`` makes them."""
    found: list[str] = []
    for cls in kind.__mro__:
        slots = vars(cls).get("__slots__", ())
        names = (slots,) if isinstance(slots, str) else tuple(slots)
        own = f"_{cls.__name__.lstrip('_')}"  # of private ones
        found += [f"{own}{name}" if _is_private(name) else name for name in names]
    return [name for name in found if not name.startswith("__")]
