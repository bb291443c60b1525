"""Which of several ways to do the same work is faster: interleaved timing within a budget.

A machine changes its speed while one looks: clocks, neighbours, heat. Times that were taken one
after the other compare two moments; so here every way has its turn in every round, in random
order, and what is compared is the quotient of two times of one round.

**A block** is what is timed: so many units of work that neither the resolution of the clock nor
the wait for the device at its end matters. The device is drained before and after, one unit comes
before the watch is started, and Python collects no garbage meanwhile.

**The interval** of a ratio is that of the median of the quotients, at 99 %. From `_RANKED` rounds
on it is made of ranks alone, so that a block which a neighbour made ten times as long weighs as
much as one that is a little slow. Fewer rounds, of long steps, have Student's interval of the
logarithms.

**The verdict**, with ``smallest`` the smallest difference that matters: "slower" if the interval is
above 1 + smallest/3, "faster" if it is below 1 - smallest/3, else "no difference" if it lies within
1 ± smallest, else "cannot tell". Rounds go on until nothing is untold, the budget is used up or
there were `MOST_ROUNDS`, but at least as many as are asked for. They are looked at only after
certain numbers of rounds, since who looks often enough sees a difference in anything.

It does not help where the work itself differs from call to call, or where one way slows the other
down by what it leaves behind. A unit that hangs is not bounded here.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Final, Literal, final

import torch

from torchfast._core.arguments import check_callable, check_choice, check_positive
from torchfast._core.device import drain

Verdict = Literal["faster", "slower", "no difference", "cannot tell"]
Stopwatch = Callable[[Callable[[], object], int], float]

COVERAGE: Final = 0.99
MOST_ROUNDS: Final = 40
# After which rounds it is asked whether everything is told.
_LOOKS: Final = (8, 12, 18, 27, MOST_ROUNDS)
# The first number of rounds whose least and largest quotient bound the median at COVERAGE.
_RANKED: Final = 8
# Student's quantile of COVERAGE on both sides, by degrees of freedom.
_STUDENT: Final = {2: 9.925, 3: 5.841, 4: 4.604, 5: 4.032, 6: 3.707}
# Few quotients agree by chance; no machine repeats itself better than that.
_LEAST_DEVIATION: Final = 0.002
# A block is so many times what reading the clock and draining the device take.
_TIMES_OVERHEAD: Final = 1000
_SHORTEST_BLOCK_S: Final = 0.02
_LONGEST_BLOCK_S: Final = 0.25
_MOST_UNITS: Final = 10_000
# Blocks are made shorter before there are fewer rounds than this in the budget.
_WANTED_ROUNDS: Final = 12


@final
@dataclass(frozen=True, kw_only=True)
class Timing:
    """What a unit of one way takes: the median over blocks, and the quartiles."""

    median_ms: float
    low_ms: float
    high_ms: float
    num_blocks: int
    units_per_block: int


@final
@dataclass(frozen=True, kw_only=True)
class Ratio:
    """The time of one way over that of another, below 1 where it is faster.

    Attributes:
        ratio: The median over rounds; NaN without a round.
        low: The interval's lower bound at `COVERAGE`, 0 where there is none.
        high: The upper one, infinity where there is none.
        verdict: What the interval allows to say.
        num_rounds: The rounds in which both had a block.
    """

    ratio: float
    low: float
    high: float
    verdict: Verdict
    num_rounds: int


@final
@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The blocks of each round, in milliseconds a unit, and what they say.

    Attributes:
        reference: The way that the others are compared with.
        rounds: Times by name; the last round may lack some.
        units: How many units a block of each has.
        failed: Why a way was left out from some round on, by name.
        smallest: The smallest difference that matters.
        elapsed_s: What all of it took.
        ended_by: ``"told"``, ``"budget"`` or ``"rounds"``.
    """

    reference: str
    rounds: tuple[Mapping[str, float], ...]
    units: Mapping[str, int]
    failed: Mapping[str, str]
    smallest: float
    elapsed_s: float
    ended_by: Literal["told", "budget", "rounds"]

    def timing(self, name: str) -> Timing | None:
        """Return the milliseconds of one way; None if it had no block."""
        times = [r[name] for r in self.rounds if name in r]
        if not times:
            return None
        low, middle, high = (
            statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
        )
        return Timing(
            median_ms=middle,
            low_ms=low,
            high_ms=high,
            num_blocks=len(times),
            units_per_block=self.units[name],
        )

    def ratio(self, name: str, to: str | None = None) -> Ratio:
        """Return how one way compares with another, the reference by default."""
        other = self.reference if to is None else to
        both = [r for r in self.rounds if name in r and other in r]
        return ratio_of([r[name] for r in both], [r[other] for r in both], self.smallest)


