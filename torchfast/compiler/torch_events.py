"""Where torch is listened to: the one place that knows which of its internals say what.

- ``get_compilation_metrics()``: an entry for each try to compile a frame or a backward, with the
  failed guard of a recompile and the reason for giving up. It keeps the last 64 only, so it is read
  at each compilation. An entry without a function's name is a try that was refused: the recompile
  limit, which torch counts nowhere.
- ``guard_failures``: the failed guards of each function. Each compilation adds one of each version
  that there is, of which the metrics have the first alone. ``torch._dynamo.reset()`` empties it.
- ``graph_break_reasons``: a list of graph breaks with the user's stack. ``torch._dynamo.reset()``
  empties it.
- ``callback_handler``: calls back before and after a compilation, never in a replay.
  ``torch._dynamo.reset()`` forgets the callbacks.
- ``register_bytecode_hook``: calls back in a compilation with the code object; it survives a reset,
  and so brings the callbacks back.
- ``counters``: hits and misses of the caches. Process-wide, and anybody may clear them.

All of these exist in torch 2.11 to 2.13; each is asked for in a way that survives its absence, and
with none but the metrics the record still knows frames, recompiles and limits.
"""

from __future__ import annotations

import functools
import logging
import re
import sys
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, final

from torchfast._core.user_code import is_library

logger = logging.getLogger(__name__)

T = TypeVar("T")

_COUNTERS = {
    "autograd_hits": ("aot_autograd", "autograd_cache_hit"),
    "autograd_misses": ("aot_autograd", "autograd_cache_miss"),
    "autograd_bypasses": ("aot_autograd", "autograd_cache_bypass"),
    "graph_hits": ("inductor", "fxgraph_cache_hit"),
    "graph_misses": ("inductor", "fxgraph_cache_miss"),
    "graph_bypasses": ("inductor", "fxgraph_cache_bypass"),
}


class Fresh(NamedTuple):
    """What has come since the last look.

    Attributes:
        metrics: New entries of the compilation metrics.
        breaks: New graph breaks.
        lost: Some entries may have gone before they were seen.
    """

    metrics: list[Any]
    breaks: list[Any]
    lost: bool


@final
class TorchEvents:
    """Reads what is new in torch's records of compilations, and is woken when there is something.

    Args:
        before: Called before a compilation, with its id.
        after: Called after it, and in the middle with its code object.
    """

    def __init__(self, before: Callable[[str], None], after: Callable[[], None]) -> None:
        import torch._dynamo.utils

        self._utils: Any = torch._dynamo.utils
        self._bell = _Bell(before, after)
        self._last_metric = _last(self.all_metrics())
        self._last_break = _last(self._breaks())
        self._seen_counts = self._read_counters()
        self.counts = dict.fromkeys(_COUNTERS, 0)
        self._bell.attach()
        self._detach = weakref.finalize(self, self._bell.detach)

    def attach(self) -> None:
        """Be woken again, where ``torch._dynamo.reset()`` has put an end to it."""
        if not self._bell.is_attached() and self._detach.alive:
            self._bell.attach()

    def detach(self) -> None:
        """Be woken no more."""
        self._detach()

    def has_news(self) -> bool:
        """Whether there is anything new; under a microsecond."""
        # Not the public copy of it where there is a shorter way: this is asked at each step.
        metrics = getattr(self._utils, "_compilation_metrics", None)
        return _last(self.all_metrics() if metrics is None else metrics) is not self._last_metric

    def take(self) -> Fresh:
        """Return what is new since the last call."""
        metrics, breaks = self.all_metrics(), self._breaks()
        fresh, found = _since(metrics, self._last_metric)
        # Where the last one seen is gone, somebody cleared them, or so many came that it fell out.
        full = getattr(getattr(self._utils, "_compilation_metrics", None), "maxlen", 0)
        lost = not found and len(metrics) == full
        fresh_breaks, _ = _since(breaks, self._last_break)
        # The last one seen is held on to after a clear as well: no other can have its identity.
        self._last_metric = _last(metrics) if metrics else self._last_metric
        self._last_break = _last(breaks) if breaks else self._last_break
        self._count()
        return Fresh(fresh, fresh_breaks, lost)

    def versions(self, code: CodeKey) -> dict[str, Version]:
        """Return the compiled versions of a function by their ids; empty if it is unknown."""
        try:
            from torch._dynamo.eval_frame import _debug_get_cache_entry_list

            owner = self._bell.code(code)
            entries = [] if owner is None else _debug_get_cache_entry_list(owner)
            return {str(entry.compile_id): Version(entry) for entry in entries}
        except Exception as error:
            # They only say more of a cause: never worth the user's step.
            logger.debug("the versions of %s could not be read: %s", code, error)
            return {}

    def reasons(self, compile_id: str) -> list[str]:
        """Return why each version of a function did not fit, in the order in which it was asked.

        Args:
            compile_id: Of the compilation that was last begun, or refused, for that function.
        """
        function = compile_id.rpartition("/")[0]
        found: dict[str, str] = {}
        for told in list(getattr(self._utils, "guard_failures", {}).values()):
            # A version that comes a second time belongs to the compilation before.
            for reason in reversed(told):
                version = str(reason).partition(":")[0]
                if version in found or version.rpartition("/")[0] != function:
                    break
                found[version] = str(reason)
        return list(reversed(found.values()))

    def setting(self, name: str, least: int = 0) -> str:
        """Return one of torch's limits with its value, such as ``"recompile_limit (8)"``.

        Args:
            name: Of the setting.
            least: What it must have been at the time: while a function is compiled that several
                regions share, the limit is higher.
        """
        from torch._dynamo import config

        value = getattr(config, name, None)
        return f"{name} ({max(value, least)})" if isinstance(value, int) else name

    def _count(self) -> None:
        now = self._read_counters()
        for name, value in now.items():
            # Less than before: somebody has cleared it, and all of it is new.
            seen = self._seen_counts[name]
            self.counts[name] += value - seen if value >= seen else value
        self._seen_counts = now

    def _read_counters(self) -> dict[str, int]:
        counters = getattr(self._utils, "counters", {})
        # Not by indexing, which makes entries in a defaultdict that others print.
        return {
            name: int(counters.get(group, {}).get(key, 0))
            for name, (group, key) in _COUNTERS.items()
        }

    def all_metrics(self) -> Sequence[Any]:
        """Return the entries that torch remembers, oldest first."""
        return self._utils.get_compilation_metrics()  # type: ignore[no-any-return]

    def _breaks(self) -> Sequence[Any]:
        return list(getattr(self._utils, "graph_break_reasons", ()))


