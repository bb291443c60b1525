"""What a function computes, as text that is the same in every process.

What was measured of a step holds for its loss function too: another loss of the same model and
batch may need other kernels. So its fingerprint covers

- its code and that of the functions that it names: global ones, those of modules, methods of the
  objects that it refers to; not those of torch, the standard library and torchfast, of which the
  names are told;
- what it holds: default values, closures, global variables, attributes. Of modules what
  `model_fingerprint` covers, of tensors what they look like, of others the plain values.

Of objects and classes only attributes count whose names occur in that code: beside the weight of a
loss, the object whose method it is may hold the name of a run. What is only computed from strings,
``getattr(self, prefix + name)``, is not seen. A value that changes from step to step, such as a
counter, changes the fingerprint: take it at construction.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

from torch import Tensor, nn

from torchfast._core.fingerprint import LONGEST, code_text, described, digest, model_lines
from torchfast._core.user_code import is_users

_MOST_OBJECTS: Final = 4000
# Called without being named.
_ALWAYS: Final = frozenset(
    ("__call__", "forward", "__getattr__", "__getattribute__", "__getitem__", "__wrapped__")
)


def function_fingerprint(function: Callable[..., Any]) -> str:
    """Return the SHA-256, in hex, of what a function computes, as far as its code says.

    Synchronizes: Never.

    Example:
        >>> def scaled(factor):
        ...     return lambda x: factor * x
        >>> function_fingerprint(scaled(2.0)) == function_fingerprint(scaled(2.0))
        True
        >>> function_fingerprint(scaled(2.0)) == function_fingerprint(scaled(3.0))
        False
    """
    return digest(_Walk(function).lines())


class _Walk:
    """One walk over all that a function refers to, the nearest first."""

    def __init__(self, function: object) -> None:
        self._waiting: list[Any] = [function]
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []  # or an id could be used again
        self._names = set(_ALWAYS)
        # Whose attributes are told once code names them: a label, the attributes, those told.
        self._holders: list[tuple[str, Mapping[str, Any], set[str]]] = []

    def lines(self) -> Iterator[str]:
        while True:
            while self._waiting and len(self._alive) <= _MOST_OBJECTS:
                yield from self._tell(self._waiting.pop(0))
            found = list(self._named())
            yield from found
            if not found:
                return

    def _named(self) -> Iterator[str]:
        for label, fields, told in list(self._holders):
            for name in sorted(self._names.intersection(fields) - told):
                told.add(name)
                yield f"attribute {label}.{name} {self._text(fields[name])}"

    def _text(self, value: Any) -> str:
        """Return a plain value as text; of others a number, under which they are told later."""
        if isinstance(value, Tensor) or _is_plain(value):
            return described(value)
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._numbers)
            self._alive.append(value)
            self._waiting.append(value)
        return f"<{self._numbers[id(value)]}>"

    def _tell(self, value: Any) -> Iterator[str]:
        if isinstance(value, nn.Module):
            yield from model_lines(value, code=True)
        elif isinstance(value, types.FunctionType):
            yield from self._tell_function(value)
        elif isinstance(value, types.MethodType):
            yield f"method {self._text(value.__func__)} of {self._text(value.__self__)}"
        elif isinstance(value, functools.partial):
            parts = (value.func, value.args, value.keywords)
            yield f"partial {[self._text(part) for part in parts]}"
        elif isinstance(value, staticmethod | classmethod):
            yield f"wrapped {self._text(value.__func__)}"
        elif isinstance(value, property):
            yield f"property {self._text(value.fget)}"
        elif isinstance(value, functools.cached_property):
            yield f"property {self._text(value.func)}"
        elif isinstance(value, type):
            yield f"class {value.__module__}:{value.__qualname__}"
            self._hold_class(value)
        elif isinstance(value, Mapping):
            items = dict(value) if len(value) <= LONGEST else {}
            pairs = [(self._text(key), self._text(item)) for key, item in items.items()]
            yield f"{type(value).__qualname__} of {len(value)} {pairs}"
        elif isinstance(value, list | tuple):
            told = [self._text(item) for item in value] if len(value) <= LONGEST else []
            yield f"{type(value).__qualname__} of {len(value)} {told}"
        elif isinstance(value, types.BuiltinFunctionType):
            yield f"function {value.__module__}:{value.__qualname__}"
        elif isinstance(value, types.ModuleType):
            yield f"module {value.__name__}"
            if _is_users(_file_of(value)):
                self._hold(value.__name__, vars(value))
        else:
            kind = type(value)
            yield f"object {described(value, depth=0)}"
            self._hold_class(kind)
            self._hold(kind.__qualname__, getattr(value, "__dict__", {}))

    def _tell_function(self, function: types.FunctionType) -> Iterator[str]:
        code = function.__code__
        # A library's wrapper is told by its name, and what it wraps by itself.
        held: dict[str, Any] = {}
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # it is not filled yet
                held[name] = cell.cell_contents
        if wrapped := getattr(function, "__wrapped__", None):
            held["__wrapped__"] = wrapped
        if not _is_users(code.co_filename):
            yield f"function {function.__module__}:{function.__qualname__}"
        else:
            yield f"code {code_text(code)}"
            held["__defaults__"] = function.__defaults__
            held["__kwdefaults__"] = function.__kwdefaults__
            names = _names_of(code)
            self._names |= names
            held |= {n: function.__globals__[n] for n in names if n in function.__globals__}
        for name, value in sorted(held.items()):
            yield f"holds {name} {self._text(value)}"

    def _hold_class(self, kind: type) -> None:
        for base in kind.__mro__:
            module = sys.modules.get(base.__module__)
            if module is not None and _is_users(_file_of(module)):
                self._hold(base.__qualname__, vars(base))

    def _hold(self, name: str, fields: Mapping[str, Any]) -> None:
        self._holders.append((f"{len(self._holders)} {name}", fields, set()))


def _is_plain(value: Any) -> bool:
    """Whether a value is told whole by `described`."""
    holds = isinstance(value, Mapping | list | tuple) or hasattr(value, "__dict__")
    return not (holds or callable(value))


def _is_users(file: str) -> bool:
    # What ``python -c`` runs has a name that a library's generated code has too.
    return file == "<string>" or (bool(file) and is_users(file))


def _file_of(module: types.ModuleType) -> str:
    without = "<string>" if module.__name__ == "__main__" else ""
    return getattr(module, "__file__", None) or without


@functools.lru_cache(maxsize=1024)
def _names_of(code: types.CodeType) -> frozenset[str]:
    """Return the names in a function and in those inside of it, and the strings among them."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _names_of(constant)
        elif isinstance(constant, str):
            found.add(constant)
    return frozenset(found)
