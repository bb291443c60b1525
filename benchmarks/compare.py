"""Is the code faster or slower than before? Two result files of ``yardstick.py`` say.

    PYTHONPATH=. python benchmarks/compare.py BEFORE.json AFTER.json
        [--smallest 0.03] [--methods REGEX] [--workloads REGEX]

**What is compared.** Two runs see different machine speeds, so milliseconds of one run say nothing
about another. A method's figure is its time relative to the reference method in the same round of
the same run: ``best_ms[i] / reference_best_ms[i]``. The best burst of a block is the code's own
time, since a busy neighbour only ever adds to it; what a step does now and then, it does not show:
for that, see the medians. The reference itself would be 1 in both files; its milliseconds are shown
with both machines, and nothing is concluded from them.

**The change** is the median of the quotients of every round after by every round before
(Hodges-Lehmann), and its bounds are the k-th quotients from either end, k from the exact
distribution of the rank sum. They hold the true change with at least 95 %, whatever the
distribution of the noise, if it is the same in both runs and rounds are independent. Dividing the
bounds of one median by those of the other would claim much more than 95 %, so be wider, and would
say "cannot tell" where the rounds do tell. An outlier moves one rank, however far it lies.

**The verdict**, with ``--smallest`` the smallest change that matters:

- "slower" if the lower bound is above 1 + smallest/3, "faster" if the upper is below
  1 - smallest/3. Not 1: runs of the same code differ by more than their rounds do (clocks, memory
  layout, chosen kernels), and no number of rounds tells that from a change of the code. A third of
  3 % is what two runs, each up to 0.5 % off, differ by at most;
- else "no difference" if both bounds lie within 1 ± smallest;
- else "cannot tell": more rounds or a quieter machine would.

Simulated with 20 rounds, blocks with log-normal noise of 0.5 %, every fiftieth of them 10 % slow,
and each run off by up to 0.5 %: the same code twice is "no difference" in at least 99 of 100
comparisons, and 3 % more time is "slower" in at least 98 of 100. With noise of 1 % that takes 40
rounds. ``tests/test_compare.py`` repeats the simulation. In a table of many rows expect a false
alarm now and then: run a surprising row again. Where all rows of a workload move together, it is
the reference that moved.

**Also a regression**: a method that ran and does not, or trained and does not; over 1 % more peak
memory; over half a host sync or launch more per step.

The exit status is 0 without a regression, 1 with one, and 2 if some row cannot be told or the files
do not match.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

from benchmarks.result_file import ComparisonError, ResultFile

REFERENCE = "tuned"
COVERAGE = 0.95
# What two files may differ in without a method's relative time meaning something else.
MAY_DIFFER = {"rounds", "cold_start_limit_s"}
WORKLOAD_KEYS = ("unit", "items_per_step", "num_parameters", "batch_bytes", "precision")
# Growth of a count per step, and of peak memory in parts, that is more than chance.
MOST_COUNT_GROWTH = 0.5
MOST_MEMORY_GROWTH = 0.01


class Bounds(NamedTuple):
    """A change, and what it lies between."""

    change: float
    low: float
    high: float


@dataclass(frozen=True)
class Row:
    """The change of one method on one workload."""

    workload: str
    method: str
    before: float
    after: float
    bounds: Bounds
    verdict: str


@dataclass
class Comparison:
    """Everything that two files say about each other."""

    rows: list[Row] = field(default_factory=list)
    references: list[str] = field(default_factory=list)
    regressions: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)

    @property
    def status(self) -> int:
        """Return the exit status."""
        verdicts = {row.verdict for row in self.rows}
        if self.regressions or "slower" in verdicts:
            return 1
        return 2 if self.mismatches or "cannot tell" in verdicts else 0


# -- Statistics ------------------------------------------------------------------------------------


def bounds_of(before: list[float], after: list[float]) -> Bounds:
    """Return the change from before to after, with bounds of at least 95 %."""
    quotients = sorted(a / b for a in after for b in before)
    left_out = _left_out(len(before), len(after))
    return Bounds(
        statistics.median(quotients), quotients[left_out], quotients[len(quotients) - 1 - left_out]
    )


@cache
def _left_out(num_before: int, num_after: int) -> int:
    """Return how many quotients lie beyond the bounds, at either end."""
    # The number of quotients above the true change has the distribution of Mann and Whitney's U,
    # whose counts are the coefficients of a Gaussian binomial.
    size = num_before * num_after
    counts = [1] + [0] * size
    for i in range(1, num_after + 1):
        for u in range(size, num_before + i - 1, -1):
            counts[u] -= counts[u - num_before - i]
        for u in range(i, size + 1):
            counts[u] += counts[u - i]
    allowed = math.comb(num_before + num_after, num_after) * (1 - COVERAGE) / 2
    cumulated, left_out = counts[0], 0
    while cumulated + counts[left_out + 1] <= allowed:
        left_out += 1
        cumulated += counts[left_out]
    return left_out


def verdict_of(bounds: Bounds, smallest: float) -> str:
    """Return what the bounds of a change allow to say."""
    if bounds.low > 1 + smallest / 3:
        return "slower"
    if bounds.high < 1 - smallest / 3:
        return "faster"
    if bounds.low >= 1 - smallest and bounds.high <= 1 + smallest:
        return "no difference"
    return "cannot tell"


# -- The comparison --------------------------------------------------------------------------------


def compare(
    before: ResultFile,
    after: ResultFile,
    *,
    smallest: float = 0.03,
    methods: str = "",
    workloads: str = "",
) -> Comparison:
    """Compare all methods and workloads whose names match the regular expressions.

    Raises:
        ComparisonError: A file is malformed or too short, or the settings of the two differ.
    """
    _check_settings(before, after)
    found = Comparison()
    for workload in _common(before, after, ("workloads",), workloads, found):
        differing = _differing(before, after, ("workloads", workload), WORKLOAD_KEYS)
        if differing:
            found.mismatches.append(f"{workload} is not the same workload: {differing}")
            continue
        for method in _common(before, after, ("workloads", workload, "methods"), methods, found):
            _compare_method(before, after, workload, method, smallest, found)
    if not (found.rows or found.references or found.regressions or found.mismatches):
        raise ComparisonError(
            f"{before.path}, {after.path}: nothing to compare; "
            "choose other --methods or --workloads"
        )
    found.rows.sort(key=lambda row: row.bounds.change, reverse=True)
    return found


def _check_settings(before: ResultFile, after: ResultFile) -> None:
    keys = {*before.get("settings", kind=dict), *after.get("settings", kind=dict)} - MAY_DIFFER
    differing = _differing(before, after, ("settings",), sorted(keys))
    if differing:
        raise ComparisonError(
            f"{before.path} and {after.path} were measured with different settings: {differing}; "
            "measure both with the same"
        )


def _differing(
    before: ResultFile, after: ResultFile, place: tuple[str, ...], keys: Iterable[str]
) -> str:
    """Return in words which of these keys differ."""
    old, new = before.get(*place, kind=dict), after.get(*place, kind=dict)
    return ", ".join(
        f"{key} {old.get(key)!r} before and {new.get(key)!r} after"
        for key in keys
        if old.get(key) != new.get(key)
    )


def _common(
    before: ResultFile,
    after: ResultFile,
    place: tuple[str, ...],
    pattern: str,
    found: Comparison,
) -> list[str]:
    """Return the matching names that both files have there, and note those that one lacks."""
    old, new = (
        [name for name in file.get(*place, kind=dict) if re.search(pattern, name)]
        for file in (before, after)
    )
    where = " > ".join(place)
    for names, others, file in ((old, new, after), (new, old, before)):
        found.mismatches += [
            f"{file.path} has no {where} > {name}: measure it, or leave it out by "
            "--methods or --workloads"
            for name in names
            if name not in others
        ]
    return [name for name in old if name in new]


def _compare_method(
    before: ResultFile,
    after: ResultFile,
    workload: str,
    method: str,
    smallest: float,
    found: Comparison,
) -> None:
    place = ("workloads", workload, "methods", method)
    statuses = [file.get(*place, "status", kind=str) for file in (before, after)]
    name = f"{workload}, {method}"
    if statuses != ["ran", "ran"]:
        reason = after.get(*place, kind=dict).get("reason", "no reason given")
        if statuses[0] == "ran":
            found.regressions.append(f"{name}: ran before, now {statuses[1]!r} ({reason})")
        elif statuses[1] == "ran":
            found.notes.append(f"{name}: runs now, before {statuses[0]!r}")
        return
    found.regressions += [f"{name}: {growth}" for growth in _growths(before, after, place)]
    if before.get(*place, "trains", kind=bool) and not after.get(*place, "trains", kind=bool):
        found.regressions.append(f"{name}: trained before and does not now")
    first, second = before.ratios(workload, method), after.ratios(workload, method)
    if method == REFERENCE:
        milliseconds = [
            f"{statistics.median(file.get(*place, 'blocks_ms', kind=list)):.4g} ms "
            f"({file.machine()})"
            for file in (before, after)
        ]
        found.references.append(f"{name}: {' before, '.join(milliseconds)} after")
        return
    bounds = bounds_of(first, second)
    medians = statistics.median(first), statistics.median(second)
    verdict = verdict_of(bounds, smallest)
    found.rows.append(Row(workload, method, *medians, bounds, verdict))


def _growths(before: ResultFile, after: ResultFile, place: tuple[str, ...]) -> Iterator[str]:
    """Yield what a step needs more of than before."""
    number = (int, float, type(None))  # None: a CPU, or no trace
    for key in ("host_syncs", "num_launches"):
        old, new = before.get(*place, key, kind=number), after.get(*place, key, kind=number)
        if old is not None and new is not None and new - old > MOST_COUNT_GROWTH:
            yield f"{key} a step {old:.1f} before, {new:.1f} after"
    old, new = (file.get(*place, "peak_bytes", kind=number) for file in (before, after))
    if old and new and new / old > 1 + MOST_MEMORY_GROWTH:
        yield f"peak_bytes {old / 1e9:.3f} GB before, {new / 1e9:.3f} GB after"


# -- The door --------------------------------------------------------------------------------------


def report(found: Comparison, smallest: float) -> str:
    """Return the comparison as text."""
    lines = [
        f"{'workload':22} {'method':34} {'before':>8} {'after':>8} {'change':>7}  "
        f"{'bounds':15} verdict (times are relative to {REFERENCE!r})"
    ]
    lines += [
        f"{row.workload:22} {row.method:34} {row.before:8.4f} {row.after:8.4f} "
        f"{row.bounds.change:7.4f}  {row.bounds.low:.4f}-{row.bounds.high:.4f}   {row.verdict}"
        for row in found.rows
    ]
    for title, entries in (
        ("Absolute, for orientation", found.references),
        ("Regression", found.regressions),
        ("Note", found.notes),
        ("Does not match", found.mismatches),
    ):
        lines += [f"{title}: {entry}" for entry in entries]
    if any(row.verdict == "cannot tell" for row in found.rows):
        lines.append(
            f"Cannot tell: measure more rounds, or on a quieter machine, for {smallest:.1%}"
        )
    return "\n".join(lines)


def _part(text: str) -> float:
    if not 0 < float(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a part between 0 and 1, such as 0.03")
    return float(text)


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from error
    return text


def main(arguments: list[str] | None = None) -> int:
    """Compare two files, print the table and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--smallest", type=_part, default=0.03, help="smallest change that matters")
    parser.add_argument("--methods", type=_pattern, default="", metavar="REGEX")
    parser.add_argument("--workloads", type=_pattern, default="", metavar="REGEX")
    args = parser.parse_args(arguments)
    try:
        found = compare(
            ResultFile(args.before),
            ResultFile(args.after),
            smallest=args.smallest,
            methods=args.methods,
            workloads=args.workloads,
        )
    except ComparisonError as error:
        print(f"compare.py: {error}", file=sys.stderr)
        return 2
    print(report(found, args.smallest))
    return found.status


if __name__ == "__main__":
    sys.exit(main())
