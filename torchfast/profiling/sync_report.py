"""What the host waited for: one row a line of the user's, the costliest first."""

from __future__ import annotations

import linecache
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import final

from torchfast._core.sync_calls import remedy_for
from torchfast._core.sync_places import SyncPlace

# What a tensor that is on the host by now is asked for next; on a machine without CUDA, where
# .cpu() gives the tensor itself, that is no second wait.
_AFTER_CPU = ("numpy", "tolist", "item", "float", "int", "print")


@final
@dataclass(frozen=True, kw_only=True)
class HostSync:
    """A line that makes the host wait for the device.

    Attributes:
        file: The source file.
        line: The line in it.
        source: Its text, empty where there is none to be read.
        function: The function that it is in.
        kind: What waits: ``"item"``, ``"float"``, ``"bool"``, ``"print"``, ``"cpu"``,
            ``"boolean mask"``, ``"pageable copy"``, ``"synchronize"``, ...; ``"other"`` for a wait
            that torch reported from C++.
        via: The part of torch that the line called and that waited; empty if the line itself did.
        during: What ran it, of what runs between the steps of ``fit``: ``"callbacks"``,
            ``"loader"``, ``"transform"``, ``"count_items"``; empty for a step.
        called_from: Where the file is of an installed package, such as a progress bar's, the
            nearest line that called it and is of none, as ``file:line``; else empty.
        count: How often.
        num_timed: How often the time is known; not of waits of kind ``"other"``.
        total_ms: Host milliseconds that the calls took, the wait and the call's own work.
        max_ms: The longest of them.
        remedy: What to do instead.
    """

    file: str
    line: int
    source: str
    function: str
    kind: str
    via: str
    during: str
    count: int
    num_timed: int
    total_ms: float
    max_ms: float
    remedy: str
    called_from: str = ""


@final
@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """The host syncs of a stretch of code, in words (``str``) and as rows.

    Attributes:
        syncs: One row a line and kind, the costliest first.
        device_type: ``"cuda"``; ``"cpu"`` where it is what would wait on CUDA.
        num_left_out: Waits at lines that there was no room for, the cheapest ones.
        left_out_ms: What they took.
    """

    syncs: tuple[HostSync, ...]
    device_type: str
    num_left_out: int = 0
    left_out_ms: float = 0.0

    @property
    def count(self) -> int:
        """All waits."""
        return sum(row.count for row in self.syncs) + self.num_left_out

    @property
    def total_ms(self) -> float:
        """Host milliseconds lost, as far as they are known."""
        return sum(row.total_ms for row in self.syncs) + self.left_out_ms

    def costliest(self, most: int) -> str:
        """Return the first lines in one, with what they cost; empty if there is none."""
        parts = [f"{describe(row)} ({self._cost(row)})" for row in self.syncs[:most]]
        if more := self.count - sum(row.count for row in self.syncs[:most]):
            parts.append(f"elsewhere ({more}x)")
        return "; ".join(parts)

    def _cost(self, row: HostSync) -> str:
        if self.device_type != "cuda":
            return f"{row.count}x"
        return f"{row.count}x, " + (f"{row.total_ms:.3f} ms" if row.num_timed else "time unknown")

    def __bool__(self) -> bool:
        """Whether there was any."""
        return self.count > 0

    def __str__(self) -> str:
        """Return a table, with the line and the remedy below each row."""
        verb = "waited" if self.device_type == "cuda" else "would wait on CUDA"
        if not self:
            return f"the host {verb} at no line"
        head = f"the host {verb} {self.count} times"
        if self.device_type == "cuda":
            head += f", {self.total_ms:.3f} ms"
        lines = [head, f"  {'count':>7} {'total ms':>10} {'max ms':>9}  where"]
        for row in self.syncs:
            known = self.device_type == "cuda" and row.num_timed
            total = f"{row.total_ms:.3f}" if known else "?"
            longest = f"{row.max_ms:.3f}" if known else "?"
            lines.append(f"  {row.count:>7} {total:>10} {longest:>9}  {describe(row)}")
            lines.append(f"  {'':>28}  -> {row.remedy}")
        if self.num_left_out:
            lines.append(f"  {self.num_left_out:>7} {self.left_out_ms:>10.3f} {'':>9}  elsewhere")
        return "\n".join(lines)


