"""Ranks that capture together and replay together.

A graph of a step on several ranks holds collectives, and NCCL asks of it what it asks of a
collective: all ranks capture it, or none does; and where it is launched, all ranks launch a graph
of that same capture. So no rank decides alone how a step runs. Before each step they tell each
other what they would do, in one round between their hosts: run it as it is, capture it, or replay
the graph of a certain capture, by its number. All ranks begin each capture, so all count alike.
Where they say the same they do so. Else the step runs as it is, on all of them.

A graph that is gone on one rank (its state was replaced there, say) is thus never replayed again on
the others. They let go of theirs when they were refused some times in a row, and then all capture
anew; a rank alone cannot know whether the others still have it, or have other shapes at the moment.
After each time it takes twice as many, so that ranks that never agree come to an end of capturing.

Two things more need all ranks: the check of a graph, which runs steps of its own, and whether a
capture went well, since its graph is used on all of them or on none.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Final, final

from torchfast._core.decisions import Decision
from torchfast._core.errors import CaptureError
from torchfast._core.rank_group import RankGroup
from torchfast.graphs.options import graph_decision

logger = logging.getLogger(__name__)

OTHERS: Final = "another rank could not capture it"
# What a rank would do, besides replaying the graph of a capture, which has a number above these.
EAGERLY: Final = 0
NEW_CAPTURE: Final = -1

# What a rank that failed says to `all_agree` counts wherever the others are: it is the least.
_FAILED, _YES, _NO = 0, 1, 2
# So many steps, and every fourth of all, ran apart: that is no odd batch any more.
_MANY, _PART = 20, 4
_REMEDY: Final = (
    "give all ranks batches of the same shapes at each step, padded to lengths that they agree on, "
    "and change settings on all of them at the same step"
)


@final
class Together:
    """What ranks tell each other about a step and its graph.

    Args:
        ranks: With whom the step talks.

    Attributes:
        is_open: Whether the others wait for a word of this one.
        is_alone: Whether this is the only rank.
        num_captures: Captures that all ranks have begun together: the number of the latest.
    """

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks
        self.is_open = False
        self.is_alone = ranks.size == 1
        self.num_captures = 0
        self._num_steps, self._is_told = 0, False
        self._apart = Counter[str]()  # steps in which the ranks would have done different things

    def meet(self, would: int) -> bool:
        """Return whether all ranks would do the same; each calls it once a step.

        Args:
            would: `EAGERLY`, `NEW_CAPTURE`, or the number of the capture whose graph it replays.
        """
        if self.is_alone:
            return True
        self._num_steps += 1
        least, greatest = self._ranks.span(would)
        if least == greatest:
            self.num_captures += would == NEW_CAPTURE
            return True
        if least > EAGERLY:
            self._note("they had graphs of different captures for their batches")
        elif greatest > EAGERLY:
            self._note("some had a graph for their batches, and others had none")
        else:
            self._note("some would have captured it, and others were to run it as it is")
        return False

    def _note(self, why: str) -> None:
        self._apart[why] += 1
        num = self._apart.total()
        if not self._is_told and num >= max(_MANY, self._num_steps / _PART):
            self._is_told = True
            logger.warning(
                "cuda_graph: %d of %d steps ran eagerly since the ranks differed, the latest since "
                "%s; %s",
                num,
                self._num_steps,
                why,
                _REMEDY,
            )

    def decisions(self) -> list[Decision]:
        """Return how many steps no rank replayed since they differed, and in what."""
        return [
            graph_decision(
                "stepped aside", f"{num} steps ran eagerly on all ranks: {why}; {_REMEDY}"
            )
            for why, num in self._apart.items()
        ]

    def begin(self) -> None:
        """Begin with what may fail here and not elsewhere, or the other way round."""
        self.is_open = not self.is_alone

    def all_agree(self, yes: bool) -> bool:
        """End it with whether it went well; return whether it did on all ranks."""
        if not self.is_open:
            return yes
        self.is_open = False
        return self._ranks.all_agree(yes)

    def go_on(self) -> None:
        """End it, for it went well, and begin with what comes next.

        Raises:
            CaptureError: It went wrong on another rank.
        """
        if not self.all_agree(True):
            raise CaptureError(OTHERS)
        self.begin()

    def any_says(self, yes: bool) -> bool:
        """Return whether any rank says yes, in between; all of them ask as often.

        Raises:
            CaptureError: It went wrong on another one.
        """
        if not self.is_open:
            return yes
        least = self._ranks.least(_YES if yes else _NO).wait()
        if least == _FAILED:
            self.is_open = False
            raise CaptureError(OTHERS)
        return least == _YES

    def fail(self) -> None:
        """End it, if it was not ended, for it went wrong."""
        self.all_agree(False)
