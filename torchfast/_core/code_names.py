"""Which attributes code may read: found in the bytecode, without running anything.

An object that a step reaches may hold what the step reads (a weight of the loss) beside what only
the loop around it counts (the steps so far). What no code of the step names, it does not read.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Iterable
from contextlib import suppress
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from torchfast._core.user_code import is_users

_MOST_FUNCTIONS = 2000
_INSTALLED = "-packages"  # whose ``__dict__`` is about objects of their own
# From 3.12 on the lowest bit of LOAD_ATTR's argument says that a method is called.
_HAS_BIT = sys.version_info >= (3, 12)
# Reached without being named.
_ALWAYS = frozenset(("__call__", "forward", "__getattr__", "__getattribute__", "__getitem__"))
_WITH_NAMES_IN_STRINGS = frozenset(("getattr", "attrgetter"))
_WITH_ALL_NAMES = frozenset(("__dict__", "vars", "asdict"))


class Names(NamedTuple):
    """What a function names.

    Attributes:
        read: Attributes that it reads; not those that it only calls.
        used: All names, of methods and global variables too.
        strings: Those that are constants of it.
        all: Whether it may read all attributes of what it sees.
    """

    read: frozenset[str]
    used: frozenset[str]
    strings: frozenset[str]
    all: bool


def names_read(functions: Iterable[Any], classes: Iterable[type]) -> frozenset[str] | None:
    """Return the names of attributes that functions may read; None if it may be any.

    Followed are the functions that they name (global ones, those of modules, methods of the
    classes), what these wrap, and those in their closures. torch, the standard library and
    torchfast are not. Where one of the user's reads an attribute by a string, all their strings
    count: it may have got it from another.

    Args:
        functions: Where it begins, with what is called of the classes without being named.
        classes: Of the objects that they meet.
    """
    waiting = [found for f in functions for found in _with_wrapped(f)]
    every = {c for cls in classes for c in cls.__mro__ if not c.__module__.startswith("torch.")}
    waiting += [f for cls in every for name in _ALWAYS for f in _functions_of(vars(cls).get(name))]
    read: set[str] = set()
    used = set(_ALWAYS)
    strings: set[str] = set()
    named: set[str] = set()  # by strings
    by_strings = False
    seen: set[CodeType] = set()
    while waiting:
        function = waiting.pop()
        code = function.__code__
        if code in seen or not is_users(code.co_filename):
            continue
        seen.add(code)
        names = _names_of(code)
        if (names.all and _INSTALLED not in code.co_filename) or len(seen) > _MOST_FUNCTIONS:
            return None
        read |= names.read
        strings |= names.strings
        waiting += _globals_of(function, names.used)
        waiting += _enclosed_by(function)
        waiting += _of_classes(every, names.used - used)
        used |= names.used
        if names.used & _WITH_NAMES_IN_STRINGS:
            by_strings |= _INSTALLED not in code.co_filename
            named |= names.strings
        if by_strings:
            named |= strings
        read |= named
        waiting += _of_classes(every, {name for name in named - used if name.isidentifier()})
        used |= named
    return frozenset(read)


def _of_classes(classes: Iterable[type], names: Iterable[str]) -> list[FunctionType]:
    return [f for n in names for cls in classes for f in _functions_of(vars(cls).get(n))]


def _globals_of(function: FunctionType, names: frozenset[str]) -> set[Any]:
    found: set[Any] = set()
    for value in map(function.__globals__.get, names):
        if isinstance(value, ModuleType) and is_users(getattr(value, "__file__", "") or ""):
            found.update(f for n in names for f in _with_wrapped(vars(value).get(n)))
        found.update(_with_wrapped(value))
    return found


def _enclosed_by(function: FunctionType) -> list[FunctionType]:
    """Return the functions that a function has from around it, as one has that wraps another."""
    found: list[FunctionType] = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # it is not filled yet
            found += _with_wrapped(cell.cell_contents)
    return found


def _with_wrapped(value: Any) -> list[FunctionType]:
    """Return a function and what it wraps, which a decorator of a library's runs; [] of others."""
    found: list[FunctionType] = []
    while isinstance(value, FunctionType) and value not in found:
        found.append(value)
        value = vars(value).get("__wrapped__")
    return found


def _functions_of(value: Any) -> list[FunctionType]:
    if isinstance(value, property):
        value = value.fget
    elif isinstance(value, staticmethod | classmethod):
        value = value.__func__
    elif isinstance(value, functools.cached_property):
        value = value.func
    return _with_wrapped(value)


@functools.lru_cache(maxsize=4096)
def _names_of(code: CodeType) -> Names:
    read: set[str] = set()
    used, strings, others = set(code.co_names), set[str](), []
    for instruction in dis.get_instructions(code):
        is_call = _HAS_BIT and bool((instruction.arg or 0) & 1)
        if instruction.opname in ("LOAD_ATTR", "LOAD_SUPER_ATTR") and not is_call:
            read.add(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            others.append(_names_of(constant))
        else:
            strings |= _strings_in(constant)
    for inner in others:
        read |= inner.read
        used |= inner.used
        strings |= inner.strings
    is_all = bool(used & _WITH_ALL_NAMES) or any(inner.all for inner in others)
    return Names(frozenset(read), frozenset(used), frozenset(strings), is_all)


def _strings_in(constant: Any) -> set[str]:
    """Return the strings of a constant, which may be ``("a", "b")``."""
    if isinstance(constant, str):
        return {constant}
    if isinstance(constant, tuple | frozenset):
        return {found for part in constant for found in _strings_in(part)}
    return set()
