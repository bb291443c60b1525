"""The judge of a search: what the reference computes, and whether a candidate computes the same."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, final

from torch import Tensor, nn

from torchfast._core.rounding import disturb
from torchfast._core.saved_modules import SavedModules
from torchfast.compiler.candidates import Candidate, OutError
from torchfast.compiler.parity import (
    Errors,
    Outcome,
    ParityTolerance,
    errors_between,
    observe,
    tolerance_of,
    without_dropout,
)
from torchfast.compiler.rounding_errors import LEAST_SHARE, NUM_RUNS, RoundingErrors, size_of

# By how much a candidate may be farther off than what does not repeat itself is from itself.
_SPREAD_TIMES = 2.0
# Draws of random numbers that the reference is run with, and the same for what they do. It is only
# to find what is grossly wrong: of right candidates, with draws of their own, 3 draws and twice
# their spread would throw out one in twenty, 6 and three times one in some hundreds.
_NUM_DRAWS = 6
_DRAWS_TIMES = 3.0

InForce = Callable[[], AbstractContextManager[object]]
Within = Callable[[Callable[[], Any]], Any]


@final
class Judge:
    """Compares what a candidate that is in force computes with the reference.

    Args:
        reference: Which runs now, several times.
        work: Forward and backward; it returns the loss.
        model: What trains.
        state: Its state; every comparison starts from there.
        tolerance: How far results may be off; by the precision of the step if None.

    Attributes:
        draws: Whether the step draws random numbers.
        notes: What a reader of the receipt should know.

    Raises:
        ValueError: The work changes parameters.
    """

    def __init__(
        self,
        reference: Candidate,
        work: Callable[[], Tensor],
        model: nn.Module,
        state: SavedModules,
        tolerance: ParityTolerance | None,
    ) -> None:
        self._reference = reference
        self._work = work
        self._model = model
        self._state = state
        self.notes: list[str] = []
        self._rounding: tuple[Outcome, RoundingErrors] | None = None
        with reference.in_force():
            self._expected = self.observe(as_reference=True)
            self._check_parameters()
            self.draws = state.has_drawn()
            state.put_back()
            # What does not repeat itself cannot be asked of others.
            noise = errors_between(self._expected, self.observe())
            spread = self._spread(noise) if self.draws else noise
            self.set_back()
        base = tolerance or tolerance_of(self._expected.precision)
        # By how much parameters are moved to find out what rounding does; None: it does nothing.
        self._size = size_of(self._expected.precision) if tolerance is None else None
        beyond = noise.beyond(base)
        if beyond is not None:
            self.notes.append(
                f"{reference.name} does not repeat its own result: the second time {beyond}. "
                "Others may be off by twice as much"
            )
        self._strict = noise.widened(base, _SPREAD_TIMES)
        self._allowed = spread.widened(self._strict, _DRAWS_TIMES if self.draws else _SPREAD_TIMES)

    def unit(self) -> Tensor:
        """Run a unit of work, without the gradients of the one before."""
        self._state.drop_gradients()
        return self._work()

    def observe(self, *, as_reference: bool = False) -> Outcome:
        """Run a unit of work and return what it left."""
        return observe(self.unit, self._model, as_reference=as_reference)

    def set_back(self, *, attributes: bool = True) -> None:
        """Make the state what it was, and take the gradients away."""
        self._state.put_back(attributes=attributes)
        self._state.drop_gradients()

    def errors(self) -> Errors:
        """Return how far what is in force now is off the reference."""
        self.set_back()
        return errors_between(self._expected, self.observe())

    def objection(self, errors: Errors, in_force: InForce, within: Within) -> str | None:
        """Return in words what is wrong with a result; None if nothing is.

        Args:
            errors: How far it is off.
            in_force: Puts it in force; it runs again where rounding may be the reason.
            within: Calls a function under a limit of time.
        """
        changed = self._state.changed_parameters()
        if changed:
            return f"it writes to parameters ({', '.join(changed[:3])})"
        beyond = self._beyond(
            errors, self._expected, self._allowed, in_force, within, lengths=not self.draws
        )
        if beyond is not None and self.draws:
            return f"{beyond}; three times what random numbers do to the reference is allowed"
        return beyond

    def without_dropout(self, in_force: InForce, within: Within) -> tuple[Errors, str] | str:
        """Judge a candidate where no random numbers blur the result.

        Args:
            in_force: Puts it in force; it compiles anew.
            within: Calls a function under a limit of time.

        Returns:
            How far it is off and in words what is wrong with that, "" if nothing is; or why it
            could not be judged.
        """
        with without_dropout(self._model) as count:
            try:
                with self._reference.in_force():
                    self.set_back(attributes=False)
                    expected = self.observe(as_reference=True)
                if self._state.has_drawn():
                    return f"with {count} rates of dropout set to 0 the step draws on"

                def compare() -> Errors:
                    return errors_between(expected, self.observe())

                with in_force():
                    self.set_back(attributes=False)
                    errors: Errors = within(compare)
                beyond = self._beyond(
                    errors, expected, self._strict, in_force, within, attributes=False
                )
                return errors, "" if beyond is None else f"without dropout {beyond}"
            finally:
                self.set_back(attributes=False)

    def _beyond(
        self,
        errors: Errors,
        expected: Outcome,
        tolerance: ParityTolerance,
        in_force: InForce,
        within: Within,
        *,
        attributes: bool = True,
        lengths: bool = True,
    ) -> str | None:
        """Return in words what rounding does not explain of a result; None if there is nothing."""
        beyond = errors.beyond(tolerance)
        if beyond is None or self._size is None:
            return beyond

        def moved() -> list[Errors]:
            return self._moved(expected, attributes=attributes)

        try:
            if self._rounding is None or self._rounding[0] is not expected:
                with self._reference.in_force():
                    self._rounding = expected, RoundingErrors(within(moved))
            rounding = self._rounding[1]
            if not rounding.is_beyond(tolerance):
                return beyond
            if str(rounding) not in self.notes:
                self.notes.append(str(rounding))
            self.set_back(attributes=attributes)
            with in_force():
                return rounding.objection(within(moved), tolerance, lengths=lengths)
        except OutError as out:
            # What was found already stands.
            return f"{beyond}; that it is rounding could not be found out: {out.reason}"

    def _moved(self, expected: Outcome, *, attributes: bool) -> list[Errors]:
        """Return how far what is in force is off from parameters that are moved by a rounding."""
        errors, size = [], self._size
        assert size is not None
        for seed in range(NUM_RUNS):
            self.set_back(attributes=attributes)
            disturb(self._model.parameters(), seed, size)
            errors.append(errors_between(expected, self.observe(), least_share=LEAST_SHARE))
        return errors

    def _spread(self, noise: Errors) -> Errors:
        """Return how far results are from each other that differ in their random numbers only."""
        runs = [noise]
        for _ in range(_NUM_DRAWS):
            self._state.put_back(generators=False)  # they go on from where the last unit left them
            runs.append(errors_between(self._expected, self.observe()))
        return Errors.of(runs, -1)

    def _check_parameters(self) -> None:
        changed = self._state.changed_parameters()
        if changed:
            raise ValueError(
                f"work() changed the parameters {changed[:5]}; it must run forward and backward "
                "and leave the update out (a hook that steps an optimizer during backward has to "
                "be taken away for the search)"
            )
