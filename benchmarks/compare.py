"""Is the code faster or slower than before? Two result files of ``yardstick.py`` say.

    PYTHONPATH=. python benchmarks/compare.py BEFORE.json AFTER.json
        [--smallest 0.03] [--methods REGEX] [--workloads REGEX] [--reference METHOD]

**What is compared.** Two runs see different machine speeds, so milliseconds of one run say nothing
about another. A method's figure is its floor relative to the reference method's floor in the same
run. A neighbour on the machine only ever adds time, to some blocks and not to others; blocks that
nobody disturbs lie within half a per cent of what the code needs. So the floor is the mean of the
lowest quarter of ``best_ms``, the best bursts of the blocks. The minimum hangs on one block and
errs by half as much again; the median is lost where nearly half of the blocks are slow. The
reference's own milliseconds are shown, and nothing is concluded from them. A reference that waits
for the host tells little about a method that waits for the device: on a machine whose host is busy,
choose ``--reference "by hand: graph"`` for methods that are captured.

**The change** is the quotient of the two figures. Its bounds are at 95 %, by the jackknife: how far
the figure moves when one round is left out, block and reference block together. Rounds do not show
that processes of the same code differ, by where their memory lies, with one factor for all blocks
of a process. The bounds allow for that too, but only for `PROCESS_BIAS`, 0.2 %.

**The verdict**, with ``--smallest`` the smallest change that matters:

- "slower" if the lower bound is above 1 + smallest/3, "faster" if the upper is below
  1 - smallest/3. Not 1: runs of the same code differ by more than is allowed for now and then;
- else "no difference" if both bounds lie within 1 ± smallest;
- else "cannot tell": more rounds or a quieter machine would.

**How often it is right**, simulated; slow blocks are 5 % slow in the median, with a long tail, and
other blocks have noise of 0.5 % (0.3 % where none is slow):

    slow blocks   processes differ by   rounds   same code: "no difference"   3 % more: "slower"
    none          0                     20       all                          all
    20 %          0.2 %                 20       99 %                         97 %
    40 %          0.2 %                 20       97 %                         94 %
    40 %          0.2 %                 30       99 %                         97 %
    any           0.3 %                 30       98 %                         97 %
    any           0.5 %                 30       96 %, else mostly wrong      90 %

At least so often, that is. A slowdown that is missed at 0.5 % is called "no difference". So one
process a method is enough up to 0.3 %. Beyond, no number of rounds helps: measure a surprising row
again, by new processes, before you believe it, and expect one in a table of many rows. Where all
rows of a workload move together, it is the reference that moved.

**What a floor does not show**: what happens between the best bursts, or in some blocks only. If the
middle third of ``blocks_ms``, relative to the reference's, grew by more than the floor did, by the
rule of "slower", a note says so. It is no regression: a busier machine does the same where it
disturbs one method more than another. What comes in fewer than half of the blocks shows in neither.
And where undisturbed blocks of one method scatter more than before, its floor is lower, by 1.3
times what their standard deviation grew by.

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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from benchmarks.result_file import ComparisonError, ResultFile, Round

REFERENCE = "tuned"
COVERAGE = 0.95
# By what part the floors of two processes of the same code differ: a standard deviation.
PROCESS_BIAS = 0.002
# What two files may differ in without a method's relative time meaning something else.
MAY_DIFFER = {"rounds", "cold_start_limit_s"}
WORKLOAD_KEYS = ("unit", "items_per_step", "num_parameters", "precision")
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


def relative_floor(rounds: list[Round]) -> float:
    """Return the least time of a method relative to that of the reference."""
    return _lowest([r.best_ms for r in rounds]) / _lowest([r.reference_best_ms for r in rounds])


def stalls(rounds: list[Round]) -> float:
    """Return how much farther above its floor a method usually is than the reference."""
    usual = _middle([r.ms for r in rounds]) / _middle([r.reference_ms for r in rounds])
    return usual / relative_floor(rounds)


def _lowest(times: list[float]) -> float:
    return statistics.fmean(sorted(times)[: math.ceil(len(times) / 4)])


def _middle(times: list[float]) -> float:
    """Return a median that the jackknife is right for, being smooth: the middle third's mean."""
    third = len(times) // 3
    return statistics.fmean(sorted(times)[third : len(times) - third])


def bounds_of(
    before: list[Round],
    after: list[Round],
    figure: Callable[[list[Round]], float] = relative_floor,
) -> Bounds:
    """Return the change of a figure from before to after, with bounds."""
    change = figure(after) / figure(before)
    variance = _variance(before, figure) + _variance(after, figure) + 2 * PROCESS_BIAS**2
    margin = _student(min(len(before), len(after)) - 1) * math.sqrt(variance)
    return Bounds(change, change * math.exp(-margin), change * math.exp(margin))


def _variance(rounds: list[Round], figure: Callable[[list[Round]], float]) -> float:
    """Return the variance of the logarithm of a figure, by the jackknife."""
    without_one = [
        math.log(figure(rounds[:left_out] + rounds[left_out + 1 :]))
        for left_out in range(len(rounds))
    ]
    return (len(rounds) - 1) * statistics.pvariance(without_one)


def _student(freedom: int) -> float:
    """Return Student's quantile of `COVERAGE` on both sides, by the expansion of its inverse."""
    z = statistics.NormalDist().inv_cdf((1 + COVERAGE) / 2)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


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
    reference: str = REFERENCE,
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
            _compare_method(before, after, workload, method, reference, smallest, found)
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
    reference: str,
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
    against = None if reference == REFERENCE else reference
    first, second = (file.rounds(workload, method, against) for file in (before, after))
    if method == reference:
        milliseconds = [
            f"{statistics.median(r.ms for r in rounds):.4g} ms ({file.machine()})"
            for rounds, file in ((first, before), (second, after))
        ]
        found.references.append(f"{name}: {' before, '.join(milliseconds)} after")
        return
    bounds = bounds_of(first, second)
    floors = relative_floor(first), relative_floor(second)
    found.rows.append(Row(workload, method, *floors, bounds, verdict_of(bounds, smallest)))
    stalled = bounds_of(first, second, stalls)
    if verdict_of(stalled, smallest) == "slower":
        found.notes.append(
            f"{name}: blocks usually take {stalled.change - 1:.0%} longer than the floors say: "
            "stalls that the floor does not show, or a busier machine"
        )


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


def report(found: Comparison, smallest: float, reference: str = REFERENCE) -> str:
    """Return the comparison as text."""
    lines = [
        f"{'workload':22} {'method':34} {'before':>8} {'after':>8} {'change':>7}  "
        f"{'bounds':15} verdict (times are relative to {reference!r})"
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
    parser.add_argument("--reference", default=REFERENCE, metavar="METHOD")
    args = parser.parse_args(arguments)
    try:
        found = compare(
            ResultFile(args.before),
            ResultFile(args.after),
            smallest=args.smallest,
            methods=args.methods,
            workloads=args.workloads,
            reference=args.reference,
        )
    except ComparisonError as error:
        print(f"compare.py: {error}", file=sys.stderr)
        return 2
    print(report(found, args.smallest, args.reference))
    return found.status


if __name__ == "__main__":
    sys.exit(main())
