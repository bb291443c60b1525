"""Profilers of others: torch has room for one at a time, and breaks both where a second begins.

A script may have a torch.profiler of its own, and so may a framework. Where it begins while ours
runs, torch ends ours without a word, and the process dies when ours is written; where ours begins
while it runs, it is the script's own that is lost. So it is looked at when they begin and end, and
ours gives way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, final

import torch
from torch._C._autograd import _profiler_enabled

# By these names of its module every profiler of torch begins, and the last ends it.
_BEGIN: Final = ("_prepare_profiler", "_enable_profiler")
_END: Final = "_disable_profiler"


@final
class OtherProfilers:
    """Whether a profiler that is not ours is on.

    Args:
        give_way: Called before one begins.
    """

    def __init__(self, give_way: Callable[[], None]) -> None:
        self.is_on = False
        self._give_way = give_way
        self._is_ours = False
        self._undo: list[Callable[[], None]] = []

    def start(self) -> None:
        """Begin to look."""
        # A profile around this one gives way by itself, when this one begins.
        around = getattr(getattr(torch.autograd.profiler, _END, None), "looks", None)
        self.is_on = _profiler_enabled() if around is None else around.is_on
        for name in (*_BEGIN, _END):
            self._replace(name)

    def stop(self) -> None:
        """Look no more."""
        while self._undo:
            self._undo.pop()()

    @contextmanager
    def ours(self) -> Iterator[None]:
        """Take what begins or ends now for ours."""
        self._is_ours = True
        try:
            yield
        finally:
            self._is_ours = False

    def _replace(self, name: str) -> None:
        module: Any = torch.autograd.profiler
        original = getattr(module, name, None)
        if original is None:  # another torch
            return

        def looked_at(*args: Any, **options: Any) -> Any:
            if not self._is_ours:
                if name != _END and not self.is_on:
                    self.is_on = True
                    self._give_way()
                elif name == _END:
                    self.is_on = False
            return original(*args, **options)

        looked_at.looks = self  # type: ignore[attr-defined]
        setattr(module, name, looked_at)

        def undo() -> None:
            if getattr(module, name) is looked_at:
                setattr(module, name, original)

        self._undo.append(undo)
