"""Which way of compiling a model is fastest on this machine, found by measuring the user's step.

No rule tells it: by blocks or whole, with tuned kernels or not, even whether compiling pays at all
depends on the model, the batch, the device and what else the step does. A search tries each way on
the real forward and backward, with the real batch, and keeps the fastest that computes the same.

How it goes, within ``budget_s``:

1. The state is saved (`SavedModules`) and, whatever happens, put back at the end.
2. The reference, the first candidate, runs: its loss and gradients are what others must agree with.
3. Each candidate is put in force and compiled, the cheapest first, within what is left of the time
   less a part for the timing. One that raises, takes too long or computes something else
   (`parity`) is out, with the reason. What only rounds otherwise is not (`rounding_errors`).
4. What is left is timed in turns (`measure`), as replays where a graph will hold the step
   (`torchfast.compiler.replays`).
5. Chosen is the fastest. Where the difference is within the noise, the one that comes first in the
   order given stays: it is simpler and cheaper to compile.
6. If the step draws random numbers, the choice is judged once more without dropout. If it is off,
   it is out, and 5 is repeated.

The answer is a `Receipt`; nothing is left in force. Keep it (`save_receipt`), for a search takes as
long as all of its compiles. It is not worth it for short trainings, and where shapes change from
batch to batch it measures only the batch that it was given.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn

from torchfast._core.arguments import check_callable, check_positive
from torchfast._core.batches import tensors
from torchfast._core.device import drain
from torchfast._core.generators import held_with_generators
from torchfast._core.measure import Measurement, first_line, measure
from torchfast._core.saved_modules import SavedModules
from torchfast.compiler.candidates import Candidate, OutError
from torchfast.compiler.causes import is_of_the_machine
from torchfast.compiler.judge import Judge
from torchfast.compiler.parity import ParityTolerance
from torchfast.compiler.reasons import why_chosen, why_none
from torchfast.compiler.receipts import CandidateResult, Receipt, ReceiptKey, Status, new_date
from torchfast.compiler.replays import ALL_LAUNCHED, LAUNCHED, REPLAYED, Graphs, captured

logger = logging.getLogger(__name__)

R = TypeVar("R")
CallWithin = Callable[[float, Callable[[], Any]], Any]

# Of the budget, what compiling leaves to the timing; and the most that timing is worth.
_TIMING_SHARE: Final = 0.25
_MOST_TIMING_S: Final = 120.0
# Units that a candidate runs before it is judged. Graphs of torch's own are recorded at the second
# and replayed at the third.
_FIRST_UNITS: Final = 3
# Putting a candidate in force again must not compile again.
_SWITCH_S: Final = 1.0
_SWITCH_SHARE: Final = 0.3


def search(
    candidates: Sequence[Candidate],
    work: Callable[[], Tensor],
    *,
    model: nn.Module,
    device: torch.device,
    budget_s: float,
    batch: object = None,
    key: ReceiptKey | None = None,
    tolerance: ParityTolerance | None = None,
    smallest: float = 0.02,
    graphs: Graphs | None = None,
    call_within: CallWithin | None = None,
    clock: Callable[[], float] = time.perf_counter,
    synchronize: Callable[[], None] | None = None,
    peak_bytes: Callable[[Callable[[], object]], int | None] | None = None,
) -> Receipt:
    """Measure candidates on a step's forward and backward and choose the fastest that is right.

    Args:
        candidates: The reference first, usually eager, then the cheapest to compile.
        work: Runs forward and backward on a real batch and returns the loss. It must not update
            parameters; gradients are dropped before each call.
        model: What trains.
        device: Where.
        budget_s: The seconds for all of it.
        batch: What ``work`` runs on; its tensors are put back too.
        key: What the answer depends on, for the receipt; by default made of model, batch and
            device.
        tolerance: How far results may be off; by default by the precision of the step, and where
            rounding alone takes them farther, by that.
        smallest: The smallest difference in speed that matters, as a part.
        graphs: What captures a unit as the step will be, where it will be.
        call_within: ``call_within(seconds, function)`` calls and interrupts a function. Without it
            a candidate that hangs hangs the search.
        clock: Seconds.
        synchronize: What waits for the device.
        peak_bytes: Calls a function and returns the most bytes that tensors held meanwhile.

    Returns:
        What was measured, and the choice. Nothing is in force.

    Raises:
        TypeError: ``work`` does not return a loss, or an argument is of the wrong type.
        ValueError: No candidate, a name twice, or ``work`` changes parameters.

    Numerics: Parameters, gradients, buffers, generators and what modules keep in attributes are
        afterwards what they were before, bit for bit (see `SavedModules`).
    Synchronizes: Often.
    """
    names = [candidate.name for candidate in candidates]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"candidates must be one or more, each name once, got {names}")
    check_callable("work", work, "work()")
    check_positive("budget_s", budget_s)
    if key is None:
        key = ReceiptKey.of(model, batch, device, {})
    started = clock()
    state = SavedModules([model, *held_with_generators(work), *tensors(batch)], device)
    try:
        run = _Search(
            candidates=list(candidates),
            judge=Judge(candidates[0], work, model, state, tolerance),
            smallest=smallest,
            graphs=graphs,
            call_within=call_within if call_within is not None else lambda _, function: function(),
            clock=clock,
            synchronize=synchronize if synchronize is not None else lambda: drain(device),
            peak_bytes=peak_bytes if peak_bytes is not None else lambda r: _peak_bytes(device, r),
            started=started,
            budget_s=budget_s,
        )
        choice, why = run.choose(device)
    finally:
        state.put_back(thoroughly=True)
    return Receipt(
        key=key,
        model_name=type(model).__name__,
        candidates=tuple(run.results[name] for name in names),
        choice=choice,
        why=why,
        notes=(*run.judge.notes, *run.notes),
        budget_s=budget_s,
        elapsed_s=clock() - started,
        created=new_date(),
    )


@dataclass(kw_only=True)
class _Search:
    """One call of `search`."""

    candidates: list[Candidate]
    judge: Judge
    smallest: float
    graphs: Graphs | None
    call_within: CallWithin
    clock: Callable[[], float]
    synchronize: Callable[[], None]
    peak_bytes: Callable[[Callable[[], object]], int | None]
    started: float
    budget_s: float
    results: dict[str, CandidateResult] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def choose(self, device: torch.device) -> tuple[str, str]:
        """Fill `results` and `notes`; return the choice and the reason."""
        reference = self.candidates[0]
        with reference.in_force():
            peak = self.peak_bytes(self.judge.unit)
        self.judge.set_back()
        self.results[reference.name] = CandidateResult(
            name=reference.name,
            status="measured",
            compile_s=0.0,
            peak_bytes=peak,
            loss_error=0.0,
            gradient_error=0.0,
        )
        for candidate in self.candidates[1:]:
            self._try(candidate)
        try:
            measurement = self._time(device)
        finally:
            if self.graphs is not None:
                self.graphs.close()
        return self._best(measurement)

    # -- Compiling ---------------------------------------------------------------------------------

    def _try(self, candidate: Candidate) -> None:
        """Compile and judge a candidate; afterwards it is not in force."""
        started = self.clock()
        limit = self._left() - min(_TIMING_SHARE * self.budget_s, _MOST_TIMING_S)
        longest = max((r.compile_s or 0.0 for r in self.results.values()), default=0.0)
        if limit <= longest:
            reason = f"no time was left to compile it ({max(0.0, limit):.0f} s"
            reason += f", and another took {longest:.0f} s)" if longest else ")"
            self._rule_out(candidate.name, "left out", f"{reason}; raise budget_s")
            return
        try:
            self.results[candidate.name] = self._compiled(candidate, limit)
        except OutError as out:
            self._rule_out(candidate.name, out.status, out.reason, self.clock() - started)
            gc.collect()  # what a compiler that failed has left in cycles may be on the device
        finally:
            self.judge.set_back()

    def _compiled(self, candidate: Candidate, limit: float) -> CandidateResult:
        started = self.clock()

        def within(function: Callable[[], R]) -> R:
            return self._within(limit - (self.clock() - started), function)

        with self._in_force(candidate):
            within(self._first_units)
            first_s = self.clock() - started
            unit_s = within(self._timed_unit)
            failure = candidate.failure()
            if failure is not None:
                raise OutError("failed", failure)
            # What has run so far may still compile anew, or run out of memory.
            errors = within(self.judge.errors)
            peak = within(lambda: self.peak_bytes(self.judge.unit))
        objection = self.judge.objection(errors, lambda: self._in_force(candidate), within)
        if objection is not None:
            raise OutError("wrong", objection)
        compile_s = max(0.0, first_s - _FIRST_UNITS * unit_s)
        again = self.clock()
        with self._in_force(candidate):
            self._within(limit, self._timed_unit)
        again_s = self.clock() - again - unit_s
        if again_s > max(_SWITCH_S, _SWITCH_SHARE * compile_s):
            raise OutError(
                "failed",
                f"it took {again_s:.1f} s to put it in force again, so it compiles anew each time "
                "and cannot be timed in turns with the others",
            )
        return CandidateResult(
            name=candidate.name,
            status="measured",
            compile_s=compile_s,
            peak_bytes=peak,
            loss_error=errors.loss,
            gradient_error=errors.gradient,
        )

    def _first_units(self) -> None:
        for _ in range(_FIRST_UNITS):
            self.judge.unit()
        self.synchronize()

    def _timed_unit(self) -> float:
        self.synchronize()
        started = self.clock()
        self.judge.unit()
        self.synchronize()
        return self.clock() - started

    # -- Timing and choice -------------------------------------------------------------------------

    def _time(self, device: torch.device) -> Measurement:
        by_name = {c.name: c for c in self.candidates}
        units = self._units()

        def around(name: str) -> AbstractContextManager[None]:
            # A replay is of what was in force when it was captured.
            is_replay = self.results[name].is_replayed
            return nullcontext() if is_replay else by_name[name].in_force()

        left = min(self._left(), _MOST_TIMING_S)
        if self.judge.draws:
            # The choice is compiled once more, without dropout.
            longest = max(r.compile_s or 0.0 for r in self._measured())
            left = min(left, max(self._left() - longest, 0.5 * self._left()))
        measurement = measure(
            units,
            reference=self.candidates[0].name,
            device=device,
            budget_s=max(left, 1e-3),
            smallest=self.smallest,
            around=around,
            clock=self.clock,
            synchronize=self.synchronize,
        )
        self.judge.set_back()
        for name, reason in measurement.failed.items():
            self._rule_out(name, "failed", f"while it was timed: {reason}")
        for result in self._measured():
            timing, ratio = measurement.timing(result.name), measurement.ratio(result.name)
            if timing is not None:
                self.results[result.name] = replace(
                    result,
                    median_ms=timing.median_ms,
                    low_ms=timing.low_ms,
                    high_ms=timing.high_ms,
                    ratio=ratio.ratio,
                    ratio_low=ratio.low,
                    ratio_high=ratio.high,
                )
        if measurement.ended_by != "told":
            self.notes.append(
                f"the timing ended after {len(measurement.rounds)} rounds, and some differences "
                "could not be told"
            )
        return measurement

    def _units(self) -> dict[str, Callable[[], object]]:
        """Return what runs a unit of each candidate in the running, as it will in the training."""
        units: dict[str, Callable[[], object]] = {r.name: self.judge.unit for r in self._measured()}
        if self.graphs is None:
            return units
        replays, reasons = captured([c for c in self.candidates if c.name in units], self._replay)
        for name in units:
            said = f"{LAUNCHED}: {reasons[name]}" if name in reasons else ""
            self.results[name] = replace(
                self.results[name], is_replayed=name in replays, reason=said
            )
        self.notes.append(REPLAYED if replays else ALL_LAUNCHED)
        return units | replays

    def _replay(self, candidate: Candidate) -> Callable[[], object]:
        """Capture a candidate; return what replays it."""
        assert self.graphs is not None
        try:
            with self._in_force(candidate):
                return self._within(max(self._left(), _SWITCH_S), self.graphs.capture)
        finally:
            self.judge.set_back()

    def _best(self, measurement: Measurement) -> tuple[str, str]:
        reference = self.candidates[0].name
        while True:
            best = reference
            for result in self._measured()[1:]:
                if measurement.ratio(result.name, to=best).verdict == "faster":
                    best = result.name
            if best == reference or not self.judge.draws or self._holds_without_dropout(best):
                return best, self._why(best, measurement)

    def _why(self, best: str, measurement: Measurement) -> str:
        results = [self.results[candidate.name] for candidate in self.candidates]
        if any(result.is_compared for result in results[1:]):
            return why_chosen(best, results, measurement)
        used_s = self.clock() - self.started
        return why_none(results, budget_s=self.budget_s, used_s=used_s)

    def _holds_without_dropout(self, name: str) -> bool:
        """Whether the choice is right where no random numbers blur the comparison."""
        result = self.results[name]
        candidate = next(c for c in self.candidates if c.name == name)
        blurred = f"{name} was judged only within what random numbers do to the result"
        compile_s = result.compile_s or 0.0
        if self._left() < compile_s:
            self.notes.append(f"{blurred}: there was no time to compile it without dropout")
            return True
        started = self.clock()
        try:
            judged = self.judge.without_dropout(
                lambda: self._in_force(candidate),
                lambda function: self._within(self._left(), function),
            )
            if isinstance(judged, str):
                self.notes.append(f"{blurred}: {judged}")
                return True
            errors, objection = judged
            if objection:
                raise OutError("wrong", objection)
        except OutError as out:
            if out.status == "timed out":
                self.notes.append(f"{blurred}: without dropout it was {out.reason}")
                return True
            self._rule_out(name, out.status, out.reason, compile_s + self.clock() - started)
            return False
        finally:
            self.judge.set_back()
        self.results[name] = replace(result, loss_error=errors.loss, gradient_error=errors.gradient)
        return True

    # -- Parts -------------------------------------------------------------------------------------

    @contextmanager
    def _in_force(self, candidate: Candidate) -> Iterator[None]:
        """Have a candidate in force; if it cannot be, it is out."""
        try:
            undo = candidate.apply()
        except Exception as error:
            raise self._failed(error) from None
        try:
            yield
        finally:
            undo()

    def _within(self, limit: float, function: Callable[[], R]) -> R:
        """Call a function under a limit, and turn whatever it raises into `OutError`."""
        started = self.clock()
        try:
            result: R = self.call_within(limit, function)
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:
            # An interruption may be no Exception, or one that the compiler has wrapped.
            took = self.clock() - started
            if took >= limit or isinstance(error, TimeoutError):
                raise OutError("timed out", f"not done in {took:.3g} s") from None
            if not isinstance(error, Exception):
                raise
            raise self._failed(error) from None
        return result

    def _failed(self, error: Exception) -> OutError:
        logger.info("a way of compiling failed", exc_info=error)
        # What the machine lacks now is no answer for a later run.
        status: Status = "not now" if is_of_the_machine(f"{error!r} {error}") else "failed"
        return OutError(status, first_line(error))

    def _rule_out(self, name: str, status: Status, reason: str, spent: float | None = None) -> None:
        before = self.results.get(name, CandidateResult(name=name, status=status))
        compile_s = before.compile_s if spent is None else spent
        self.results[name] = replace(before, status=status, reason=reason, compile_s=compile_s)

    def _measured(self) -> list[CandidateResult]:
        """Return those that are in the running, in the order given."""
        found = (self.results.get(c.name) for c in self.candidates)
        return [r for r in found if r is not None and r.status == "measured"]

    def _left(self) -> float:
        return self.started + self.budget_s - self.clock()


def _peak_bytes(device: torch.device, run: Callable[[], object]) -> int | None:
    if device.type != "cuda":
        run()
        return None
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)
