"""Rows of a result file that several runs fill.

A GPU is had for minutes at a time, and some scripts take longer. A run measures what it is asked
for, and has time for; the rows of other ones stay, if they were measured under the same settings on
such a machine, and though they be written meanwhile. Each row says which run it is from.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import results


class ResultRows:
    """What stands in a file, and what this run measures.

    Args:
        path: The file, if any.
        identity: The keys by which a row is known. The first two also name what was left out.
        settings: How it is measured, which all rows of a file have in common.

    Raises:
        SystemExit: The file is of another machine, or was measured under other settings.
    """

    def __init__(
        self,
        path: Path | None,
        identity: tuple[str, ...],
        settings: Mapping[str, Any],
    ) -> None:
        self._path = path
        self._identity = identity
        self._settings = dict(settings)
        self._run = results.this_run()
        self._own: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._own_left_out: dict[str, str] = {}  # by what was left out
        self._earlier()  # raises now what would raise behind the first measurement

    def add(self, row: dict[str, Any], **others: Any) -> None:
        """Take a row up, in place of an earlier one of its kind, and write the file.

        Args:
            row: What was measured.
            others: What else the file is to hold.
        """
        self._own[self._key(row)] = {**row, "run": self._run}
        self._write(others)

    def leave_out(self, first: str, second: str, why: str, **others: Any) -> None:
        """Note what was not measured, unless an earlier run has, and write the file."""
        name = f"{first}, {second}"
        self._own_left_out[name] = f"{name}: {why}"
        self._write(others)

    def _key(self, row: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(row[key] for key in self._identity)

    def _write(self, others: Mapping[str, Any]) -> None:
        if self._path is None:
            return
        # Anew each time, as another run may write rows of its own meanwhile.
        with results.alone(self._path):
            rows, left_out = self._earlier()
            rows |= self._own
            left_out |= self._own_left_out
            # What is measured by now is no longer said to be missing.
            measured = {", ".join(map(str, key[:2])) for key in rows}
            missing = [text for name, text in left_out.items() if name not in measured]
            every = {"left_out": missing, "rows": list(rows.values())}
            results.write(self._path, {"settings": self._settings, **others, **every})

    def _earlier(self) -> tuple[dict[tuple[Any, ...], dict[str, Any]], dict[str, str]]:
        """Return the rows that stand in the file, and what it says was left out."""
        expected = {"settings": self._settings}
        found = results.resumed(self._path, expected, ignoring=["commit"]) if self._path else None
        if found is None:
            return {}, {}
        # Rows of a file that one run wrote do not say so each.
        run = results.run_of(found)
        rows = {self._key(row): {"run": run, **row} for row in found["rows"]}
        return rows, {text.partition(":")[0]: text for text in found.get("left_out", ())}
