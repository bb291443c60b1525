"""How many workers: measured on the user's own data set.

For each number the loader is drained as fast as it goes, after a warm-up that uses up what was
prefetched, so that what is timed is supply. The numbers take turns, over several rounds: the first
round also reads what was not in the page cache yet, and the median leaves it out.

Nothing of it is left behind. Samples are made in other processes (for 0 workers too, in one with
one thread) wherever that is possible, so that the data set opens no file here that a later fork
would share.
Samplers are copied, random generators, the loader's own too, are put back, and every process is
ended.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, final

import torch
from torch.utils.data import IterableDataset

from torchfast._core.arguments import check_int, check_positive, explain_keywords
from torchfast._core.rng import preserved_rng
from torchfast.data.monitored import MonitoredDataLoader
from torchfast.data.worker_trial import (
    FailedError,
    Trial,
    apart,
    drain_in_child,
    in_a_line,
    owned_processes,
    preserved_generators,
    unadvised_numbers,
)
from torchfast.data.workers import build_dataloader, usable_cores

ROUNDS = 3
# Supply has to exceed demand by so much, since neither is steady. Without workers, loading comes on
# top of the step rather than beside it: then it has to be short against it.
MARGIN, MARGIN_WITHOUT_WORKERS = 1.2, 20.0
LEAST_NOISE, MOST_NOISE = 0.05, 0.25
LEAST_GAIN = 1.1
DAY_S = 86_400.0
MET = "more workers were not tried: the demand is met"
# What is said where samples can be made in the main process only.
NOT_IN_ANOTHER_PROCESS = ("CUDA in forked subprocess", "daemonic processes are not allowed")


@final
@dataclass(frozen=True, kw_only=True)
class WorkerMeasurement:
    """What one number of workers supplied.

    Attributes:
        num_workers: Worker processes.
        batches_per_s: The median over the rounds; None if nothing was measured.
        rounds: Each round's batches per second.
        startup_s: From the start of iterating to the first batch, in the first round.
        error: Why it could not be measured, else None.
    """

    num_workers: int
    batches_per_s: float | None
    rounds: tuple[float, ...]
    startup_s: float | None
    error: str | None

    @property
    def noise(self) -> float:
        """Half the range of the rounds but the first, over their median."""
        later = self.rounds[1:] if len(self.rounds) > 2 else self.rounds
        return (max(later) - min(later)) / 2 / statistics.median(later) if later else 0.0


@final
@dataclass(frozen=True, kw_only=True)
class WorkerSweep:
    """The outcome of `sweep_workers`; ``str`` gives it as a table.

    Attributes:
        num_workers: The number to take.
        reason: Why.
        measurements: One for each number that was tried, in ascending order.
        demand: Batches per second that training consumes, if it was given.
        cores: Cores that this process may use.
        elapsed_s: What the sweep took.
        notes: What else is to be known of the figures.
    """

    num_workers: int
    reason: str
    measurements: tuple[WorkerMeasurement, ...]
    demand: float | None
    cores: int
    elapsed_s: float
    notes: tuple[str, ...] = ()

    @property
    def batches_per_s(self) -> float | None:
        """What the chosen number supplied; None if nothing could be measured."""
        return next(
            (m.batches_per_s for m in self.measurements if m.num_workers == self.num_workers), None
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the outcome as JSON-ready builtins."""
        found = asdict(self)
        return {**found, "notes": list(self.notes), "measurements": list(found["measurements"])}

    def __str__(self) -> str:
        """Return the table, the choice and the notes as lines for a person."""
        lines = ["workers  batches/s  noise  first batch"]
        for m in self.measurements:
            if m.batches_per_s is None:
                # The first clause; the rest of an error is what to do about it.
                lines.append(f"{m.num_workers:>7}  failed: {(m.error or '').partition(';')[0]}")
                continue
            mark = "  <- chosen" if m.num_workers == self.num_workers else ""
            figures = f"{m.batches_per_s:>9.1f}  {m.noise:>5.0%}  {m.startup_s or 0:>9.2f} s"
            lines.append(f"{m.num_workers:>7}  {figures}{mark}")
        return "\n".join([*lines, f"num_workers={self.num_workers}: {self.reason}", *self.notes])


