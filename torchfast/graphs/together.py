"""Ranks that capture together.

A step, eager or replayed, is one round of collectives on every rank, so it does not matter to the
others in which way a rank runs it. Two things do. The check of a graph runs steps of its own, which
is possible only where all ranks check at the same step. And where one rank cannot capture at all,
the others gain nothing by their graphs, since they wait for it; so all go back together.
"""

from __future__ import annotations

from typing import final

from torchfast._core.errors import CaptureError
from torchfast._core.rank_group import RankGroup

OTHERS = "another rank could not capture it"

# What a rank that failed says to `all_agree` counts wherever the others are: it is the least.
_FAILED, _YES, _NO = 0, 1, 2


@final
class Together:
    """What ranks tell each other about a step that is about to be captured.

    Args:
        ranks: With whom the step talks.

    Attributes:
        is_open: Whether the others wait for a word of this one.
        is_joint: Whether all ranks capture the step that this one captures; true for one rank.
        is_alone: Whether this is the only rank.
    """

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks
        self.is_open = False
        self.is_joint = True
        self.is_alone = ranks.size == 1

    def meet(self, *, captures: bool) -> None:
        """Find out whether all ranks are about to capture; each calls it once a step."""
        if self._ranks.size > 1:
            self.is_joint = self._ranks.all_agree(captures)

    def begin(self) -> None:
        """Begin with what may fail here and not elsewhere, or the other way round."""
        self.is_open = self.is_joint and self._ranks.size > 1

    def all_agree(self, yes: bool) -> bool:
        """End it with whether it went well; return whether it did on all ranks."""
        if not self.is_open:
            return yes
        self.is_open = False
        return self._ranks.all_agree(yes)

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
