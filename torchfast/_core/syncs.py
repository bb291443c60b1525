"""Where the host waits for the device: each wait, with the user's line, before and after it.

A host sync is a line at which the host stops until the device has caught up: the queue that it had
filled runs empty, and the device idles until it is filled again. Three listeners find them.

- The calls that wait (``item``, ``float()``, ``print``, a boolean mask, a pageable copy, ...;
  `sync_calls` has the list) are replaced by functions that look at their arguments and pass on.
  Before and after those that wait the clock is read. Nothing else of a step is touched: no mode is
  entered, so torch.compile is not disturbed (a dispatch mode would silently disable it for ever),
  and what does not wait pays a fraction of a microsecond, in a handful of calls.
- Beneath them a net (`sync_net`) hears the few operators that wait, whichever name or C++ runs
  them.
- On CUDA, torch's own check (``torch.cuda.set_sync_debug_mode``) says where torch waits from C++:
  a check of linalg's, a backward, an operator of somebody else's. It speaks as a warning, when the
  call returns. That warning is taken out at the warning filters and shown to nobody.

torch has a trace for this too (``torch._C._activate_gpu_trace``). It is not used: once on it cannot
be switched off, and then every allocation, free and event of the process calls into Python, which
an eager step has thousands of.

What none of them sees: waits in C++ that torch does not check (collectives, ``torch.Event`` and
``torch.Stream`` of `torch.accelerator`, which are immutable types, libraries of others), a
``cudaFree`` by the allocator, and waits of other operators within a compiled graph that runs
without autograd, as in an evaluation: torch then prints its warning past Python.

Whose wait it is: that of the thread in which a listener was entered, and of the backward pass that
it runs, wherever autograd runs it; what is run by `SyncWatch.heard` too. Other threads, which may
wait for their own copies, are not heard. Waits in the compiler (autotuning) and torchfast's own are
left out.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol, final

import torch

from torchfast._core.errors import UnsupportedDeviceError
from torchfast._core.left_to_python import leave_to_python
from torchfast._core.sync_calls import NO, SURE, UNHEARD, SyncCall, kind_of_copy, sync_calls
from torchfast._core.sync_net import SyncNet
from torchfast._core.sync_places import SyncPlace
from torchfast._core.sync_places import place_of as _place
from torchfast._core.warning_filters import Entry, is_first, put_first, take_out

logger = logging.getLogger(__name__)

_CUDA, _NONE = frozenset(("cuda",)), frozenset[str]()
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_SYNC_WARNING = "called a synchronizing CUDA operation"
# Said once a process, by whoever switches the check on first.
_PROTOTYPE = "Synchronization debug mode is a prototype"


class SyncListener(Protocol):
    """Who is told. Either method may raise, and the user's line then does.

    ``device_type`` is ``"cuda"``, or ``"cpu"`` to be told of what would wait on CUDA.
    """

    device_type: str

    def expect(self, place: SyncPlace) -> None:
        """Be told of a wait that is about to begin."""

    def hear(self, place: SyncPlace, milliseconds: float | None) -> None:
        """Be told of a wait that is over, and how long the call took, where that is known."""


class _Call(threading.local):
    """The call that a thread is in, if it may wait."""

    is_open = False
    has_waited = False
    has_spoken = False  # torch's check, of this call
    # Told last of an operator of the net, of which torch's check may speak when its call returns.
    told: SyncPlace | None = None
    during = ""
    is_lent = False


@final
class SyncWatch:
    """Replaces the calls that wait, and tells the listeners.

    Args:
        calls: What to listen to; None for all of `sync_calls`.
    """

    def __init__(self, calls: list[SyncCall] | None = None) -> None:
        self._calls = calls
        self._lock = threading.RLock()
        self._holders = 0
        self._undo: list[Callable[[], None]] = []
        self._replaced: list[SyncCall] = []
        self._by_thread: dict[int, list[SyncListener]] = {}
        # Of all threads, with the thread, the last one entered last.
        self._entered: list[tuple[int, SyncListener]] = []
        self._held_types: set[str] = set()  # for which everything is in place
        self._is_turning_on = False
        self._types: frozenset[str] = frozenset()
        self._call = _Call()
        self._filter = _SyncFilter(self)
        self._old_mode: int | None = None
        self._net = SyncNet(self, leave_to_python) if calls is None else None

    def hold(self, device_type: str) -> None:
        """Put the replacements in place, until as many `release` as `hold`."""
        with self._lock:
            self._holders += 1
            if device_type in self._held_types:
                return
            self._held_types.add(device_type)
            if self._net is not None:
                self._net.spread(device_type)
            for call in sync_calls() if self._calls is None else self._calls:
                if call not in self._replaced and not self._is_left(call, device_type):
                    self._replace(call)

    def _is_left(self, call: SyncCall, device_type: str) -> bool:
        """Whether a call is heard without being replaced: beneath it, or by torch's own check."""
        if device_type == "cpu":
            return False
        is_read = self._net is not None and self._net.hears_device_reads and call.name == "item"
        return is_read or call.is_in_graphs

    def release(self) -> None:
        """Undo a `hold`."""
        with self._lock:
            self._holders -= 1
            if not self._holders:
                while self._undo:
                    self._undo.pop()()
                self._replaced.clear()
                self._held_types.clear()
                self._filter.remove()
                if self._net is not None:
                    self._net.take_in()

    def enter(self, listener: SyncListener) -> None:
        """Tell a listener of the waits of this thread from now on."""
        thread = threading.get_ident()
        with self._lock:
            self._by_thread.setdefault(thread, []).append(listener)
            self._entered.append((thread, listener))
            try:
                self._turn()
            except BaseException:
                self.leave(listener)
                raise

    def leave(self, listener: SyncListener) -> None:
        """Tell it of none any more; from whichever thread."""
        with self._lock:
            entered = self._entered
            place = next(n for n in reversed(range(len(entered))) if entered[n][1] is listener)
            thread, _ = entered.pop(place)
            _remove_last(self._by_thread[thread], listener)
            if not self._by_thread[thread]:
                del self._by_thread[thread]
            self._turn()

    def warned(self, frame: FrameType | None) -> bool:
        """Hear from torch's own check that a call that is about to return has waited.

        Returns:
            Whether the warning is ours: nobody else has asked for it.
        """
        if self._call.is_open:
            self._call.has_waited = self._call.has_spoken = True
        elif (listeners := self._listeners()) and (
            place := self._placed(frame, "other", self._types)
        ):
            told, self._call.told = self._call.told, None
            if told is not None and told[1:4] == place[1:4]:
                self._call.told = told  # one call may make torch say it several times
            else:
                for listener in listeners:
                    listener.hear(place, None)
        return self._old_mode == 0

    def run(
        self,
        call: SyncCall,
        certainty: int,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        options: dict[str, Any],
        frame: FrameType | None,
    ) -> Any:
        """Run a call that may wait, and tell of it."""
        state = self._call
        # A call inside of another, as print makes many, is a part of it.
        if state.is_open or not (listeners := self._listeners()):
            return original(*args, **options)
        types = self._types
        if len(types) > 1:  # what waits for one need not for another
            listeners = [
                one for one in listeners if call.judge(args, options, frozenset((one.device_type,)))
            ]
            types = frozenset(one.device_type for one in listeners)
        place = self._placed(frame, kind_of_copy(call, args), types) if listeners else None
        if place is not None and certainty == SURE:
            for listener in listeners:
                listener.expect(place)
        state.is_open, state.has_waited, state.has_spoken = True, False, False
        begin = time.perf_counter()
        try:
            result = original(*args, **options)
        finally:
            state.is_open = False
        if place is not None and (certainty == SURE or state.has_waited):
            milliseconds = (time.perf_counter() - begin) * 1e3
            for listener in listeners:
                listener.hear(place, milliseconds)
        state.told = None
        return result

    def run_below(
        self,
        call: SyncCall,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        options: Mapping[str, Any],
        frame: FrameType | None,
    ) -> Any:
        """Run an operator of the net, and tell of it unless a call above it is told of."""
        state = self._call
        types = self._types
        try:
            certainty = call.judge(args, options, types) if types else NO
        except Exception as error:  # tensors of a strange kind
            logger.debug("an operator %s could not be judged: %s", call.name, error)
            certainty = NO
        if not certainty or state.is_open:
            # A number that is read within a call may be one of the host's: x[mask] = 0.0 makes one.
            state.has_waited |= bool(certainty) and call.kind != "item"
            return original(*args, **options)
        place = _place(frame, call.kind, types)
        result = self.run(call, certainty, original, args, dict(options), frame)
        # What runs within may wait as well, of which the check has still to speak.
        state.told = None if state.has_spoken else place
        return result

    def run_unheard(
        self, original: Callable[..., Any], args: tuple[Any, ...], options: Mapping[str, Any]
    ) -> Any:
        """Run what reads numbers on the CPU only, and tell of nothing."""
        state = self._call
        if state.is_open or self._types != {"cpu"}:
            return original(*args, **options)
        state.is_open = True
        try:
            return original(*args, **options)
        finally:
            state.is_open = False

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Tell what this thread does now along with its waits."""
        state = self._call
        before, state.during = state.during, what
        try:
            yield
        finally:
            state.during = before

    @contextmanager
    def unheard(self) -> Iterator[None]:
        """Tell of no wait of this thread."""
        state = self._call
        before, state.is_open = state.is_open, True
        try:
            yield
        finally:
            state.is_open = before

    def heard(self, what: str, function: Callable[..., Any], *args: Any) -> Any:
        """Run the user's function, in whichever thread, for whoever has entered last."""
        if not self._entered:
            return function(*args)
        state = self._call
        before = state.is_lent, state.is_open, state.during
        state.is_lent, state.is_open, state.during = True, False, what
        try:
            return function(*args)
        finally:
            state.is_lent, state.is_open, state.during = before

    def _placed(self, frame: FrameType | None, kind: str, types: frozenset[str]) -> Any:
        place = _place(frame, kind, types)
        during = self._call.during
        return place._replace(during=during) if place is not None and during else place

    def _listeners(self) -> list[SyncListener]:
        """Return who is to be told of what this thread does."""
        own = self._by_thread.get(threading.get_ident())
        if own is not None:
            return list(dict.fromkeys(own))
        if self._entered and (self._call.is_lent or torch._C._current_graph_task_id() != -1):
            # A loader's or autograd's thread: it works for whoever has entered last.
            return list(dict.fromkeys(self._by_thread.get(self._entered[-1][0], ())))
        return []

    def _turn(self) -> None:
        """Listen to what those that are entered need."""
        self._types = frozenset(listener.device_type for _, listener in self._entered)
        if "cuda" in self._types:
            if self._old_mode is None:
                _start_cuda()
            self._filter.insert()
            mode = torch._C._cuda_get_sync_debug_mode()
            if self._old_mode is None:
                self._old_mode = mode
            if not mode:  # else it is the user's, who sees what it says
                self._is_turning_on = True
                try:
                    torch._C._cuda_set_sync_debug_mode(1)
                finally:
                    self._is_turning_on = False
        elif self._old_mode is not None:
            # What the user has set meanwhile is the user's.
            if torch._C._cuda_get_sync_debug_mode() == 1:
                torch._C._cuda_set_sync_debug_mode(self._old_mode)
            self._old_mode = None

    def _replace(self, call: SyncCall) -> None:
        owner, name, judge, reads_itself = call.owner, call.name, call.judge, call.reads_itself
        is_own = name in vars(owner)
        original = getattr(owner, name)
        watch = self

        @functools.wraps(original, updated=())
        def listening(*args: Any, **options: Any) -> Any:
            certainty = NO
            types = watch._types
            # An update reads hundreds of numbers on the host, and they are not what is looked for.
            if types == _CUDA and reads_itself and args and type(args[0]) in _PLAIN:
                types = types if args[0].is_cuda else _NONE
            if types:
                try:
                    certainty = judge(args, options, types)
                except Exception as error:  # arguments of a strange kind, or wrong ones
                    logger.debug("a call of %s could not be judged: %s", name, error)
            if certainty == UNHEARD:
                return watch.run_unheard(original, args, options)
            if certainty:
                return watch.run(call, certainty, original, args, options, _caller())
            return original(*args, **options)

        _keep_out_of_graphs(listening, original)
        setattr(owner, name, listening)

        def undo() -> None:
            if vars(owner).get(name) is not listening:
                return  # somebody has replaced it since, and holds ours
            if is_own:
                setattr(owner, name, original)
            else:
                delattr(owner, name)

        self._undo.append(undo)
        self._replaced.append(call)