class CodeKey(NamedTuple):
    """How a function is named in the compilation metrics."""

    name: str
    file: str
    line: int


@final
class Version:
    """A compiled version of a function.

    Args:
        entry: As torch keeps it.

    Attributes:
        backend: What compiled it.
    """

    def __init__(self, entry: Any) -> None:
        self.backend: Any = getattr(entry, "backend", None)
        self._guards = entry.guard_manager

    @functools.cached_property
    def guards(self) -> str:
        """All of its guards as text; empty if they cannot be read."""
        try:
            # As in the reasons of recompiles: L['x'] is x.
            return re.sub(r"L\[\s*['\"](.*?)['\"]\s*\]", r"\1", str(self._guards))
        except Exception as error:
            logger.debug("the guards of a compiled function could not be read: %s", error)
            return ""


@final
class _Bell:
    """What torch calls. It holds no record alive, and lets no error into a compilation."""

    def __init__(self, before: Callable[[str], None], after: Callable[[], None]) -> None:
        self._before = weakref.WeakMethod(before)
        self._after = weakref.WeakMethod(after)
        self._codes: dict[CodeKey, weakref.ref[types.CodeType]] = {}
        self._hook: Any = None
        self._handler: Any = None
        # Made once: a bound method is another object at each access, and slower to be found.
        self._starts, self._ends = self._on_start, self._on_end

    def is_attached(self) -> bool:
        handler = self._handler
        return (
            handler is not None
            and self._starts in handler.start_callbacks
            and self._ends in handler.end_callbacks
        )

    def attach(self) -> None:
        from torch._dynamo import callback, convert_frame

        handler = self._handler = callback.callback_handler
        if self._starts not in handler.start_callbacks:
            handler.register_start_callback(self._starts)
        if self._ends not in handler.end_callbacks:
            handler.register_end_callback(self._ends)
        register = getattr(convert_frame, "register_bytecode_hook", None)
        if self._hook is None and register is not None:
            self._hook = register(self._on_code)

    def detach(self) -> None:
        if self._handler is not None:
            for callbacks, own in (
                (self._handler.start_callbacks, self._starts),
                (self._handler.end_callbacks, self._ends),
            ):
                if own in callbacks:
                    callbacks.remove(own)
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def code(self, key: CodeKey) -> types.CodeType | None:
        reference = self._codes.get(key)
        return reference() if reference else None

    # Whatever of this fails, the user's compilation goes on.

    def _on_start(self, *arguments: Any) -> None:
        try:
            before = self._before()
            if before is not None:
                before(str(getattr(arguments[0], "compile_id", "")) if arguments else "")
        except Exception as error:
            logger.debug("a compilation could not be noted: %s", error)

    def _on_end(self, *_: Any) -> None:
        try:
            after = self._after()
            if after is not None:
                after()
        except Exception as error:
            logger.debug("a compilation could not be noted: %s", error)

    def _on_code(self, code: types.CodeType, _compiled: types.CodeType) -> None:
        try:
            key = CodeKey(code.co_name, code.co_filename, code.co_firstlineno)
            self._codes[key] = weakref.ref(code)
            self.attach()  # a reset may have forgotten the callbacks
        except Exception as error:
            logger.debug("a compilation could not be noted: %s", error)


def callers() -> tuple[str, ...]:
    """Return the functions that are being run, outermost first, without torch's own."""
    names = []
    frame = sys._getframe(1) if hasattr(sys, "_getframe") else None
    while frame is not None:
        if not is_library(frame.f_code.co_filename):
            names.append(frame.f_code.co_name)
        frame = frame.f_back
    return tuple(reversed(names))


def _last(items: Sequence[T]) -> T | None:
    return items[-1] if items else None


def _since(items: Sequence[T], last: T | None) -> tuple[list[T], bool]:
    """Return what stands behind ``last``, and whether it was found; all if it was not."""
    if last is None:
        return list(items), True
    for index in range(len(items) - 1, -1, -1):
        if items[index] is last:
            return list(items[index + 1 :]), True
    return list(items), False
