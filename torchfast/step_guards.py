"""What watches a step from outside of its numbers: the host syncs of its Python.

A guard is entered in the parts of a step that Python runs: eager steps, the warm-up steps before a
capture, the update behind a graph. A replay runs no Python and enters nothing. ``fit`` enters it
around its loop, to hear callbacks and transforms too.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Literal, final

import torch

from torchfast._core.decisions import Decision
from torchfast._core.no_context import NO_CONTEXT
from torchfast._core.syncs import WATCH
from torchfast.plan import Plan
from torchfast.profiling import SyncGuard, SyncReport

_MOST_NAMED = 5


@final
class StepSyncs:
    """The `SyncGuard` of a step, or nothing, as its plan says.

    Args:
        plan: Its ``sync_guard`` is the mode.
        device: Where the step runs; on any but CUDA what would wait on CUDA is found.
    """

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self._mode = plan.sync_guard
        self._guard: SyncGuard | None = None
        if plan.sync_guard != "off":
            kind: Literal["cuda", "cpu"] = "cuda" if device.type == "cuda" else "cpu"
            self._guard = SyncGuard(plan.sync_guard, device=kind)

    def __enter__(self) -> None:
        if self._guard is not None:
            self._guard.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._guard is not None:
            self._guard.__exit__(kind, error, traceback)

    def during(self, what: str) -> AbstractContextManager[None]:
        """Say in the account what of the loop around the steps waits."""
        return NO_CONTEXT if self._guard is None else WATCH.during(what)

    def loading(self) -> AbstractContextManager[None]:
        """Listen to a loader, on CUDA: what it holds elsewhere is the host's on any machine."""
        if self._guard is None:
            return NO_CONTEXT
        return WATCH.during("loader") if self._guard.device_type == "cuda" else WATCH.unheard()

    def unheard(self) -> AbstractContextManager[None]:
        """Leave out what has to wait, such as an evaluation."""
        return NO_CONTEXT if self._guard is None else WATCH.unheard()

    def report(self) -> SyncReport | None:
        """Return the account; None where the plan asks for none."""
        return None if self._guard is None else self._guard.report()

    def decisions(self) -> list[Decision]:
        """Return what the guard does and the costliest lines that it has found."""
        if self._guard is None:
            return []
        report = self._guard.report()
        verb = "waits" if report.device_type == "cuda" else "would wait on CUDA"
        detail = f"{self._mode}: the host {verb} at {report.costliest(_MOST_NAMED) or 'no line'}"
        return [Decision(lever="sync_guard", outcome="applied", detail=detail)]

    def counters(self) -> dict[str, int | float | str]:
        """Return how often the host waited and for how long."""
        if self._guard is None:
            return {}
        report = self._guard.report()
        if report.device_type != "cuda":
            return {"host_syncs": report.count}
        return {"host_syncs": report.count, "host_sync_ms": round(report.total_ms, 3)}

    def close(self) -> None:
        """Put torch back."""
        if self._guard is not None:
            self._guard.close()
