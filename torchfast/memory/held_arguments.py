"""Arguments that are objects: a dataclass, a graph with its features, a dictionary of a class.

A block may take a tensor from such an object and put its result in the tensor's place. The second
run would start from what stands there by then, which is the work of this block and of all behind
it. So what an object holds is noted at the call: where it holds other tensors or numbers when the
block runs again, that run is given a copy of then, as it is with lists and dictionaries. The
tensors themselves are never copied, and one that has been written to is an error, as any argument
is.

An object that holds what it held is given itself, so that whoever asks for its identity finds it.
"""

from __future__ import annotations

import copy
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, final

import torch
from torch import Tensor, nn

from torchfast.memory.deferred import fail_written

_NO_DATA = (
    nn.Module, torch.Generator, type, types.ModuleType, types.FunctionType, types.MethodType,
    types.BuiltinFunctionType, weakref.ref, str, bytes, int, float, complex,
)  # fmt: skip
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_DEPTH = 4
_LONGEST = 256  # containers of more are not looked through


@final
class HeldArgument:
    """An object that a block is called with.

    Args:
        value: The object, as it is at the call.
    """

    __slots__ = ("_contents", "_copy", "_value", "_versions")

    def __init__(self, value: Any) -> None:
        self._value = _weakly(value)
        self._contents = list(_contents(value, _DEPTH, set()))
        self._versions = [_version(each) for each in self._contents]
        try:
            self._copy = _copied(value, _DEPTH, {})
        except Exception:  # of a class that cannot be copied, by whatever it raises
            self._copy = value

    def restored(self) -> Any:
        """Return the object as it was at the call.

        Raises:
            RuntimeError: One of its tensors was written to, or it holds others and has no copy.
        """
        for each, version in zip(self._contents, self._versions, strict=True):
            if version is not None and each._version != version:
                fail_written("an input of a block", each, version)
        value = self._value()
        if value is not None and self._is_as_it_was(value):
            return value
        if not self._is_as_it_was(self._copy):
            _fail(self._copy)
        # Another one each time: this run changes it too.
        return _copied(self._copy, _DEPTH, {})

    def _is_as_it_was(self, value: Any) -> bool:
        found = list(_contents(value, _DEPTH, set()))
        return len(found) == len(self._contents) and all(map(_is_same, found, self._contents))


def _weakly(value: Any) -> Callable[[], Any]:
    """Return what gives an object as long as it lives.

    It may hold what the block has made, and with that a graph that leads to this one.
    """
    try:
        return weakref.ref(value)
    except TypeError:  # it has slots alone
        return lambda: value


def is_held(value: Any) -> bool:
    """Whether an argument is an object that may hold tensors."""
    if value is None or isinstance(value, _NO_DATA):
        return False
    return (
        isinstance(value, dict | list | tuple | set)
        or hasattr(value, "__dict__")
        or _is_slotted(value)
    )


def _version(value: Any) -> int | None:
    if not isinstance(value, Tensor) or value.is_inference():
        return None
    return value._version


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, _PLAIN) and bool(a == b))


def _is_slotted(value: Any) -> bool:
    return any("__slots__" in vars(kind) for kind in type(value).__mro__)


def _attributes(value: Any) -> dict[str, Any]:
    names = (name for kind in type(value).__mro__ for name in _slots_of(kind))
    slots = {name: getattr(value, name) for name in names if hasattr(value, name)}
    return {**slots, **getattr(value, "__dict__", {})}


def _slots_of(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def _contents(value: Any, depth: int, seen: set[int]) -> Iterator[Any]:
    """Yield the tensors and numbers of an object, in the order in which they stand there."""
    if isinstance(value, Tensor) or type(value) in _PLAIN:
        yield value
        return
    if depth == 0 or id(value) in seen or not is_held(value):
        return
    seen.add(id(value))
    inner = list(_attributes(value).values())
    if isinstance(value, dict | list | tuple | set) and len(value) <= _LONGEST:
        inner += value.values() if isinstance(value, dict) else value
    for each in inner:
        yield from _contents(each, depth - 1, seen)


def _copied(value: Any, depth: int, made: dict[int, Any]) -> Any:
    """Return a copy of an object and of the objects in it, with the same tensors."""
    if isinstance(value, Tensor) or depth == 0 or not is_held(value):
        return value
    if id(value) in made:
        return made[id(value)]
    if isinstance(value, dict | list | tuple | set) and len(value) > _LONGEST:
        return value
    if type(value) is tuple:
        return tuple(_copied(each, depth - 1, made) for each in value)
    copied = made[id(value)] = copy.copy(value)
    # Who says how to copy it knows what belongs to it; and of some, such as loggers, there is one.
    if hasattr(type(value), "__copy__") or copied is value:
        return copied
    for name, each in _attributes(copied).items():
        object.__setattr__(copied, name, _copied(each, depth - 1, made))  # it may be frozen
    if isinstance(copied, dict):
        for key, each in copied.items():
            dict.__setitem__(copied, key, _copied(each, depth - 1, made))
    elif isinstance(copied, list):
        copied[:] = [_copied(each, depth - 1, made) for each in copied]
    return copied


def _fail(value: Any) -> NoReturn:
    raise RuntimeError(
        f"a block that is recomputed was called with a {type(value).__name__} that holds other "
        "tensors or numbers when the block runs again in its backward, and the object cannot be "
        "copied; pass the tensors themselves and return the new ones, or leave the block out of "
        "recompute"
    )
