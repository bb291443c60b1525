"""Candidates timed as they will run: as replays of a graph, where a graph will hold the step.

Launched one by one, each kernel costs the host some microseconds, and compiled code launches fewer.
In a graph that gain is gone and only what the kernels take is left, so the fastest candidate may be
another one, and compiled code that loses when launched may win.

Each candidate that is right is captured once more before the timing. Where the reference cannot be
captured, the step will not be either, and all are timed launched. A single candidate that cannot be
captured would run launched beside a graph that could have been, so it is timed like that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torchfast.compiler.candidates import Candidate, OutError

# Of a candidate, where the others are replayed; and of all.
LAUNCHED = "timed launched kernel by kernel, since it was not captured"
ALL_LAUNCHED = "all were timed launched kernel by kernel, since the reference was not captured"
REPLAYED = "timed as replays of a CUDA graph, as the step will run"


class Graphs(Protocol):
    """What captures the work of a search as the step will be captured."""

    def capture(self) -> Callable[[], object]:
        """Capture a unit of what is in force; return what replays it.

        Raises:
            Exception: It cannot be captured.
        """

    def close(self) -> None:
        """Let go of all that was captured."""


def captured(
    candidates: Sequence[Candidate], capture: Callable[[Candidate], Callable[[], object]]
) -> tuple[dict[str, Callable[[], object]], dict[str, str]]:
    """Capture candidates.

    Args:
        candidates: The reference first.
        capture: Captures a candidate; raises `OutError` if that cannot be done.

    Returns:
        What replays each, by name, and why there is none of the others. If the reference cannot be
        captured, nothing replays any.
    """
    replays: dict[str, Callable[[], object]] = {}
    reasons: dict[str, str] = {}
    for candidate in candidates:
        try:
            replays[candidate.name] = capture(candidate)
        except OutError as error:
            reasons[candidate.name] = error.reason
            if candidate is candidates[0]:
                break
    return replays, reasons
