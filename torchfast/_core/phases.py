"""Phases: the parts of a step by name, for whoever looks on.

A profile shows kernels, and thousands of them say little until it is known which belong to the
forward, which to the update. So the step names its parts, and whoever listens is told: torch's
profiler sees an annotation ``torchfast.<name>``, Nsight Systems an NVTX range of that name, and the
timer of ``fit`` notes when they begin and end.

torch's own annotation takes several microseconds whether or not anybody listens, which a step of
a small model would feel. Here it is asked first, which takes a tenth of one, and where nobody
listens nothing else is done. A profiler is noticed in the thread that started it; Nsight by what
it sets in the environment of the programs that it starts.

Phases stand outside of what is compiled and captured. One inside of a compiled function is left
out by the compiler, at no cost and without a break; one inside of a captured step is seen when the
step runs eagerly, since a replay runs no Python.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from threading import get_ident
from typing import Any, Final, Protocol, final

import torch
from torch._C._autograd import _profiler_enabled
from torch.autograd.profiler import record_function
from torch.compiler import is_dynamo_compiling

from torchfast._core.no_context import NO_CONTEXT

PREFIX: Final = "torchfast."

# What steps and loaders name by themselves, in the order in which a step has them.
DATA_WAIT: Final = "data_wait"
H2D: Final = "h2d"
FORWARD: Final = "forward"
BACKWARD: Final = "backward"
COMMUNICATION: Final = "communication"
# What of it the step stands still for: a row of the table of times, and no phase.
EXPOSED_COMMUNICATION: Final = "exposed_communication"
UPDATE: Final = "update"
OTHER: Final = "other"


@final
class _OfGraphs(str):
    """A name that says what kind of step it is: told by identity from the same name of a user's."""

    __slots__ = ()


CAPTURE: Final = _OfGraphs("capture")
REPLAY: Final = _OfGraphs("replay")

# Set by Nsight Systems in what it starts, the first one only once it collects.
_NSIGHT_VARIABLES: Final = ("NSYS_PROFILING_SESSION_ID", "NVTX_INJECTION64_PATH")


class Recorder(Protocol):
    """What is told of the phases of one thread."""

    def begin(self, name: str) -> Any:
        """Note that a phase begins; return what `end` is to be given."""

    def end(self, begun: Any) -> None:
        """Note that it ends."""


def is_nsight_here(environment: Mapping[str, str]) -> bool:
    """Whether this process was started by Nsight Systems, and torch can talk to it."""
    # A build without CUDA has no NVTX, and raises.
    return torch.backends.cuda.is_built() and any(map(environment.get, _NSIGHT_VARIABLES))


# It does not change in the life of a process, and asking takes longer than all else here.
_UNDER_NSIGHT = is_nsight_here(os.environ)

# By thread. The step and the loader name their phases and know nothing of the loop that times them,
# nor do phases of the user's own; so it is a place that all of them can look at.
_recorders: dict[int, Recorder] = {}
# Likewise those that only look where a thread stands, beside a recorder that times it: a watchdog
# of the user's around a fit that has one too.
_watchers: dict[int, tuple[Recorder, ...]] = {}


@final
class _Heard:
    """A phase that somebody listens to."""

    __slots__ = ("_annotation", "_begun", "_is_pushed", "_name", "_recorder", "_watchers")

    def __init__(
        self, name: str, recorder: Recorder | None, watchers: tuple[Recorder, ...] = ()
    ) -> None:
        self._name = name
        self._recorder = recorder
        self._watchers = watchers
        self._annotation: record_function | None = None
        self._is_pushed = False

    def __enter__(self) -> None:
        if _profiler_enabled():
            self._annotation = record_function(PREFIX + self._name)
            self._annotation.__enter__()
        elif _UNDER_NSIGHT:  # under emit_nvtx the profiler is on, and makes the range
            torch.cuda.nvtx.range_push(PREFIX + self._name)
            self._is_pushed = True
        for watcher in self._watchers:
            watcher.begin(self._name)
        if self._recorder is not None:
            self._begun = self._recorder.begin(self._name)

    def __exit__(self, *error: object) -> None:
        if self._recorder is not None:
            self._recorder.end(self._begun)
        for watcher in self._watchers:
            watcher.end(None)
        if self._annotation is not None:
            self._annotation.__exit__(None, None, None)
        if self._is_pushed:
            torch.cuda.nvtx.range_pop()


def phase(name: str) -> AbstractContextManager[Any]:
    """Name a part of a step for profilers and for the timer of ``fit``.

    torch's profiler and Nsight Systems show it as ``torchfast.<name>``. Steps and loaders name
    ``data_wait``, ``h2d``, ``forward``, ``backward``, ``communication``, ``update``, and
    ``capture`` and ``replay`` of graphs; any other name is yours. Costs a fraction of a microsecond
    where nobody listens.

    Args:
        name: What it is called.

    Returns:
        A context manager, for one ``with``.

    Numerics: Exact.
    Synchronizes: Never.

    Example:
        >>> import torch
        >>> with phase("augment"):
        ...     batch = torch.ones(2, 3) + 1
    """
    if is_dynamo_compiling():
        return nullcontext()  # one that it knows; what follows would be guarded
    return phase_outside(name)


def phase_outside(name: str) -> AbstractContextManager[Any]:
    """Name a part of a step that lies outside of all that is compiled; see `phase`."""
    if _recorders or _watchers or _UNDER_NSIGHT or _profiler_enabled():
        thread = get_ident()
        return _Heard(name, _recorders.get(thread), _watchers.get(thread, ()))
    return NO_CONTEXT


def annotation(name: str) -> AbstractContextManager[Any]:
    """Name what goes on beside the step, for profilers only: it is no part of the step's time."""
    if _UNDER_NSIGHT or _profiler_enabled():
        return _Heard(name, None)
    return NO_CONTEXT


def start_recording(recorder: Recorder) -> None:
    """Tell ``recorder`` of the phases of this thread from now on, and no other."""
    _recorders[get_ident()] = recorder


def stop_recording(recorder: Recorder) -> None:
    """Tell it no more; nothing happens if it is not told."""
    if _recorders.get(get_ident()) is recorder:
        del _recorders[get_ident()]


def start_watching(watcher: Recorder) -> None:
    """Tell ``watcher`` too of the phases of this thread; it returns nothing that `end` needs."""
    _watchers[get_ident()] = (*_watchers.get(get_ident(), ()), watcher)


def stop_watching(watcher: Recorder) -> None:
    """Tell it no more, from any thread; nothing happens if it is not told."""
    for thread, told in list(_watchers.items()):
        left = tuple(each for each in told if each is not watcher)
        if not left:
            del _watchers[thread]
        elif left != told:
            _watchers[thread] = left
