"""A value of the host as something that is equal for the same value, to be compared later."""

from __future__ import annotations

import ctypes
from array import array
from collections import deque
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor

from torchfast._core.proxies import is_dead
from torchfast._core.refilling import bits
from torchfast.graphs.holders import CONTAINERS, LONGEST
from torchfast.graphs.places import NUMBERS

# Numbers of C's, as a ``multiprocessing.Value`` holds one, and arrays of them.
BUFFERS: Final = (ctypes.c_byte.__mro__[-2], array, bytearray)
_NUMBERS_OF_C = frozenset("?bBhHiIlLqQfdg")
COUNTED = (*NUMBERS, complex, np.generic, np.ndarray, *BUFFERS)
OTHER = object()  # the form of an object that is no plain value
_PLAIN = frozenset((bool, int, str, bytes, type(None), range, slice))


@final
class Identity:
    """An object told from others by being it; held, so that its address is not another's."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def is_small_array(value: Any) -> bool:
    """Whether it is an array of NumPy that counts by its values."""
    return isinstance(value, np.ndarray) and value.size <= LONGEST and not value.dtype.hasobject


def bytes_of(value: Any) -> bytes | None:
    """Return what is in one of `BUFFERS`; None where it is data."""
    with memoryview(value) as view:
        return view.tobytes() if view.nbytes <= 8 * LONGEST else None


def put_bytes(value: Any, known: bytes | None) -> None:
    """Put back what `bytes_of` returned, if it is numbers: what else C holds may be addresses."""
    with memoryview(value) as view:
        is_numbers = view.format.lstrip("<>=@") in _NUMBERS_OF_C
        if is_numbers and view.nbytes == len(known or b"") and view.tobytes() != known:
            view.cast("B")[:] = known or b""


def is_frozen(value: Any) -> bool:
    """Whether a graph on a device keeps the values of a tensor, and not only where it lies.

    Of a scalar on the host a kernel takes the value at its launch. A copy from pinned memory is
    part of the graph, and each replay reads what is there.
    """
    if not isinstance(value, Tensor) or value.device.type != "cpu":
        return False
    return value.dim() == 0 or not value.is_pinned()


def contents(tensor: Tensor) -> tuple[int, str]:
    """Return what tells that a tensor on the host was written to: its values, if it is small."""
    is_small = tensor.numel() <= LONGEST and tensor.layout is torch.strided
    version = 0 if tensor.is_inference() else tensor._version  # which those do not count
    return version, str(tensor.tolist()) if is_small else ""


def form_of(value: Any, within: tuple[int, ...] = (), *, on_host: bool) -> Any:
    """Return a value as something that is equal for the same value, and reads no other device.

    Args:
        value: Any.
        within: Where the containers are that it is in: one in itself counts by being the same.
        on_host: Whether tensors on the host count by their values.
    """
    kind = type(value)
    if is_dead(value):
        return Identity(value)
    if isinstance(value, float | complex):
        # A zero has a sign, and a NaN is the same NaN.
        return (kind, value) if value == value and value else (kind, repr(value))
    if isinstance(value, np.generic):
        return (kind, value.dtype.str, value.tobytes())
    if isinstance(value, np.ndarray) and is_small_array(value):
        return (kind, *bits(value))
    if isinstance(value, BUFFERS):
        return (kind, Identity(value) if (held := bytes_of(value)) is None else held)
    if isinstance(value, CONTAINERS) and len(value) <= LONGEST and id(value) not in within:
        now_within = (*within, id(value))
        if isinstance(value, dict):
            pairs = [(k, form_of(v, now_within, on_host=on_host)) for k, v in value.items()]
            return (kind, *((form_of(k, on_host=on_host), form) for k, form in pairs))
        if isinstance(value, set | frozenset):
            return (kind, frozenset(form_of(item, on_host=on_host) for item in value))
        return (kind, *(form_of(item, now_within, on_host=on_host) for item in value))
    if kind in _PLAIN or isinstance(value, torch.device):
        return (kind, value)
    if on_host and is_frozen(value):
        return (Identity(value), *contents(value))
    return Identity(value)


def only_plain(form: Any) -> Any:
    """Return a form in which any object is like any other."""
    if isinstance(form, Identity):
        return OTHER
    return tuple(map(only_plain, form)) if isinstance(form, tuple) else form


def as_of_library(form: Any) -> Any:
    """Return the form of what an object of a library's holds.

    Tensors, and containers of them, are what a step has left there: a trainer's metrics are others
    behind each step.
    """
    is_tensor = isinstance(form, Identity) and isinstance(form.value, Tensor)
    return OTHER if is_tensor or (isinstance(form, tuple) and _holds_objects(form)) else form


def _holds_objects(form: Any) -> bool:
    if isinstance(form, tuple | frozenset):
        return any(map(_holds_objects, form))
    return isinstance(form, Identity) or form is OTHER


def is_number(form: Any) -> bool:
    """Whether it is the form of a number, or of an array of numbers."""
    kind = form[0] if isinstance(form, tuple) and form else None
    return isinstance(kind, type) and issubclass(kind, COUNTED)


def has_numbers(form: Any) -> bool:
    """Whether it is the form of a number, or of what holds one."""
    return is_number(form) or (isinstance(form, tuple) and any(map(has_numbers, form[1:])))


def counts(old: Any, new: Any) -> bool:
    """Whether a number has become another one, also one in a list or a dictionary."""
    if old == new:
        return False
    if is_number(old) and is_number(new):
        return True
    if not (isinstance(old, tuple) and isinstance(new, tuple) and old and old[0] is new[0]):
        return False
    if isinstance(old[0], type) and issubclass(old[0], dict):
        known = dict(old[1:])
        return any(counts(known[key], form) for key, form in new[1:] if key in known)
    if isinstance(old[0], type) and issubclass(old[0], list | deque):
        return any(map(counts, old[1:], new[1:]))
    return False
