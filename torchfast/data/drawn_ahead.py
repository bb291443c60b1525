"""What fetching ahead draws from a loader's own generators, and how it is taken back.

A loop that breaks off must find the generators where a plain loop leaves them, which has fetched
nothing ahead. The training may draw from the same ones, and what it has drawn must not come again.
So each fetch ahead notes where it found a generator and where it left it. Taken back is what a
fetch drew, the last one first, and only from where it was left: if it stands elsewhere, somebody
else has drawn since, and it stays.

A fetch in another thread may find that the training has drawn meanwhile. Whose draw it was, the
first fetches tell, between which and in which nobody else runs: if a generator moved between them
and in none of them, it is the training that draws.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

from torchfast._core.generators import set_state, state_of
from torchfast.data.held_generators import same_state

if TYPE_CHECKING:
    from torchfast._core.generators import Generator

FEW: Final = 8


class Draw(NamedTuple):
    """Where a fetch found generators and left them.

    Attributes:
        number: Of the batch, counted from 1.
        generators: Which.
        found: Their states before.
        left: And after.
        is_alone: Whether nobody else drew meanwhile.
    """

    number: int
    generators: Sequence[Generator]
    found: Sequence[Any]
    left: Sequence[Any]
    is_alone: bool


@final
class DrawnAhead:
    """The draws of one epoch that come before the training's turn.

    Args:
        handed_out: How many batches the training has had; -1 if it has not come to the epoch yet.
        first: The first draws of the loader's life; written to.

    Attributes:
        handed_out: As above; what was drawn for these is not taken back any more.
    """

    def __init__(self, handed_out: int, first: list[Draw]) -> None:
        self.handed_out = handed_out
        self._first = first
        self._draws: deque[Draw] = deque()

    def note(self, draw: Draw) -> None:
        """Note a draw behind those before it."""
        while self._draws and self._draws[0].number <= self.handed_out:
            self._draws.popleft()
        self._draws.append(draw)
        if len(self._first) < FEW:
            self._first.append(draw)

    def take_back(self, number: int) -> None:
        """Put generators back where they were behind this fetch."""
        while self._draws and self._draws[-1].number > number:
            draw = self._draws.pop()
            for generator, found, left in zip(draw.generators, draw.found, draw.left, strict=True):
                if same_state(found, left) or not same_state(state_of(generator), left):
                    continue
                if draw.is_alone or not self._is_trainings(generator):
                    set_state(generator, found)

    def _is_trainings(self, generator: Generator) -> bool:
        """Whether the training was seen to draw from it, and fetching was not."""
        states = [
            (draw, draw.found[place], draw.left[place])
            for draw in self._first
            for place, each in enumerate(draw.generators)
            if each is generator
        ]
        if any(draw.is_alone and not same_state(found, left) for draw, found, left in states):
            return False
        return any(
            after.number == before.number + 1 and not same_state(left, found)
            for (before, _, left), (after, found, _) in pairwise(states)
        )


def states_of(generators: Sequence[Generator]) -> list[Any]:
    """Return the state of each."""
    return [state_of(generator) for generator in generators]
