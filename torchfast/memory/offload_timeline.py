"""When a forward saved what its backward used, and how fast the bus was meanwhile.

In the first steps under ``"auto"`` moments are noted on the streams of a forward and its backward:
where a storage was saved, where it was used, around each copy, and around each wait of the
computation for one. They are read when the backward is through. Times are those of the computation
alone, its waits for copies left out, so they are right though copies held it up while it was
looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, final

from torchfast.memory.copy_streams import CopyStreams

_NOISE_S: Final = 3e-5  # what the host takes to enqueue a wait, where the stream is idle


class At(NamedTuple):
    """A storage, by its number, at a moment of the computation, in seconds from its first one."""

    storage: int
    second: float


@final
@dataclass(frozen=True, kw_only=True)
class StepTiming:
    """What was seen of a forward and its backward.

    Attributes:
        sizes: Bytes of the storages that may go, in the order in which they were saved.
        pushed: When enough newer ones had come that a storage was to go.
        used: When the backward used one, each time.
        compute_s: From the first moment to the last, without waits for copies.
        waited_s: Those waits that were any.
        out_bytes_per_s: Of the copies to the host; None if there were none.
        back_bytes_per_s: Of the copies back.
    """

    sizes: tuple[int, ...]
    pushed: tuple[At, ...]
    used: tuple[At, ...]
    compute_s: float
    waited_s: float
    out_bytes_per_s: float | None
    back_bytes_per_s: float | None


class _Copy(NamedTuple):
    num_bytes: int
    before: Any
    after: Any


@final
class Timeline:
    """Notes the moments of one forward and its backward.

    Args:
        side: The device.
        home: The stream of the computation.
    """

    def __init__(self, side: CopyStreams, home: Any) -> None:
        self._side, self._home = side, home
        self._sizes: list[int] = []
        # In the order of the stream: what happened, to which storage, from when until when.
        self._home_marks: list[tuple[str, int, Any, Any]] = []
        self._copies: dict[str, list[_Copy]] = {"out": [], "back": []}

    def saved(self, num_bytes: int) -> None:
        """Note that the next storage was saved."""
        self._sizes.append(num_bytes)
        self._now("saved", len(self._sizes) - 1)

    def pushed(self, index: int) -> None:
        """Note that a storage was to go, behind the one that was saved last."""
        self._home_marks.append(("pushed", index, None, None))

    def used(self, index: int) -> None:
        """Note that the backward uses a storage."""
        self._now("used", index)

    @contextmanager
    def waiting(self, stream: Any) -> Iterator[None]:
        """Note a wait for a copy, enqueued by the body."""
        if stream != self._home:
            yield
            return
        before = self._side.mark(stream)
        yield
        self._home_marks.append(("waited", -1, before, self._side.mark(stream)))

    @contextmanager
    def copying(self, stream: Any, way: str, num_bytes: int) -> Iterator[None]:
        """Note a copy, enqueued by the body, ``"out"`` or ``"back"``."""
        before = self._side.mark(stream)
        yield
        self._copies[way].append(_Copy(num_bytes, before, self._side.mark(stream)))

    def read(self) -> StepTiming:
        """Return what was noted.

        Synchronizes: It waits for the computation.
        """
        self._now("end", -1)
        first, last = self._home_marks[0][2], self._home_marks[-1][3]
        seconds = self._side.seconds
        total_s, waited_s, saved_s = seconds(first, last), 0.0, 0.0
        pushed, used = [], []
        for what, index, before, after in self._home_marks:
            if what == "waited":
                took_s = seconds(before, after)
                waited_s += took_s if took_s > _NOISE_S else 0.0
            elif what == "saved":
                saved_s = seconds(first, after) - waited_s
            elif what == "pushed":
                pushed.append(At(index, saved_s))
            elif what == "used":
                used.append(At(index, seconds(first, after) - waited_s))
        return StepTiming(
            sizes=tuple(self._sizes),
            pushed=tuple(pushed),
            used=tuple(used),
            compute_s=total_s - waited_s,
            waited_s=waited_s,
            out_bytes_per_s=self._rate("out"),
            back_bytes_per_s=self._rate("back"),
        )

    def _now(self, what: str, index: int) -> None:
        mark = self._side.mark(self._home)
        self._home_marks.append((what, index, mark, mark))

    def _rate(self, way: str) -> float | None:
        """Return the rate below which half of the bytes went."""
        # Not the quotient of the sums: an idle stream notes its moment before the host has enqueued
        # the copy, which counts for much where a copy is small.
        rates = sorted(
            (num_bytes / took_s, num_bytes)
            for num_bytes, before, after in self._copies[way]
            if (took_s := self._side.seconds(before, after)) > 0
        )
        left = sum(num_bytes for _, num_bytes in rates) / 2
        for rate, num_bytes in rates:
            left -= num_bytes
            if left <= 0:
                return rate
        return None
