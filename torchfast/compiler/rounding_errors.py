"""How far rounding alone takes a step's results, where that is farther than a tolerance.

Some steps hand on a rounding as something large. A router sends a token to another expert, and that
expert's gradient is another one. The batch norms of a deep network that has not learnt anything yet
make the gradients grow from layer to layer, and of the first layers' nothing is left but rounding.
Compiled code rounds in another way, so its results are then as far off as any others, and no fixed
tolerance tells what is right.

So it is measured: the reference runs with parameters that are moved by some roundings of float32
(`torchfast._core.rounding`), and whatever that does to each result may happen to others twice over.
What is compared of them is the nearest of several runs, from parameters that are moved likewise: a
rounding goes another way each time, and what is wrong is wrong each time. Of a gradient that
rounding changes beyond recognition the length is left to be compared, so that one that is missing,
or several times too large, is found.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import Final, final

from torchfast.compiler.parity import Errors, ParityTolerance

# Runs from parameters that are moved, of the reference and of what is compared with it.
NUM_RUNS: Final = 4
_TIMES: Final = 2.0
# Of the length of all gradients: a network that makes rounding large makes gradients large too, and
# beside the first layers' the last ones' are small, though they are the ones that can be told.
LEAST_SHARE: Final = 1e-4
# Where a gradient may be off by nearly as much as one that is missing is, its length counts; and by
# how much it may be shorter or longer than any of the reference's.
_BEYOND_RECOGNITION: Final = 0.9
_LENGTH_TIMES: Final = 2.0


@final
class RoundingErrors:
    """What rounding alone does to the results of a reference.

    Args:
        runs: How far it was off itself, each time from other parameters.
    """

    def __init__(self, runs: Sequence[Errors]) -> None:
        self._runs = runs
        largest = reduce(Errors.larger, runs)
        self._gradient = largest.gradient
        self._allowed = Errors(
            _allowed(largest.loss),
            _allowed(largest.gradient),
            {name: _allowed(error) for name, error in largest.tensors.items()},
            {name: _allowed(error) for name, error in largest.buffers.items()},
        )

    def __str__(self) -> str:
        """Return it as a note."""
        return (
            f"rounding alone moves gradients by up to {self._gradient:.2g} of their length; others "
            "may be off by twice as much as it does to each"
        )

    def is_beyond(self, tolerance: ParityTolerance) -> bool:
        """Whether a tolerance forbids what it does."""
        return self._allowed.beyond(tolerance) is not None

    def objection(self, runs: Sequence[Errors], tolerance: ParityTolerance) -> str | None:
        """Return in words what is wrong with a result; None if nothing is.

        Args:
            runs: How far it was off, each time from other parameters.
            tolerance: What is allowed in any case.
        """
        beyond = reduce(Errors.smaller, runs).beyond(tolerance, self._allowed)
        if beyond is not None:
            return f"{beyond}; twice what rounding alone does is allowed"
        for name, allowed in self._allowed.tensors.items():
            lengths = [run.lengths[name] for run in self._runs]
            least, most = min(lengths) / _LENGTH_TIMES, max(lengths) * _LENGTH_TIMES
            if allowed >= _BEYOND_RECOGNITION and not any(
                least <= run.lengths[name] <= most for run in runs
            ):
                return (
                    f"the gradient of {name}, which rounding alone changes beyond recognition, is "
                    f"{runs[0].lengths[name]:.2g} times as long as it should be"
                )
        return None


def _allowed(error: float) -> float:
    # What is finite only now and then allows nothing.
    return _TIMES * error if math.isfinite(error) else 0.0
