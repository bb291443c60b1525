"""What the owner of compiled code keeps about it: a record, a watch, and a place in the cache."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, final

from torch import nn
from typing_extensions import override

from torchfast._core.closing import Closing
from torchfast._core.decisions import Decision
from torchfast.compiler.early_keys import wait_for_keys, work_out_keys
from torchfast.compiler.options import (
    HOW_LONG,
    WHERE_AND_IF,
    CompileOptions,
    compile_decision,
)
from torchfast.compiler.steady_watch import SteadyWatch

if TYPE_CHECKING:
    from torchfast.compiler.store import CacheStore
    from torchfast.compiler.summary import CompileSummary

# Steps after which nothing should have to be compiled any more: the warm-up of a graph, its capture
# and check, and some for a second shape.
STEADY_AFTER = 10
# Of the steps after that one in so many looks for news, of an account that is alone.
LOOK_EVERY = 8

# A record has what the whole process compiles. Where there are several accounts, what comes between
# the begin and the end of one's step is its own, and the others pass over it. The lock is for steps
# in several threads.
_LIVING: weakref.WeakSet[CompileAccount] = weakref.WeakSet()
_LOCK = threading.RLock()


def _look_all() -> None:
    """Let each account see what was compiled outside of steps."""
    with _LOCK:
        for account in _LIVING:
            account._watch.check()


@contextmanager
def measuring() -> Iterator[None]:
    """Run what measures before a step: what it compiles is nobody's to be warned of."""
    _look_all()
    try:
        yield
    finally:
        with _LOCK:
            for account in _LIVING:
                if account._watch.has_news():
                    account._watch.pass_over()


def _may_be_on_gpu(model: nn.Module | None) -> bool:
    return model is None or any(parameter.is_cuda for parameter in model.parameters())


@final
class CompileAccount(Closing):
    """Knows what becomes of the code of some functions.

    Args:
        model: Whose structure names the place in the cache.
        options: How it is compiled, and where it is kept.
        context: What else is done to the model, such as a plan, as text.
    """

    def __init__(self, model: nn.Module | None, options: CompileOptions, context: str = "") -> None:
        from torchfast.compiler.record import CompileRecord

        keys = []
        if options.backend == "inductor":
            # A search compiles by other accounts, and what is asked of nobody is compiled by none.
            is_compiled_here = options.mode != "auto"
            keys = work_out_keys(for_gpu=is_compiled_here and _may_be_on_gpu(model))
        self._record = CompileRecord(before=partial(wait_for_keys, keys))
        self._watch = SteadyWatch(
            self._record, mark_dynamic=options.mark_dynamic, dynamic=options.dynamic
        )
        self._num_steps = 0
        self._is_closed = False
        with _LOCK:
            _look_all()  # they looked now and then, and from here on tell whose news it is
            _LIVING.add(self)
        self._store: CacheStore | None = None
        if options.cache is not None:
            if model is None:
                raise ValueError(
                    f"cache={options.cache!r} needs the model that is compiled, got model=None; "
                    "what is kept is found again by the model's structure"
                )
            from torchfast.compiler.store import CacheStore
            from torchfast.compiler.store_key import store_key

            self._store = CacheStore(options.cache)
            # Now, for what is compiled already stays as it is, and looks otherwise.
            told = options.changed_without(WHERE_AND_IF | HOW_LONG)
            self._key = store_key(model, options=told, plan=context)
            self._store.load(self._key)

    def before_step(self) -> None:
        """Note that a step begins: what is compiled from now on is its own."""
        if len(_LIVING) > 1 and self._watch.has_news():
            _look_all()

    def after_step(self) -> None:
        """Note that a step is done: in the first ones everything should be compiled."""
        self._num_steps += 1
        is_alone = len(_LIVING) == 1
        if not is_alone and self._watch.has_news():
            with _LOCK:
                for account in _LIVING:
                    if account is not self:
                        account._watch.pass_over()
                self._watch.check()
        if self._num_steps == STEADY_AFTER:
            self._watch.begin()
            self.save()
        elif is_alone and self._num_steps > STEADY_AFTER and self._num_steps % LOOK_EVERY == 0:
            self._watch.check()

    def save(self) -> None:
        """Keep what was compiled in the cache, if there is one. Never raises."""
        if self._store is not None:
            self._store.save(self._key)

    def keep_nothing(self) -> None:
        """Leave the cache as it is from now on."""
        self._store = None

    def summary_of(self, code_names: Sequence[str]) -> list[CompileSummary]:
        """Return what became of each function."""
        summary = self._record.summary()
        return [summary.of(name) for name in code_names]

    def decisions(self, code_names: Sequence[str]) -> list[Decision]:
        """Return what needs attention, each once, and what became of the cache."""
        found: dict[str, Decision] = {}
        for name, summary in zip(code_names, self.summary_of(code_names), strict=True):
            # Of its own failure a region tells itself.
            frames = [f for f in summary.frames if (f.code.name, f.outcome) != (name, "given up")]
            for decision in replace(summary, frames=tuple(frames)).decisions()[1:]:
                found.setdefault(decision.detail, decision)
        if self._store is not None:
            outcome = self._store.outcome()
            is_wrong = outcome.status in ("ignored", "incompatible", "loaded but nothing was used")
            found[""] = compile_decision(
                "stepped aside" if is_wrong else "applied", f"cache: {outcome}"
            )
        return list(found.values())

    def counters(self, code_names: Sequence[str]) -> dict[str, int | float]:
        """Return the sums of what was counted, and how the caches of the process were used."""
        totals: dict[str, int | float] = {}
        for summary in self.summary_of(code_names):
            for name, value in summary.counters().items():
                totals[name] = round(totals.get(name, 0) + value, 3)
        caches = self._record.summary().caches
        if caches is not None:
            totals |= {f"cache_{name}": value for name, value in caches.counts().items()}
        return totals

    @override
    def close(self) -> None:
        """Keep what was compiled, and listen no more."""
        if not self._is_closed:
            self._is_closed = True
            with _LOCK:
                _LIVING.discard(self)
            self.save()
            self._record.close()
