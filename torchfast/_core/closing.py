"""Objects that are closed, by hand or at the end of a ``with`` block."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Closing(ABC):
    """A context manager that closes itself, whatever the body raised."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what is held; a second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def close_with(owner: object, held: Closing) -> None:
    """Close something when its owner is dropped without having done so; neither is kept alive."""
    # At the end of the process there is nobody left to see it.
    weakref.finalize(owner, _close, weakref.ref(held)).atexit = False


def _close(reference: weakref.ref[Closing]) -> None:
    if (held := reference()) is not None:
        held.close()