def describe(row: HostSync) -> str:
    """Return kind, place and source text of a row."""
    via = f" (in {row.via})" if row.via else ""
    source = f": {row.source}" if row.source else ""
    during = f" (of {row.during})" if row.during else ""
    place = f"{Path(row.file).name}:{row.line}, in {row.function}{during}"
    called = f", called from {Path(row.called_from).name}" if row.called_from else ""
    return f"{row.kind}{via} at {place}{called}{source}"


def row_of(place: SyncPlace, tally: Tally | None = None) -> HostSync:
    """Return the row of a place."""
    tally = tally or Tally()
    return HostSync(
        file=place.file,
        line=place.line,
        source=linecache.getline(place.file, place.line).strip(),
        function=place.function,
        kind=place.kind,
        via=place.via,
        during=place.during,
        count=tally.count,
        num_timed=tally.num_timed,
        total_ms=tally.total_ms,
        max_ms=tally.max_ms,
        remedy=remedy_for(place.kind),
        called_from=place.called_from,
    )


@final
class Tally:
    """What has been counted at one place."""

    __slots__ = ("count", "max_ms", "num_timed", "total_ms")

    def __init__(self) -> None:
        self.count = self.num_timed = 0
        self.total_ms = self.max_ms = 0.0


@final
class SyncAccount:
    """Counts waits by place, in bounded memory.

    Args:
        device_type: What is listened for.
        max_lines: Places to keep. When there are twice as many, the cheapest go.
    """

    def __init__(self, device_type: str, max_lines: int) -> None:
        self.device_type = device_type
        self._max_lines = max_lines
        self._lock = threading.Lock()
        self._tallies: dict[SyncPlace, Tally] = {}
        self._rest = Tally()
        self._last: SyncPlace | None = None

    def is_repeated(self, place: SyncPlace) -> bool:
        """Whether this is the second half of ``x.cpu().numpy()`` on a machine without CUDA."""
        last, self._last = self._last, place
        if self.device_type != "cpu" or last is None or place.kind not in _AFTER_CPU:
            return False
        return last == place._replace(kind="cpu")

    def add(self, place: SyncPlace, milliseconds: float | None) -> bool:
        """Count a wait; return whether it is the first at its place."""
        with self._lock:
            tally = self._tallies.get(place)
            if is_new := tally is None:
                tally = self._tallies[place] = Tally()
            assert tally is not None  # for mypy
            tally.count += 1
            if milliseconds is not None:
                tally.num_timed += 1
                tally.total_ms += milliseconds
                tally.max_ms = max(tally.max_ms, milliseconds)
            if len(self._tallies) >= 2 * self._max_lines:
                self._prune()
        return is_new

    def report(self) -> SyncReport:
        """Return what has been counted."""
        with self._lock:
            places = self._sorted()
            left_out = places[self._max_lines :]
            return SyncReport(
                syncs=tuple(row_of(p, self._tallies[p]) for p in places[: self._max_lines]),
                device_type=self.device_type,
                num_left_out=self._rest.count + sum(self._tallies[p].count for p in left_out),
                left_out_ms=self._rest.total_ms + sum(self._tallies[p].total_ms for p in left_out),
            )

    def clear(self) -> None:
        """Begin anew."""
        with self._lock:
            self._tallies, self._rest, self._last = {}, Tally(), None

    def _sorted(self) -> list[SyncPlace]:
        # On the CPU nothing waits, so the time says nothing.
        def cost(place: SyncPlace) -> tuple[float, int]:
            tally = self._tallies[place]
            return (tally.total_ms if self.device_type == "cuda" else 0.0, tally.count)

        return sorted(self._tallies, key=cost, reverse=True)

    def _prune(self) -> None:
        for place in self._sorted()[self._max_lines :]:
            tally = self._tallies.pop(place)
            self._rest.count += tally.count
            self._rest.total_ms += tally.total_ms
