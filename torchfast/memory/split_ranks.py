"""In how many parts several ranks run a step, of which one has run out of memory.

Ranks that train together enter the same collectives, so they run as many forwards as each other.
Each says how many parts it wants, by what did not fit on it, and how many its batches can be in;
the most that any wants is what all take. In the steps of a size that has fitted they ask nobody but
each other whether it is such a size. In others they are ready to drop the step together.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, TypeVar, final

from torchfast._core.batches import count_samples
from torchfast.memory.split_check import MOST_SAMPLES, Verdict, num_tried
from torchfast.memory.splitting import num_elements, num_halved, split_evenly, why_whole

T = TypeVar("T")
Counts = tuple[int, ...]
Group = tuple[Any, ...]

_MOST_KNOWN: Final = 4096


class OtherRanks(Protocol):
    """The ranks that run a step together; see ``SharedTry``."""

    is_told: bool

    @property
    def rank(self) -> int:
        """The number of this one."""

    def all_agree(self, yes: bool) -> bool:
        """Return whether all ranks say yes."""

    def gather(self, value: T) -> list[T]:
        """Return what each rank gave, by rank."""

    def on(self) -> AbstractContextManager[None]:
        """Return the context of a step that all of them can drop."""

    def opened(self, errors: type[Exception] = ...) -> AbstractContextManager[None]:
        """Return the context, in that one, of what they do alike."""

    def drop(self) -> None:
        """Make the model ready for another try."""


@final
@dataclass(frozen=True, kw_only=True)
class Wish:
    """What a rank says of the step to come.

    Attributes:
        wanted: In how many parts it wants each micro-batch.
        most: In how many each can be.
        fitted: In how few they have fitted; None if they have not yet.
        account: What was in memory, if it has just run out of it.
        why_not: Why it cannot run in smaller parts, if so.
    """

    wanted: Counts
    most: Counts
    fitted: Counts | None = None
    account: str | None = None
    why_not: str | None = None


class Beginning(NamedTuple):
    """How all ranks begin a step.

    Attributes:
        counts: In how many parts this one runs each of its micro-batches.
        has_fitted: Whether it will fit.
        is_split: Whether any of them has a micro-batch in parts; all say the same.
    """

    counts: Counts
    has_fitted: bool
    is_split: bool


@final
class SplitRanks:
    """Agrees on parts.

    Args:
        ranks: With whom.
    """

    def __init__(self, ranks: OtherRanks) -> None:
        self.ranks = ranks
        self._fitted: dict[Counts, Counts] = {}  # number of parts by elements
        self._num_through = 0

    def begin(self, group: Group, limit: int | None) -> Beginning:
        """Return in how many parts all ranks run their micro-batches.

        Args:
            group: This rank's.
            limit: Elements of the smallest part that has not fitted here.
        """
        wanted = counts_of(group, limit)
        fitted = self._fitted.get(_sizes(group))
        if self.ranks.all_agree(fitted == wanted == (1,) * len(group)):
            return Beginning(wanted, has_fitted=True, is_split=False)
        wish = Wish(wanted=wanted, most=most_parts(group), fitted=fitted)
        wishes = self.ranks.gather(wish)
        # Where a rank cannot have as many, it may still fit.
        counts = tuple(map(min, wanted_by_all(wishes), _least_possible(wishes)))
        return Beginning(
            counts[: len(group)],
            has_fitted=all(_covers(w.fitted, counts) for w in wishes),
            is_split=max(counts) > 1,
        )

    def fits(self, group: Group, counts: Counts) -> None:
        """Note that a step has gone through on all ranks.

        The very first one has made the optimizer's state, which the next ones have besides.
        """
        self._num_through += 1
        if self._num_through > 1:
            if len(self._fitted) >= _MOST_KNOWN:
                self._fitted.clear()
            # What fits in few parts fits in more.
            if not _covers(self._fitted.get(_sizes(group)), counts):
                self._fitted[_sizes(group)] = counts

    def smaller(self, wish: Wish, max_parts: int) -> tuple[Counts, str, str | None]:
        """Return in how many parts to try again, what the ranks that ran out say, and why not."""
        wishes = self.ranks.gather(wish)
        accounts = "\n".join(
            f"rank {rank}: {w.account}" for rank, w in enumerate(wishes) if w.account is not None
        )
        counts = wanted_by_all(wishes)
        return counts[: len(wish.most)], accounts, _why_not(wishes, counts, max_parts)

    def check(self, check: Callable[[Any, int], Verdict], batch: Any | None) -> Verdict:
        """Return whether parts make the whole: what a rank has found holds for all.

        Args:
            check: Finds it out for a batch, of which it takes so many samples.
            batch: A micro-batch that is to be in parts; None where this rank has none.
        """
        num = 2 * MOST_SAMPLES if batch is None else count_samples(batch) or 1
        # Shards are gathered in each forward, so all ranks run equally many.
        size = min(map(num_tried, self.ranks.gather(num)))
        with self.ranks.on():
            own = _of_nothing(self.ranks) if batch is None else check(batch, size)
        self.ranks.drop()
        verdicts = self.ranks.gather(own)
        return Verdict(
            why_not=next((v.why_not for v in verdicts if v.why_not is not None), None),
            why_unknown=next((v.why_unknown for v in verdicts if v.why_unknown is not None), None),
            is_kept=all(v.is_kept for v in verdicts),
            other_metrics=tuple(dict.fromkeys(n for v in verdicts for n in v.other_metrics)),
        )


def pieces_of_all(group: Group, counts: Counts) -> Group:
    """Return the micro-batches in so many parts; the group itself, where all are whole."""
    if set(counts) == {1}:
        return group
    return tuple(
        batch if count == 1 else split_evenly(batch, count)
        for batch, count in zip(group, counts, strict=True)
    )


def counts_of(group: Group, limit: int | None) -> Counts:
    """Return in how many parts each micro-batch is smaller than what did not fit."""
    return tuple(
        1 if limit is None or why_whole(batch) is not None else num_halved(batch, limit)
        for batch in group
    )


def most_parts(group: Group) -> Counts:
    """Return in how many parts each micro-batch can be."""
    return tuple(
        1 if why_whole(batch) is not None else count_samples(batch) or 1 for batch in group
    )


def wanted_by_all(wishes: list[Wish]) -> Counts:
    """Return the most parts of each micro-batch that a rank wants; some may have fewer of them."""
    columns = itertools.zip_longest(*(wish.wanted for wish in wishes), fillvalue=1)
    return tuple(max(column) for column in columns)


def _covers(fitted: Counts | None, counts: Counts) -> bool:
    return fitted is not None and all(a <= b for a, b in zip(fitted, counts, strict=False))


def _least_possible(wishes: list[Wish]) -> Counts:
    columns = itertools.zip_longest(*(wish.most for wish in wishes), fillvalue=2**31)
    return tuple(min(column) for column in columns)


def _why_not(wishes: list[Wish], counts: Counts, max_parts: int) -> str | None:
    for rank, wish in enumerate(wishes):
        if wish.why_not is not None:
            return f"rank {rank}: {wish.why_not}"
    for rank, wish in enumerate(wishes):
        for count, most in zip(counts, wish.most, strict=False):
            if count > most:
                return f"it would take {count} parts, and rank {rank} has {most} to make"
    if max(counts) > max_parts:
        return f"it would take {max(counts)} parts, and max_parts={max_parts}"
    return None


def _sizes(group: Group) -> Counts:
    return tuple(map(num_elements, group))


def _of_nothing(ranks: OtherRanks) -> Verdict:
    try:
        with ranks.opened(Exception):
            return Verdict()
    except Exception as error:
        return Verdict(why_unknown=f"on another rank it raises: {type(error).__name__}")
