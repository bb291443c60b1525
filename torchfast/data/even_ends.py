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

At the first batch of an epoch, and at some later ones, they also compare what they deal out, as far
as a digest tells it: of ranks that were given different data each drops what no other one has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, final

from typing_extensions import override

from torchfast._core.errors import RankError
from torchfast._core.rank_group import Least, RankGroup
from torchfast.data.feed import Feed
from torchfast.data.position import Position
from torchfast.data.sharded import told_of
from torchfast.data.sharded_batches import EVERY, ShardedIterable, ShardedIterator

# What a rank says of its next batch; the least of what they say is what all go by. A rank that
# failed says its own number, below all of these.
_HERE: Final = 2
_UNKNOWN: Final = 1
_ENDED: Final = 0

_DIGITS: Final = 15  # of a digest, as many as a signed number of 64 bits holds
_SHOWN: Final = 8


@final
class EvenFeed(Feed):
    """A feed that ends when that of any rank ends.

    All ranks take equally often, and extend and close at the same batch.

    Args:
        feed: This rank's.
        ranks: Who agree.
        loader: Where it comes from.

    Raises:
        RankError: The loader of another rank raised, or a rank cannot be reached.
        ValueError: The ranks were given different data, of which each takes its part.
    """

    def __init__(self, feed: Feed, ranks: RankGroup, loader: Iterable[Any]) -> None:
        self._feed = feed
        self._ranks = ranks
        self._loader = loader
        # A sampler has one order for all of the epoch. The first comparison also shows that this is
        # the same on all ranks, so all of them make the later ones.
        self._is_stream = isinstance(loader, ShardedIterable | ShardedIterator)
        self._num_taken = 0
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
            if self._num_taken == 0 or (self._is_stream and self._num_taken % EVERY == 0):
                self._compare(taken[1].num_batches - 1)
            self._num_taken += 1
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
            with heard(self._ranks):
                taken = self._feed.take()
        except BaseException:
            self.finished = True
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

    def _compare(self, number: int) -> None:
        """Raise on all ranks unless they deal out the same."""
        told = told_of(self._loader, number)
        number = int(told[:_DIGITS], 16) if told else int(self._is_stream)
        if len(set(self._ranks.each(number).wait())) == 1:
            return
        self.finished = True
        own = f"{type(self._loader).__name__} {told[:_SHOWN] or 'as it is'}"
        of_ranks = self._ranks.gather(own)
        raise ValueError(
            f"the ranks were given different data to train on (by rank: {', '.join(of_ranks)}), of "
            "which each takes its part, so that samples are left out and others come twice; give "
            "all ranks the same, in the same order, or say is_sharded = True on what holds a "
            "rank's own"
        )


def check_ranks(ranks: RankGroup | None) -> RankGroup:
    """Return who end an epoch together; TypeError if it is none of these."""
    if ranks is None:
        return RankGroup.alone()
    if not isinstance(ranks, RankGroup):
        raise TypeError(f"ranks must be the RankGroup of a Trainer or None, got {ranks!r}")
    return ranks


@contextmanager
def heard(ranks: RankGroup) -> Iterator[None]:
    """Tell the other ranks, which ask for their next batch, if the body fails: else they wait."""
    try:
        yield
    except BaseException:
        if ranks.size > 1:
            ranks.least(-1 - ranks.rank)
        raise


def even(feed: Feed, ranks: RankGroup, loader: Iterable[Any]) -> Feed:
    """Return a feed that ends with those of the other ranks; where there are none, the same one."""
    return feed if ranks.size == 1 else EvenFeed(feed, ranks, loader)
