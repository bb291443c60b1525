"""What a function uses besides its arguments: models and tensors that a step reaches through it."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchfast._core.code_names import Read, names_read
from torchfast._core.proxies import is_dead

P = ParamSpec("P")
R = TypeVar("R")

KINDS = (nn.Module, Tensor, torch.Generator, LRScheduler)
_KINDS_OF_STEPS = (*KINDS, Optimizer, torch.amp.GradScaler)
_DEPTH = 3
_LONGEST = 256  # containers of more are data


def held_by(function: Any) -> list[Any]:
    """Return the modules, tensors, generators and schedulers that a callable refers to, each once.

    Looked through are closures, default values, ``functools.partial``, the object of a bound
    method, and containers; not global names.
    """
    return held_of_kinds(function, KINDS)


def held_of_kinds(function: Any, kinds: tuple[type, ...]) -> list[Any]:
    """Return what is of these kinds where `held_by` looks, each once."""
    found = {id(value): value for value in _held(function, _DEPTH, kinds)}
    return list(found.values())


def used_by(function: Any) -> list[Any]:
    """Return what `held_by` returns, with optimizers and gradient scalers, and what is global.

    Those are the global names in the function's code, and in that of functions that it calls. Of
    the optimizers and scalers that an object has in attributes, only those that the code names
    count: an object that trains several models has an optimizer for each.
    """
    read = read_by(function)
    named = None if read.all else read.names | read.called
    found = {id(value): value for value in held_by(function)}
    held = _held(function, _DEPTH, _KINDS_OF_STEPS, named)
    found.update((id(value), value) for value in held)
    for table, names in read.globals:
        for name in sorted(names):
            held = _held(table[name], _DEPTH - 1, _KINDS_OF_STEPS, named)
            found.update((id(value), value) for value in held)
    return list(found.values())


def read_by(function: Any) -> Read:
    """Return what the code of a function, or of what a ``functools.partial`` calls, may read."""
    return _read_by(behind_partials(function))


def behind_partials(function: Any) -> Any:
    """Return what ``functools.partial`` calls in the end; anything else as it is."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _held(
    value: Any, depth: int, kinds: tuple[type, ...], named: frozenset[str] | None = None
) -> Iterator[Any]:
    """Yield what is of these kinds; of what is in attributes of objects, only what is named."""
    if is_dead(value):
        return
    if isinstance(value, kinds):
        yield value
        return
    if depth == 0 or isinstance(value, type) or inspect.ismodule(value):
        return
    inner: list[Any] = []
    if isinstance(value, functools.partial):
        inner = [value.func, *value.args, *value.keywords.values()]
    elif inspect.ismethod(value):
        owner = value.__self__
        named = _with_those_of(value, named)
        inner = [owner] if isinstance(owner, nn.Module) else _attributes_of(owner, named)
        inner.append(value.__func__)
    elif inspect.isfunction(value):
        inner = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        for cell in value.__closure__ or ():
            try:
                inner.append(cell.cell_contents)
            except ValueError:  # not filled yet
                continue
    elif isinstance(value, dict | list | tuple | set) and len(value) <= _LONGEST:
        inner = list(value.values() if isinstance(value, dict) else value)
    elif callable(value) and hasattr(value, "__dict__"):
        inner = _attributes_of(value, _with_those_of(value, named))
    for item in inner:
        yield from _held(item, depth - 1, kinds, named)


def _read_by(function: Any) -> Read:
    if inspect.ismethod(function):
        return names_read([function.__func__], [type(function.__self__)])
    is_object = callable(function) and not inspect.isfunction(function)
    return names_read([function], [type(function)] if is_object else [])


def _with_those_of(function: Any, named: frozenset[str] | None) -> frozenset[str] | None:
    """Return these names with those that a method, or an object that is called, reads."""
    read = None if named is None else _read_by(function)
    if named is None or read is None or read.all:
        return None
    return named | read.names | read.called


def _attributes_of(value: Any, named: frozenset[str] | None) -> list[Any]:
    held = getattr(value, "__dict__", {})
    return [each for name, each in held.items() if named is None or name in named]


def weak_method(method: Callable[P, R]) -> Callable[P, R]:
    """Return a bound method as a function that does not keep its object alive."""
    reference: Any = weakref.WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        result: R = reference()(*args, **kwargs)
        return result

    return call


def weak_hook(method: Callable[P, object]) -> Callable[P, None]:
    """Return a bound method as a hook that does not keep its object alive, and ends with it."""
    reference: Any = weakref.WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        if (method := reference()) is not None:
            method(*args, **kwargs)

    return call