@explain_keywords
def sweep_workers(
    dataset: Any,
    batch_size: int | None = 1,
    *,
    demand: float | None = None,
    budget_s: float = 60.0,
    max_workers: int | None = None,
    timeout: float | Literal["auto"] = "auto",
    shuffle: bool = False,
    device: torch.device | str | int | None = None,
    pin_memory: bool | Literal["auto"] = "auto",
    recycle_memory: bool | Literal["auto"] = "auto",
    prefetch_factor: int | None = None,
    drop_last: bool = False,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    sampler: Iterable[Any] | None = None,
    batch_sampler: Iterable[Any] | None = None,
    generator: torch.Generator | None = None,
    worker_init_fn: Callable[[int], None] | None = None,
    multiprocessing_context: Any = None,
    in_order: bool = True,
) -> WorkerSweep:
    """Measure how many batches per second 0, 1, 2, 4, ... workers supply, and choose.

    The choice is the smallest number that lets training step as often as any other does, within
    noise. Workers load beside the step; without them loading adds to it, so that 0 is chosen where
    it supplies more than twice what workers do. Where ``demand`` is given, the choice is the
    smallest number that supplies 1.2 times as much (0 workers: 20 times), and no more are tried.
    Run it on the machine that trains, before the training starts.

    A data set shorter than the measurement is iterated again. What crashes, hangs or cannot be
    pickled is an ``error`` in its row and does not end the sweep.

    Args:
        dataset: As for `build_dataloader`, and so are all that are not listed here.
        batch_size: Samples in a batch; None where the data set yields whole batches.
        demand: Batches per second that training consumes on batches already on the device.
        budget_s: Seconds for everything; the last batch and ending the workers may exceed it.
        max_workers: The largest number to try; None means the cores this process may use.
        timeout: Seconds to wait for a batch, never more than what is left of the budget.
        shuffle: Draw a new order each epoch.
        device: Where training runs; None means an accelerator if there is one.
        pin_memory: Whether batches are pinned.
        recycle_memory: Whether workers write into the same memory again.
        prefetch_factor: Batches that each worker is ahead; None means 2.
        drop_last: Leave out a last batch that is smaller.
        collate_fn: Samples to a batch; None means torch's.
        sampler: The order of the samples; to be iterable several times. A copy is iterated; of one
            that cannot be copied the generators in its attributes are put back.
        batch_sampler: The samples of each batch; likewise.
        generator: Draws the order; it is put back.
        worker_init_fn: Called in each worker.
        multiprocessing_context: The start method, or a context.
        in_order: Whether batches come in the order of the sampler.

    Returns:
        The number to take, why, and the measurements.

    Raises:
        TypeError: An argument of the wrong type, or a sampler that serves one epoch only.
        ValueError: An impossible value.

    Numerics: Changes nothing: all random generators are left as they were found.
    Synchronizes: Never.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> found = sweep_workers(TensorDataset(torch.ones(64, 2)), 8, max_workers=0, budget_s=1)
        >>> found.num_workers, found.batches_per_s > 0
        (0, True)
    """
    if demand is not None:
        check_positive("demand", demand)
    check_positive("budget_s", budget_s)
    cores = usable_cores()
    most = cores if max_workers is None else check_int("max_workers", max_workers, minimum=0)
    for name, order in (("sampler", sampler), ("batch_sampler", batch_sampler)):
        if hasattr(type(order), "__next__"):
            raise TypeError(
                f"{name} ({type(order).__name__}) is an iterator, which the sweep would use up; "
                "pass something that iter() can start again"
            )
    sampler, batch_sampler = apart((sampler, batch_sampler), dataset, generator)
    shared = {
        "shuffle": shuffle,
        "device": device,
        "drop_last": drop_last,
        "collate_fn": collate_fn,
        "sampler": sampler,
        "batch_sampler": batch_sampler,
        "generator": generator,
        "worker_init_fn": worker_init_fn,
        "in_order": in_order,
    }
    of_workers = {
        "pin_memory": pin_memory,
        "recycle_memory": recycle_memory,
        "prefetch_factor": prefetch_factor,
        "timeout": timeout,
        "multiprocessing_context": multiprocessing_context,
    }
    # What is wrong with the arguments is an error here, and not a row of the table.
    loader = build_dataloader(dataset, batch_size, num_workers=0, pin_memory=pin_memory, **shared)  # type: ignore[arg-type]
    with unadvised_numbers():
        build_dataloader(dataset, batch_size, num_workers=1, **shared, **of_workers)  # type: ignore[arg-type]
    sweep = _Sweep(dataset, batch_size, shared, of_workers, _numbers(most), budget_s, demand)
    with preserved_rng(torch.device("cpu")), preserved_generators(loader):
        sweep.run()
    return sweep.result(cores)