@final
class _SyncFilter:
    """An entry of the warning filters that takes torch's word of a wait out.

    A filter is asked by ``match`` in the frame that warns, which is how the line is found.
    """

    def __init__(self, watch: SyncWatch) -> None:
        self._watch = watch
        leave_to_python(_SyncFilter.match.__code__)  # torch warns also from within compiled code
        self._entry: Entry = ("ignore", self, UserWarning, None, 0)

    def match(self, text: str) -> bool:
        """Return whether this is the warning; tells the watch."""
        if self._watch._is_turning_on and text.startswith(_PROTOTYPE):
            return True
        if not text.startswith(_SYNC_WARNING):
            return False
        return self._watch.warned(_caller())

    def insert(self) -> None:
        """Come first, as often as somebody has put the filters back.

        Not at each step: torch's and everybody's warnings that are said once a place are said
        again after each change of the filters.
        """
        if not is_first(self._entry):
            self.remove()
            put_first(self._entry)

    def remove(self) -> None:
        take_out(self._entry)


def _start_cuda() -> None:
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:
        raise UnsupportedDeviceError(
            f"a SyncGuard for 'cuda' needs a CUDA device: {error}; give device='cpu' to find what "
            "would wait on one"
        ) from error


def _caller() -> FrameType | None:
    """Return the frame that called the function that calls this; None if C++ did."""
    try:
        return sys._getframe(2)
    except ValueError:
        return None


def _keep_out_of_graphs(listening: Any, original: Any) -> None:
    """Let torch.compile see the original where it follows the code, and run ours as it is."""
    listening._torchdynamo_inline = original
    leave_to_python(listening.__code__)  # which all closures share


def _remove_last(listeners: list[SyncListener], listener: SyncListener) -> None:
    for index in range(len(listeners) - 1, -1, -1):
        if listeners[index] is listener:
            del listeners[index]
            return


# One a process, as are the calls that it replaces, torch's check and the warning filters.
WATCH = SyncWatch()
