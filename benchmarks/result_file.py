"""A result file of ``yardstick.py``; what is wrong with it is named, with key and remedy."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

# The fewest rounds in each of two files from which bounds of 95 % can be had.
MIN_ROUNDS = 4


class Round(NamedTuple):
    """The turns of a method and of the reference in one round: whole blocks and best bursts."""

    ms: float
    reference_ms: float
    best_ms: float
    reference_best_ms: float


class ComparisonError(Exception):
    """Files that cannot be compared: which file, which key, what to do."""


class ResultFile:
    """A result file, whose every missing or wrong value is an error that names it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.content = json.loads(path.read_text())
        except OSError as error:
            raise ComparisonError(f"{path}: {error.strerror}; name a result file") from error
        except ValueError as error:
            raise ComparisonError(
                f"{path}: not JSON ({error}); write it again with benchmarks/yardstick.py"
            ) from error

    def get(self, *keys: str, kind: type | tuple[type, ...]) -> Any:
        """Return the value under these keys, of this kind."""
        value = self.content
        for key in keys:
            if not isinstance(value, dict) or key not in value:
                self.fail(*keys, problem="missing")
            value = value[key]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            self.fail(*keys, problem=f"got {value!r}")
        return value

    def fail(self, *keys: str, problem: str) -> NoReturn:
        """Raise for the value under these keys."""
        raise ComparisonError(
            f"{self.path}: {' > '.join(keys)}: {problem}; "
            "the file is not whole: write it again with benchmarks/yardstick.py"
        )

    def machine(self) -> str:
        """Return the machine in words."""
        machine = self.get("machine", kind=dict)
        return f"{machine.get('gpu') or 'CPU'}, torch {machine.get('torch')}"

    def rounds(self, workload: str, method: str, reference: str | None = None) -> list[Round]:
        """Return the times of a method and of the reference, round by round.

        Args:
            workload: Its name.
            method: Its name.
            reference: A method that took its turns in the same rounds; None: the file's own.
        """
        place = ("workloads", workload, "methods", method)
        best = self._times(*place, "best_ms")
        against = place if reference is None else (*place[:-1], reference)
        if reference is not None and self._run(*against) != self._run(*place):
            self.fail(*against, problem=f"was measured in another run than {method!r}")
        prefix = "reference_" if reference is None else ""
        columns = []
        for keys in (
            (*place, "blocks_ms"),
            (*against, f"{prefix}blocks_ms"),
            (*place, "best_ms"),
            (*against, f"{prefix}best_ms"),
        ):
            column = self._times(*keys)
            if len(column) != len(best):
                problem = f"{len(column)} rounds where best_ms of {method!r} has {len(best)}"
                self.fail(*keys, problem=problem)
            columns.append(column)
        if len(best) < MIN_ROUNDS:
            raise ComparisonError(
                f"{self.path}: {' > '.join(place)} > best_ms: {len(best)} rounds give no bounds "
                f"of 95 %; measure at least {MIN_ROUNDS} rounds, better 30"
            )
        return [Round(*times) for times in zip(*columns, strict=True)]

    def _run(self, *place: str) -> object:
        return self.get(*place, kind=dict).get("run")

    def _times(self, *keys: str) -> list[float]:
        times: list[float] = self.get(*keys, kind=list)
        wrong = [t for t in times if not isinstance(t, int | float) or not 0 < t < math.inf]
        if wrong:
            self.fail(*keys, problem=f"{wrong[0]!r} is no time")
        return times
