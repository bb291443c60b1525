"""How far rounding alone takes a step's results, where that is farther than a tolerance.

Some steps hand on a rounding as something large. A router sends a token to another expert, and that
expert's gradient is another one. The batch norms of a deep network that has not learnt anything yet
make the gradients grow from layer to layer, and of the first layers' nothing is left but rounding.
Compiled code rounds in another way, so its results are then as far off as any others, and no fixed
tolerance tells what is right.

So it is measured: the reference runs with parameters that are moved by a part of a rounding
(`torchfast._core.rounding`), and whatever that does to each result may happen to others twice over.
What is compared of them is nearly the nearest of several runs, from parameters that are moved
likewise: a rounding goes another way each time. Two gradients that have nothing to do with each
other are apart by the square root of two of their length, and so no more than that is allowed,
unless rounding makes more itself. Where nothing else tells a missing gradient, lengths are compared
too. So of a gradient that is mostly rounding it is found if it is missing, turned round or several
times too large, and not if it is half as large again.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Final, final

from torchfast._core.rounding import SIZE
from torchfast.compiler.parity import Errors, ParityTolerance

# Runs from parameters that are moved, of the reference and of what is compared with it; and which
# of the latter's results counts. What is right may be off in one or two of them.
NUM_RUNS: Final = 4
_RANK: Final = 1
# What may be as much as rounding does twice over is at most this, or so many times as much as it.
_TIMES: Final = 2.0
_MOST: Final = math.sqrt(2.0)
_MORE_TIMES: Final = 1.1
# Of the length of all gradients: a network that makes rounding large makes gradients large too, and
# beside the first layers' the last ones' are small, though they are the ones that can be told.
LEAST_SHARE: Final = 1e-4
# Where a gradient may be off by nearly as much as one that is missing is, its length counts; and by
# how much it may be shorter or longer than any of the reference's.
_AS_IF_MISSING: Final = 0.9
_LENGTH_TIMES: Final = 2.0
# Compiled code leaves out roundings to 16 bits and fewer; of others it changes the order.
_SIZES: Final = {"8-bit floats": 2.0**-16, "bfloat16": 2.0**-16, "float16": 2.0**-16}


def size_of(precision: str) -> float | None:
    """Return by how much parameters are moved for a format; None if its rounding explains nothing.

    Args:
        precision: As `Outcome.precision` has it.
    """
    return None if precision == "float64" else _SIZES.get(precision, SIZE)


@final
class RoundingErrors:
    """What rounding alone does to the results of a reference.

    Args:
        runs: How far it was off itself, each time from other parameters.
    """

    def __init__(self, runs: Sequence[Errors]) -> None:
        self._runs = runs
        largest = Errors.of(runs, -1)
        self._gradient = largest.gradient
        self._allowed = Errors(
            _twice(largest.loss),
            _at_most(largest.gradient),
            {name: _at_most(error) for name, error in largest.tensors.items()},
            {name: _twice(error) for name, error in largest.buffers.items()},
        )

    def __str__(self) -> str:
        """Return it as a note."""
        return (
            f"rounding alone moves gradients by up to {self._gradient:.2g} of their length; others "
            "may be off by twice what it does to each result"
        )

    def is_beyond(self, tolerance: ParityTolerance) -> bool:
        """Whether a tolerance forbids what it does."""
        return self._allowed.beyond(tolerance) is not None

    def objection(
        self, runs: Sequence[Errors], tolerance: ParityTolerance, *, lengths: bool = True
    ) -> str | None:
        """Return in words what is wrong with a result; None if nothing is.

        Args:
            runs: How far it was off, each time from other parameters.
            tolerance: What is allowed in any case.
            lengths: Whether gradients have the lengths of the reference's at all.
        """
        beyond = Errors.of(runs, min(_RANK, len(runs) - 1)).beyond(tolerance, self._allowed)
        if beyond is not None:
            return f"{beyond}; up to twice what rounding alone does is allowed"
        for name, allowed in self._allowed.tensors.items():
            of_reference = [run.lengths[name] for run in self._runs]
            least, most = min(of_reference) / _LENGTH_TIMES, max(of_reference) * _LENGTH_TIMES
            length = statistics.median(run.lengths[name] for run in runs)
            if lengths and allowed >= _AS_IF_MISSING and not least <= length <= most:
                return (
                    f"the gradient of {name} is {length:.2g} times as long as it should be, and "
                    "rounding alone does not make it so"
                )
        return None


def _twice(error: float) -> float:
    # What is finite only now and then allows nothing.
    return _TIMES * error if math.isfinite(error) else 0.0


def _at_most(error: float) -> float:
    return min(_twice(error), max(_MOST, _MORE_TIMES * error)) if math.isfinite(error) else 0.0