def ratio_of(times: list[float], reference: list[float], smallest: float) -> Ratio:
    """Compare times with those of a reference, paired by round.

    Example:
        >>> ratio_of([1.0] * 8, [2.0] * 8, smallest=0.02).verdict
        'faster'
    """
    logs = sorted(math.log(a / b) for a, b in zip(times, reference, strict=True))
    if not logs:
        return Ratio(ratio=math.nan, low=0.0, high=math.inf, verdict="cannot tell", num_rounds=0)
    middle = statistics.median(logs)
    low, high = _interval(logs)
    bounds = math.exp(low), math.exp(high)
    return Ratio(
        ratio=math.exp(middle),
        low=bounds[0],
        high=bounds[1],
        verdict=_verdict(*bounds, smallest),
        num_rounds=len(logs),
    )


def _interval(logs: list[float]) -> tuple[float, float]:
    """Return the bounds of the median of sorted values, at `COVERAGE`."""
    count = len(logs)
    if count >= _RANKED:
        rank = _rank(count)
        return logs[rank], logs[count - 1 - rank]
    if count - 1 not in _STUDENT:
        return -math.inf, math.inf
    deviation = max(statistics.stdev(logs), _LEAST_DEVIATION) / math.sqrt(count)
    margin = _STUDENT[count - 1] * deviation
    middle = statistics.fmean(logs)
    return middle - margin, middle + margin


def _rank(count: int) -> int:
    """Return how many values may be cut off at each end so that the rest covers the median."""
    cut, below = 0, 0.5**count
    while True:
        below += math.comb(count, cut + 1) * 0.5**count
        if 2 * below > 1 - COVERAGE:
            return cut
        cut += 1


def _verdict(low: float, high: float, smallest: float) -> Verdict:
    if low > 1 + smallest / 3:
        return "slower"
    if high < 1 - smallest / 3:
        return "faster"
    if low >= 1 - smallest and high <= 1 + smallest:
        return "no difference"
    return "cannot tell"


def measure(
    works: Mapping[str, Callable[[], object]],
    *,
    reference: str,
    device: torch.device,
    budget_s: float,
    smallest: float = 0.02,
    least_rounds: int = 0,
    around: Callable[[str], AbstractContextManager[object]] | None = None,
    clock: Callable[[], float] = time.perf_counter,
    synchronize: Callable[[], None] | None = None,
    stopwatch: Stopwatch | None = None,
    seed: int = 0,
) -> Measurement:
    """Time several ways to do the same work, in turns, until it is told which are faster.

    Args:
        works: What does one unit of the work, by name. A way that raises is left out from there
            on; if it is the reference, the error is raised.
        reference: The name of the one that the others are compared with.
        device: Where the work is done.
        budget_s: When to end. It is kept as far as units take what they took before.
        smallest: The smallest difference that matters, as a part.
        least_rounds: So many rounds there are whatever the budget is: of long units.
        around: A context for each block and for the warm-up, by name: what has to be put in force
            first. Neither entering nor leaving it is timed.
        clock: Seconds.
        synchronize: What waits for the device; `drain` by default.
        stopwatch: What runs so many units of a way and returns their seconds; by default ``clock``
            around all of them. It waits for the device at its end. What it does between the units
            counts for the budget and not for the times.
        seed: Of the order in the rounds; no global generator is drawn from.

    Raises:
        ValueError: ``reference`` is not among ``works``, or a number is not above zero.

    Synchronizes: Before and after each block.

    Example:
        >>> import torch
        >>> x = torch.ones(256, 256)
        >>> works = {"once": lambda: x @ x, "four times": lambda: x @ x @ x @ x @ x}
        >>> cpu = torch.device("cpu")
        >>> measurement = measure(works, reference="once", device=cpu, budget_s=2.0)
        >>> measurement.ratio("four times").verdict
        'slower'
    """
    check_choice("reference", reference, works)
    check_positive("budget_s", budget_s)
    check_positive("smallest", smallest)
    for name, work in works.items():
        check_callable(f"works[{name!r}]", work, "work()")
    session = _Session(
        works,
        reference,
        budget_s,
        smallest,
        least_rounds,
        around if around is not None else lambda _: nullcontext(),
        clock,
        synchronize if synchronize is not None else lambda: drain(device),
        stopwatch,
    )
    return session.run(random.Random(seed))


class _OverBudgetError(Exception):
    """The next block does not fit into what is left."""


