"""A net beneath the calls of torch: the few operators that wait, whoever runs them.

A replaced call is found by its name. A name that was bound before (``from torch import unique``),
and C++ that reads a tensor on its own way (``torch.arange(n)`` with a tensor ``n``, ``one_hot``
without a number of classes, ``to_sparse``), go past it, and end in a handful of operators: one that
reads a number, and those whose result has a size that depends on numbers. A kernel of Python stands
in front of each of these, in the dispatcher, at a key that every call of every backend passes and
that torch does not use for them. No mode is entered, so that torch.compile is not disturbed and no
other operator pays; what waits pays some microseconds. Only the kernel for reads of a single number
stands in place of CUDA's, where CUDA is watched: an update reads many numbers on the host.

torch.compile makes operators of its own of the waits for streams, events and devices that it takes
into a graph. torch 2.11 has none: its graphs leave out waits for streams, and nothing is told.

On a machine without CUDA the kernels of the CPU read numbers that those of CUDA do not, to check
arguments. What they read is not heard.
"""

from __future__ import annotations

import logging
import re
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import CodeType, FrameType
from typing import Any, Final, Protocol, final

import torch

from torchfast._core.sync_calls import NO, SURE, Arguments, Judge, Options, SyncCall, is_on
from torchfast._core.warning_filters import Entry, put_first, take_out

logger = logging.getLogger(__name__)

_KEY: Final = "BackendSelect"
_DEVICE_KEY: Final = "CUDA"
# Said once a process, of the first kernel that stands in place of another.
_OVERRIDING: Final = "Warning only once for all operators"
# What each operator is told as. By the names of the calls that the host waits in.
_WAITING: Final = {
    "nonzero": "nonzero",
    "masked_select": "boolean mask",
    "_unique": "unique",
    "_unique2": "unique",
    "unique_dim": "unique",
    "unique_consecutive": "unique",
    "bincount": "bincount",
    "equal": "compare",
    "repeat_interleave.Tensor": "repeat_interleave",
    "_linalg_check_errors": "linalg",
}
# The one that reads a single number.
_READ: Final = "_local_scalar_dense"
_READ_KIND: Final = "item"
# Those of torch.compile's graphs.
_WAITING_IN_GRAPHS: Final = {
    "synchronize_device": "synchronize",
    "synchronize_stream": "stream wait",
    "synchronize_event": "event wait",
}
# Whose kernels for the CPU look at numbers, and those for CUDA do not: pivots and targets are
# checked, what is asserted (of multinomial, too) is left to the device, the standard deviation of
# all numbers is computed in a way of its own; the lengths of sequences are on the host anywhere.
_ONLY_ON_HOST: Final = (
    "std.correction",
    "var.correction",
    "linalg_inv_ex",
    "_linalg_solve_ex",
    "linalg_lu_solve",
    "linalg_ldl_solve",
    "multilabel_margin_loss_forward",
    "rrelu_with_noise",
    "_pack_padded_sequence",
    "_assert_async",
    "_assert_async.msg",
)


class NetOwner(Protocol):
    """Who is asked when an operator of the net runs."""

    def run_below(
        self,
        call: SyncCall,
        original: Callable[..., Any],
        args: Arguments,
        options: Options,
        frame: FrameType | None,
    ) -> Any:
        """Run an operator that may wait, and tell of it."""

    def run_unheard(self, original: Callable[..., Any], args: Arguments, options: Options) -> Any:
        """Run an operator whose reads are of the CPU's kernels only."""


