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

from torchfast._core.code_names import names_read

P = ParamSpec("P")
R = TypeVar("R")

_KINDS = (nn.Module, Tensor, torch.Generator, LRScheduler)
_DEPTH = 3
_LONGEST = 256  # containers of more are data


def held_by(function: Any) -> list[Any]:
    """Return the modules, tensors, generators and schedulers that a callable refers to, each once.

    Looked through are closures, default values, ``functools.partial``, the object of a bound
    method, and containers; not global names.
    """
    found = {id(value): value for value in _held(function, _DEPTH, _KINDS)}
    return list(found.values())


def used_by(function: Any) -> list[Any]:
    """Return what `held_by` returns, with optimizers and gradient scalers, and what is global.

    Those are the global names in the function's code, and in that of functions that it calls.
    """
    kinds = (*_KINDS, Optimizer, torch.amp.GradScaler)
    found = {id(value): value for value in _held(function, _DEPTH, kinds)}
    code = function
    while isinstance(code, functools.partial):
        code = code.func
    code = code.__func__ if inspect.ismethod(code) else code
    classes = [type(code)] if callable(code) and not inspect.isfunction(code) else []
    for table, names in names_read([code], classes).globals:
        for name in sorted(names):
            found.update((id(value), value) for value in _held(table[name], _DEPTH - 1, kinds))
    return list(found.values())


def _held(value: Any, depth: int, kinds: tuple[type, ...]) -> Iterator[Any]:
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
        inner = (
            [owner] if isinstance(owner, nn.Module) else [*getattr(owner, "__dict__", {}).values()]
        )
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
        inner = list(vars(value).values())
    for item in inner:
        yield from _held(item, depth - 1, kinds)


def weak_method(method: Callable[P, R]) -> Callable[P, R]:
    """Return a bound method as a function that does not keep its object alive."""
    reference: Any = weakref.WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        result: R = reference()(*args, **kwargs)
        return result

    return call
