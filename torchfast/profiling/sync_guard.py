"""SyncGuard: finds the lines of a step at which the host waits for the device.

A GPU is fast as long as the host is ahead of it: kernels are queued, and run one after the other.
``loss.item()`` stops the host until the queue is empty; then the device idles until the host has
filled it again. Nothing says so, and the line looks innocent. The guard says it: the line, how
often, and the milliseconds that the host lost there.

It helps where the step is eager, in whole or in part: the loss function, metrics, hooks, callbacks,
and the warm-up steps before a capture. A replay of a CUDA graph runs none of the step's Python; the
guard costs nothing there.

`torchfast._core.syncs` has the mechanism and what it does not see. On a machine without CUDA the
guard finds the operations that would wait on one, taking every tensor for one on the device; the
milliseconds then mean nothing and are not shown.
"""

from __future__ import annotations

import logging
import weakref
from functools import partial
from types import TracebackType
from typing import Any, Literal, final

import torch

from torchfast._core.arguments import check_choice, check_int, explain_keywords
from torchfast._core.errors import ClosedError, HostSyncError
from torchfast._core.sync_places import SyncPlace
from torchfast._core.syncs import WATCH
from torchfast.profiling.sync_report import SyncAccount, SyncReport, describe, row_of

logger = logging.getLogger(__name__)

SyncMode = Literal["record", "warn", "raise"]
SYNC_MODES: tuple[SyncMode, ...] = ("record", "warn", "raise")


@final
class SyncGuard:
    """Finds every host sync of the code in its ``with`` block.

    Enter it around a whole loop, or around each step: the account goes on. Only what the entering
    thread does is counted, and the backward pass that it runs.

    Args:
        mode: ``"record"`` counts; ``"warn"`` also logs a warning, once a line; ``"raise"`` raises
            at the line, before the host waits. A wait that the arguments of the call do not tell
            (checks of ``torch.linalg``, an index by a list, a value written by a mask), or that
            only torch's own check sees (kind ``"other"`` in the report), is raised when it is over.
        device: ``"cuda"`` or ``"cpu"``; None means CUDA where there is one. Under ``"cpu"`` it
            finds what would wait on CUDA.
        max_lines: Lines to keep in the report, the costliest; the rest is one sum.

    Raises:
        UnsupportedDeviceError: Entered with ``device="cuda"`` where there is none.
        HostSyncError: Under ``"raise"``, at the line that waits.
        ClosedError: Entered after `close`.

    Numerics: Bitwise equal to a run without it.
    Synchronizes: Never.

    Example:
        >>> import torch
        >>> with SyncGuard(device="cpu") as guard:
        ...     x = torch.ones(3)
        ...     y = x * x.sum().item()
        >>> [(sync.kind, sync.count) for sync in guard.report().syncs]
        [('item', 1)]
    """

    @explain_keywords
    def __init__(
        self,
        mode: SyncMode = "record",
        *,
        device: Literal["cuda", "cpu"] | None = None,
        max_lines: int = 256,
    ) -> None:
        check_choice("mode", mode, SYNC_MODES)
        if device is not None:
            check_choice("device", device, ("cuda", "cpu"))
        self.mode = mode
        self.device_type: str = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._max_lines = check_int("max_lines", max_lines, minimum=1)
        self._account = SyncAccount(self.device_type, self._max_lines)
        self._ear = _Ear(mode, self._account)
        self._depth = 0
        self._was_entered = False
        self._held: weakref.finalize[[], SyncGuard] | None = None
        self._closed = False

    def __enter__(self) -> SyncGuard:
        """Listen to this thread."""
        if self._closed:
            raise ClosedError("this SyncGuard was closed; make a new one")
        WATCH.hold(self.device_type)
        if self._was_entered and self._held is None:
            # Entered again and again, as around each step: what listens stays in place between.
            WATCH.hold(self.device_type)
            self._held = weakref.finalize(self, WATCH.release)
        self._was_entered = True
        try:
            WATCH.enter(self._ear)
        except BaseException:
            WATCH.release()
            raise
        self._depth += 1
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        """Listen no more."""
        self._depth -= 1
        try:
            WATCH.leave(self._ear)
        finally:
            WATCH.release()

    def report(self) -> SyncReport:
        """Return what has been found so far."""
        return self._account.report()

    def reset(self) -> None:
        """Forget what has been found, as after warm-up steps."""
        self._account.clear()

    def close(self) -> None:
        """Put back what a guard that was entered more than once has left in place."""
        self._closed = True
        if self._held is not None:
            self._held()

    def __reduce__(self) -> tuple[Any, ...]:
        """Let copies and pickles be guards of their own, that have found nothing yet."""
        options: dict[str, Any] = {"device": self.device_type, "max_lines": self._max_lines}
        return partial(SyncGuard, self.mode, **options), ()

    def __repr__(self) -> str:
        """Return mode, device and what has been found."""
        count = self._account.report().count
        return f"SyncGuard({self.mode!r}, device={self.device_type!r}): {count} host syncs"


@final
class _Ear:
    """What the watch tells: counts, warns or raises as the mode says."""

    def __init__(self, mode: SyncMode, account: SyncAccount) -> None:
        self.device_type = account.device_type
        self._mode = mode
        self._account = account

    def expect(self, place: SyncPlace) -> None:
        """Refuse a wait under ``"raise"``."""
        if self._mode == "raise":
            row = row_of(place)
            raise HostSyncError(
                f"the host would wait for the device: {describe(row)}; {row.remedy}"
            )

    def hear(self, place: SyncPlace, milliseconds: float | None) -> None:
        """Count a wait."""
        if self._account.is_repeated(place):
            return
        is_new = self._account.add(place, milliseconds)
        if self._mode == "raise":
            row = row_of(place)
            raise HostSyncError(
                f"the host has waited for the device: {describe(row)}; {row.remedy}"
            )
        if self._mode == "warn" and is_new:
            row = row_of(place)
            logger.warning("the host waits for the device: %s; %s", describe(row), row.remedy)