def _numbers(most: int) -> list[int]:
    powers = [1 << n for n in range(most.bit_length()) if 1 << n < most]
    return [0, *powers, most] if most else [0]


class _Sweep:
    """One run of the measurements."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None,
        shared: Mapping[str, Any],
        of_workers: Mapping[str, Any],
        numbers: list[int],
        budget_s: float,
        demand: float | None,
    ) -> None:
        self.dataset, self.batch_size = dataset, batch_size
        self.shared, self.of_workers = shared, of_workers
        self.numbers, self.demand = numbers, demand
        self.started = time.perf_counter()
        self.deadline = self.started + min(budget_s, DAY_S)
        self.window_s = min(2.0, max(0.05, budget_s / (2 * ROUNDS * len(numbers))))
        self.rates: dict[int, list[float]] = {}
        self.startup: dict[int, float] = {}
        self.errors: dict[int, str] = {}
        self.took: dict[int, float] = {}
        self.is_measured_here = False
        self.stopped = ""

    # -- Measuring ---------------------------------------------------------------------------------

    def run(self) -> None:
        self._ascend()
        for _ in range(ROUNDS - 1):
            for number in list(self.rates):
                if time.perf_counter() + 1.5 * self.took[number] < self.deadline:
                    self._try(number)
        if self.stopped == MET and not any(map(self._is_enough, self.rates)):
            self.stopped = ""
            self._ascend()

    def _ascend(self) -> None:
        failures = 0
        for number in self.numbers:
            if number in self.took:
                continue
            if time.perf_counter() >= self.deadline:
                self.stopped = f"budget_s was used up before {number} workers were tried"
                return
            best = max(map(self._worth, self.rates), default=0.0)
            self._try(number)
            if number in self.rates:
                failures = 0
                if self._is_enough(number):
                    self.stopped = MET
                elif number >= 2 and self._worth(number) < LEAST_GAIN * best:
                    self.stopped = "more workers were not tried: they had stopped helping"
            elif number > 0:
                failures += 1
                if failures == 2:
                    self.stopped = "more workers were not tried after two numbers had failed"
            if self.stopped:
                return

    def _rate(self, number: int) -> float:
        return statistics.median(self.rates[number])

    def _is_enough(self, number: int) -> bool:
        margin = MARGIN if number else MARGIN_WITHOUT_WORKERS
        return self.demand is not None and self._rate(number) >= margin * self.demand

    def _worth(self, number: int) -> float:
        """Return the steps per second to expect; an unknown demand is taken for a balanced one."""
        supply = self._rate(number)
        if number == 0:  # loads, then steps
            return supply / 2 if self.demand is None else 1 / (1 / supply + 1 / self.demand)
        return supply if self.demand is None else min(supply / MARGIN, self.demand)

    def _try(self, number: int) -> None:
        start = time.perf_counter()
        # What hangs or starts slowly, known at its first turn, leaves half of the time to others.
        left = max(0.1, (self.deadline - start) / (1 if number in self.rates else 2))
        trial = Trial(number, self.window_s, start + left)
        try:
            rate, startup_s = (self._with if number else self._without_workers)(trial, left)
        except Exception as error:  # the row has it
            self.errors[number] = in_a_line(error)
            self.rates.pop(number, None)  # not to be relied on
        else:
            self.rates.setdefault(number, []).append(rate)
            self.startup.setdefault(number, startup_s)
        self.took[number] = max(self.took.get(number, 0.0), time.perf_counter() - start)

    def _with(self, trial: Trial, left: float) -> tuple[float, float]:
        options = dict(self.of_workers)
        given = options["timeout"]
        options["timeout"] = left if given in ("auto", 0) else min(given, left)
        with owned_processes(options["multiprocessing_context"]) as context, unadvised_numbers():
            options["multiprocessing_context"] = context
            return trial.drain(
                self._loader(num_workers=trial.num_workers, persistent_workers=True, **options)
            )

    def _without_workers(self, trial: Trial, left: float) -> tuple[float, float]:
        """Measure in a process of its own; here only if samples cannot be made in another."""
        if not self.is_measured_here:
            with owned_processes(self.of_workers["multiprocessing_context"]) as context:
                ours, theirs = context.Pipe(duplex=False)
                arguments = (theirs, trial, self.dataset, self.batch_size, dict(self.shared))
                child = context.Process(target=drain_in_child, args=arguments, daemon=True)
                try:
                    child.start()
                except Exception:  # it cannot be pickled, or this process may start none
                    self.is_measured_here = True
                else:
                    theirs.close()
                    answer = self._answer(child, ours, trial, left)
                    if not isinstance(answer, str):
                        return answer
                    if not any(cause in answer for cause in NOT_IN_ANOTHER_PROCESS):
                        raise FailedError(answer)
                    self.is_measured_here = True
        return trial.drain(self._loader(num_workers=0, pin_memory=False))

    def _answer(
        self, child: Any, ours: Any, trial: Trial, left: float
    ) -> tuple[float, float] | str:
        given = self.of_workers["timeout"]
        # The process starts, and draws at most so many batches beyond its window.
        limit = left if given in ("auto", 0) else min(left, 5 + trial.window_s + 6 * given)
        with ours:
            if not ours.poll(limit):
                raise FailedError(
                    f"no result for {limit:.3g} s: the data set hangs, or budget_s is too short"
                )
            try:
                answer: tuple[float, float] | str = ours.recv()
            except EOFError:
                child.join()
                raise FailedError(f"the process died with exit code {child.exitcode}") from None
        return answer

    def _loader(self, **options: Any) -> MonitoredDataLoader:
        return build_dataloader(self.dataset, self.batch_size, **self.shared, **options)

    # -- Choosing ----------------------------------------------------------------------------------

    def result(self, cores: int) -> WorkerSweep:
        rows = tuple(
            WorkerMeasurement(
                num_workers=number,
                batches_per_s=self._rate(number) if number in self.rates else None,
                rounds=tuple(self.rates.get(number, ())),
                startup_s=self.startup.get(number),
                error=self.errors.get(number),
            )
            for number in sorted(self.took)
        )
        chosen, reason = self._choose({row.num_workers: row.noise for row in rows})
        return WorkerSweep(
            num_workers=chosen,
            reason=reason,
            measurements=rows,
            demand=self.demand,
            cores=cores,
            elapsed_s=time.perf_counter() - self.started,
            notes=tuple(self._notes(chosen, cores)),
        )

    def _notes(self, chosen: int, cores: int) -> Iterator[str]:
        if self.stopped:
            yield self.stopped
        elif chosen == self.numbers[-1] == cores:
            yield "the cores are full; where workers wait and do not compute, raise max_workers"
        if self.rates and min(map(len, self.rates.values())) < ROUNDS:
            yield "few rounds, and the first also reads what no cache has yet: raise budget_s"
        if self.is_measured_here and 0 in self.rates:
            yield "0 workers were measured in this process: no other could make the samples"
        if isinstance(self.dataset, IterableDataset):
            yield (
                "an iterable data set: batches were counted as they came; unless it divides itself "
                "(torch.utils.data.get_worker_info()), n workers yield each sample n times"
            )

    def _choose(self, noise: Mapping[int, float]) -> tuple[int, str]:
        if not self.rates:
            first = next(iter(self.errors.values()), "budget_s is too short")
            return 0, f"nothing could be measured: {first}"
        by_number = sorted(self.rates)
        for number in filter(self._is_enough, by_number):
            margin = MARGIN if number else MARGIN_WITHOUT_WORKERS
            return number, (
                f"the fewest that supply {margin:g} times the demand "
                f"({self._rate(number):.1f} for {self.demand:.1f} batches/s)"
            )
        best = max(by_number, key=self._worth)
        margin = min(MOST_NOISE, max(LEAST_NOISE, noise[best]))
        good = next(n for n in by_number if self._worth(n) >= (1 - margin) * self._worth(best))
        supply = f"{self._rate(good):.1f} batches/s"
        if self.demand is not None:
            return good, (
                f"none supplies enough for the demand of {self.demand:.1f} batches/s; with this "
                f"number the training waits least ({supply})"
            )
        if good != best:
            return good, f"as good as {best} workers within noise of {margin:.0%} ({supply})"
        if good == 0 and len(by_number) > 1:
            return good, f"more than twice what any number of workers supplies ({supply})"
        return good, f"supplies the most ({supply})"
