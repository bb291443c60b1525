"""Ranks that end an epoch together, whichever of them runs out of batches first.

A step of many ranks needs all of them. If one has a batch more than another, it waits in its step
for ever. So before each step the ranks agree whether all of them have a batch; the epoch ends for
all when it ends for one, and what others have left is dropped. A rank whose loader raises tells the
others, which raise too.

To agree takes as long as a message between hosts, which a step should not wait for. So it is asked
one batch ahead, beside the step: a rank that already holds the batch after this one says so now,
and the answer is there when it is needed. Only where one of them does not know yet, because its
loader has not come so far, they ask again when all do; then the slowest loader is what they wait
for anyway. Every rank sees the same answers, so all of them ask equally often.
"""

from __future__ import annotations

from typing import Any, Final, final

from typing_extensions import override

from torchfast._core.errors import RankError
from torchfast._core.rank_group import Least, RankGroup
from torchfast.data.feed import Feed
from torchfast.data.position import Position

# What a rank says of its next batch; the least of what they say is what all go by. A rank that
# failed says its own number, below all of these.
_HERE: Final = 2
_UNKNOWN: Final = 1
_ENDED: Final = 0


@final
class EvenFeed(Feed):
    """A feed that ends when that of any rank ends.

    All ranks take equally often, and extend and close at the same batch.

    Args:
        feed: This rank's.
        ranks: Who agree.

    Raises:
        RankError: The loader of another rank raised, or a rank cannot be reached.
    """

    def __init__(self, feed: Feed, ranks: RankGroup) -> None:
        self._feed = feed
        self._ranks = ranks
        self._asked: Least | None = None
        self.finished = False

    @override
    def take(self) -> tuple[Any, Position, int] | None:
        if self.finished:
            return None
        asked, self._asked = self._asked, None
        is_here = asked is not None and asked.wait() == _HERE
        taken = self._feed.take() if is_here else self._agreed()
        if taken is not None:
            # None where upstream is at its end: it is found out when the batch is asked for.
            self._asked = self._ranks.least(_HERE if self._feed.has_next else _UNKNOWN)
        return taken

    @property
    @override
    def has_next(self) -> bool:
        return False

    @override
    def turn(self) -> None:
        self._feed.turn()

    @override
    def release(self) -> None:
        self._feed.release()

    @override
    def extend(self, limit: int | None) -> None:
        self._feed.extend(limit)

    @override
    def close(self) -> None:
        # What was asked has been asked on all ranks; nobody needs the answer.
        self.finished = True
        self._feed.close()

    def _agreed(self) -> tuple[Any, Position, int] | None:
        """Take a batch, and return it if all ranks have one."""
        try:
            taken = self._feed.take()
        except BaseException:
            self.finished = True
            self._ranks.least(-1 - self._ranks.rank)
            raise
        least = self._ranks.least(_ENDED if taken is None else _HERE).wait()
        if least < 0:
            self.finished = True
            raise RankError(
                f"the loader of rank {-1 - least} raised an error, so no rank can go on; see that "
                "rank's output"
            )
        if least == _ENDED:
            self.finished = True
            return None
        return taken


def even(feed: Feed, ranks: RankGroup) -> Feed:
    """Return a feed that ends with those of the other ranks; where there are none, the same one."""
    return feed if ranks.size == 1 else EvenFeed(feed, ranks)