@final
class SyncNet:
    """The kernels, from `spread` until `take_in`.

    Args:
        owner: Who is asked; not kept alive.
        keep_out: Tells torch.compile to run the code of a function as it is.

    Attributes:
        hears_device_reads: Whether each read of a number of the device is heard, and none of the
            host's pays for that.
    """

    def __init__(self, owner: NetOwner, keep_out: Callable[[CodeType], None]) -> None:
        self._owner = weakref.ref(owner)
        self._keep_out = keep_out
        self._libraries: list[Any] = []
        self._has_host = self._has_device = self.hears_device_reads = False

    def spread(self, device_type: str) -> None:
        """Put the kernels in place; for ``"cpu"`` also those that tell what is not to be heard."""
        if not self._libraries:
            self._libraries = [torch.library.Library(n, "IMPL") for n in ("aten", "streams")]
            for name, kind in _WAITING.items():
                judge = _repeats if kind == "repeat_interleave" else _first
                self._put(name, partial(_waiting, kind, judge))
            for name, kind in _WAITING_IN_GRAPHS.items():
                self._register(name, _waiting(kind, _always, self._owner, _OfGraphs(name)), 1)
        if device_type == "cpu" and not self._has_host:
            self._has_host = True
            self._put(_READ, partial(_waiting, _READ_KIND, _first))
            for name in _ONLY_ON_HOST:
                self._put(name, _unheard)
        if device_type == "cuda" and not self._has_device:
            self._has_device = True
            self._put_before_device()

    def take_in(self) -> None:
        """Take the kernels away."""
        while self._libraries:
            self._libraries.pop()._destroy()
        self._has_host = self._has_device = self.hears_device_reads = False

    def _put_before_device(self) -> None:
        """Put a kernel in place of the device's own for reads, which hands on to that.

        An optimizer reads a number of the CPU's for each parameter, twice, as torch's AdamW counts
        its steps there. In front of all kernels those would pass through Python, some hundreds in
        a step; in place of one device's they do not.
        """
        operator = torch.ops.aten._local_scalar_dense.default
        try:
            native = torch.library.get_kernel(operator, _DEVICE_KEY)
            kernel = _waiting(_READ_KIND, _first, self._owner, _Native(_READ, native))
            self._keep_out(kernel.__code__)
            with _not_shown(_OVERRIDING):  # that there is a kernel already is known
                self._libraries[0].impl(
                    _READ, kernel, _DEVICE_KEY, with_keyset=True, allow_override=True
                )
            self.hears_device_reads = True
        except (AttributeError, RuntimeError) as error:
            # No such device, or another torch: then torch's own check speaks of such reads.
            logger.debug("no kernel stands in place of %s's for reads: %s", _DEVICE_KEY, error)

    def _put(self, name: str, make: Callable[[Any, Any], Callable[..., Any]]) -> None:
        operator: Any = torch.ops.aten
        try:
            for part in (name if "." in name else f"{name}.default").split("."):
                operator = getattr(operator, part)
            self._register(name, make(self._owner, operator))
        except (AttributeError, RuntimeError) as error:
            # Another torch, or somebody else's kernel at this key: its calls are found by name.
            logger.debug("no kernel stands in front of aten::%s: %s", name, error)

    def _register(self, name: str, kernel: Callable[..., Any], library: int = 0) -> None:
        self._keep_out(kernel.__code__)  # which all kernels of a sort share
        self._libraries[library].impl(name, kernel, _KEY, with_keyset=True)


@final
class _OfGraphs:
    """An operator of torch.compile's, which torch has once something was compiled."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def redispatch(self, keyset: Any, *args: Any, **options: Any) -> Any:
        operator = getattr(torch.ops.streams, self.__name__).default
        return operator.redispatch(keyset, *args, **options)


@final
class _Native:
    """A device's own kernel for reads, which torch calls with the GIL held when it is asked so.

    Held through the wait it would stop every other thread of Python, a loader's as well. So what
    is waited for has passed before.
    """

    def __init__(self, name: str, kernel: Any) -> None:
        self.__name__ = name
        self._kernel = kernel

    def redispatch(self, keyset: Any, tensor: torch.Tensor) -> Any:
        if tensor.is_cuda and not torch.cuda.is_current_stream_capturing():
            # By an event, of which torch's check says nothing: it is to speak once. And past the
            # calls that are replaced. torch lets the GIL go while it waits for one.
            events: Any = torch.cuda.Event
            event = events()
            event.record(torch.cuda.current_stream(tensor.device))
            super(events, event).synchronize()  # type: ignore[misc]
        return self._kernel.call_boxed(keyset, tensor)


def _waiting(kind: str, judge: Judge, owner: Any, operator: Any) -> Callable[..., Any]:
    key = getattr(torch._C.DispatchKey, _KEY)
    call = SyncCall(torch.ops, operator.__name__, kind, judge)

    def kernel(keyset: Any, *args: Any, **options: Any) -> Any:
        original = partial(operator.redispatch, keyset.remove(key))
        watch = owner()
        if watch is None:
            return original(*args, **options)
        return watch.run_below(call, original, args, options, _caller())

    return kernel


def _unheard(owner: Any, operator: Any) -> Callable[..., Any]:
    key = getattr(torch._C.DispatchKey, _KEY)

    def kernel(keyset: Any, *args: Any, **options: Any) -> Any:
        original = partial(operator.redispatch, keyset.remove(key))
        watch = owner()
        if watch is None:
            return original(*args, **options)
        return watch.run_unheard(original, args, options)

    return kernel


@contextmanager
def _not_shown(text: str) -> Iterator[None]:
    """Show no warning that begins so."""
    entry: Entry = ("ignore", re.compile(text), UserWarning, None, 0)
    put_first(entry)
    try:
        yield
    finally:
        take_out(entry)


def _caller() -> FrameType | None:
    """Return the frame that runs the operator; None if no Python does."""
    with suppress(ValueError):
        return sys._getframe(2)
    return None


def _first(args: Arguments, _options: Options, types: frozenset[str]) -> int:
    return SURE if args and is_on(args[0], types) else NO


def _always(_args: Arguments, _options: Options, _types: frozenset[str]) -> int:
    return SURE


def _repeats(args: Arguments, options: Options, types: frozenset[str]) -> int:
    return NO if options.get("output_size") is not None else _first(args, options, types)
