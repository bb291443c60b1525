"""Rows of a result file that several runs fill.

A GPU is had for minutes at a time, and some scripts take longer. A run measures what it is asked
for, and has time for; the rows of earlier ones stay, if they were measured under the same settings
on such a machine. Each row says which run it is from.
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
        expected = {"settings": self._settings}
        found = results.resumed(self._path, expected, ignoring=["commit"]) if self._path else None
        earlier = found or {"rows": []}
        # Rows of a file that one run wrote do not say so each.
        run = {"run": results.run_of(found)} if found else {}
        self._rows: dict[tuple[Any, ...], dict[str, Any]] = {
            self._key(row): {**run, **row} for row in earlier["rows"]
        }
        # By what it is called, so that what is measured later is no longer said to be missing.
        self._left_out: dict[str, str] = {
            text.partition(":")[0]: text for text in earlier.get("left_out", ())
        }
        self._run = results.this_run()

    def add(self, row: dict[str, Any], **others: Any) -> None:
        """Take a row up, in place of an earlier one of its kind, and write the file.

        Args:
            row: What was measured.
            others: What else the file is to hold.
        """
        self._rows[self._key(row)] = {**row, "run": self._run}
        self._left_out.pop(", ".join(map(str, self._key(row)[:2])), None)
        self._write(others)

    def leave_out(self, first: str, second: str, why: str, **others: Any) -> None:
        """Note what was not measured, unless an earlier run has, and write the file."""
        name = f"{first}, {second}"
        if not any([str(part) for part in key[:2]] == [first, second] for key in self._rows):
            self._left_out[name] = f"{name}: {why}"
        self._write(others)

    def _key(self, row: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(row[key] for key in self._identity)

    def _write(self, others: Mapping[str, Any]) -> None:
        if self._path is not None:
            rows, left_out = list(self._rows.values()), list(self._left_out.values())
            figures = {"settings": self._settings, **others, "left_out": left_out, "rows": rows}
            results.write(self._path, figures)