class _Session:
    """One call of `measure`."""

    def __init__(
        self,
        works: Mapping[str, Callable[[], object]],
        reference: str,
        budget_s: float,
        smallest: float,
        least_rounds: int,
        around: Callable[[str], AbstractContextManager[object]],
        clock: Callable[[], float],
        synchronize: Callable[[], None],
        stopwatch: Stopwatch | None,
    ) -> None:
        self._works = dict(works)
        self._reference = reference
        self._smallest = smallest
        self._least_rounds = least_rounds
        self._around = around
        self._clock = clock
        self._synchronize = synchronize
        self._stopwatch = stopwatch if stopwatch is not None else self._by_clock
        self._started = clock()
        self._deadline = self._started + budget_s
        self._failed: dict[str, str] = {}
        self._unit_s: dict[str, float] = {}
        self._units: dict[str, int] = {}
        # What a turn took, with its lead and what is put in force for it.
        self._turn_s: dict[str, float] = {}
        self._rounds: list[dict[str, float]] = []

    def run(self, order: random.Random) -> Measurement:
        ended_by: Literal["told", "budget", "rounds"] = "rounds"
        try:
            for name in [*self._works]:
                self._guarded(name, self._warm_up)
            self._size_blocks()
            while len(self._rounds) < MOST_ROUNDS:
                names = [*self._works]
                order.shuffle(names)
                self._rounds.append({})
                for name in names:
                    self._guarded(name, self._block)
                if len(self._rounds) in _LOOKS and self._is_told():
                    ended_by = "told"
                    break
        except _OverBudgetError:
            ended_by = "budget"
        return self._so_far(ended_by)

    def _guarded(self, name: str, turn: Callable[[str], None]) -> None:
        is_late = self._clock() + self._turn_s.get(name, 0.0) > self._deadline
        num_complete = max(0, len(self._rounds) - 1)
        if is_late and num_complete >= self._least_rounds:
            raise _OverBudgetError
        started = self._clock()
        try:
            with self._around(name):
                turn(name)
        except Exception as error:
            if name == self._reference:
                raise
            self._failed[name] = first_line(error)
            del self._works[name]
            return
        self._turn_s[name] = self._clock() - started

    def _warm_up(self, name: str) -> None:
        """Run units until one was timed that had others before it."""
        times = []
        for _ in range(3):
            self._synchronize()
            started = self._clock()
            self._stopwatch(self._works[name], 1)
            times.append(self._clock() - started)
            is_long = times[-1] > _LONGEST_BLOCK_S or self._clock() + times[-1] > self._deadline
            if len(times) == 2 and is_long:
                break
        self._unit_s[name] = min(times[1:])

    def _size_blocks(self) -> None:
        overhead = self._overhead_s()
        longest = (self._deadline - self._clock()) / (_WANTED_ROUNDS * max(1, len(self._works)))
        block_s = min(max(_TIMES_OVERHEAD * overhead, _SHORTEST_BLOCK_S), _LONGEST_BLOCK_S, longest)
        for name in self._works:
            unit_s = max(self._unit_s[name], 1e-9)
            self._units[name] = max(1, min(_MOST_UNITS, round(block_s / unit_s)))
            self._turn_s[name] = unit_s * (self._units[name] + self._lead(name))

    def _overhead_s(self) -> float:
        """Return what it takes to read the clock and to wait for a device that is idle."""
        times = []
        for _ in range(5):
            started = self._clock()
            self._synchronize()
            times.append(self._clock() - started)
        return max(0.0, min(times))

    def _lead(self, name: str) -> int:
        # A unit that is a block by itself is long enough for its start not to matter.
        return int(self._units[name] > 1)

    def _block(self, name: str) -> None:
        work, units = self._works[name], self._units[name]
        with _no_collection():
            for _ in range(self._lead(name)):
                work()
            self._synchronize()
            elapsed = self._stopwatch(work, units)
        # A clock that has not moved would divide by zero.
        self._rounds[-1][name] = max(elapsed, 1e-9) / units * 1e3

    def _by_clock(self, work: Callable[[], object], units: int) -> float:
        started = self._clock()
        for _ in range(units):
            work()
        self._synchronize()
        return self._clock() - started

    def _is_told(self) -> bool:
        """Whether each way is told from the reference and from the fastest, or from neither."""
        now = self._so_far("rounds")
        timings = {name: now.timing(name) for name in self._works}
        fastest = min(timings, key=lambda n: t.median_ms if (t := timings[n]) else math.inf)
        return all(
            now.ratio(name, to=other).verdict != "cannot tell"
            for other in {self._reference, fastest}
            for name in self._works
            if name != other
        )

    def _so_far(self, ended_by: Literal["told", "budget", "rounds"]) -> Measurement:
        return Measurement(
            reference=self._reference,
            rounds=tuple(r for r in self._rounds if r),
            units=dict(self._units),
            failed=dict(self._failed),
            smallest=self._smallest,
            elapsed_s=self._clock() - self._started,
            ended_by=ended_by,
        )


def first_line(error: BaseException) -> str:
    """Return what an error says, on one line: its type, and the beginning of its message."""
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0]}"[:300]


@contextmanager
def _no_collection() -> Iterator[None]:
    """Let no garbage be collected in a block: whose allocation sets it off is chance."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
