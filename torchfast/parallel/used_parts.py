"""Which parts of a sharded model the ranks have used in a step, compared while they stand still.

A rank that runs a block which another leaves out waits in a collective that the other never joins,
so what is compared behind the step is never reached. The thread that listens for other ranks'
errors compares it meanwhile: where no step has begun for a few looks, the first rank says in the
store what it has gathered so far, and each other rank holds its own against that. One that is only
slower has the beginning of the same.

On a GPU it is the device that waits, and the host finds out some steps later, when it asks for a
loss, be it within a step or between two. So forwards that lie behind are compared too, and those of
other models that the process trains.
"""

from __future__ import annotations

import json
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol, final

_KEY: Final = "parts"
_NOTHING_MORE: Final = "nothing more"
_NUM_MODELS: Final = 4  # that are trained in turns

# Of a model, in the order in which all ranks shard theirs, of its step, and of the forward in it.
Number = tuple[int, int, int]


class Used(NamedTuple):
    """What a forward has used.

    Attributes:
        number: Which forward it is, the same on all ranks.
        parts: What has run, in its order.
        is_over: Whether nothing more will.
    """

    number: Number
    parts: list[str]
    is_over: bool


class Noting(Protocol):
    """Notes what forwards of a model use."""

    def used(self) -> list[Used]:
        """Return what the latest ones have, the last one first; empty if it cannot be told now."""

    def number(self) -> Number:
        """Return that of the forward that was begun last."""


@final
class UsedParts:
    """What this rank has used, and the first one.

    Args:
        rank: This one.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._sources: deque[weakref.ref[Noting]] = deque(maxlen=_NUM_MODELS)  # the last one last
        self._said = ""  # by the first one

    def begin(self, source: Noting | None) -> None:
        """Say whose step begins; None where nothing is in shards. It is asked behind it, too."""
        if source is None or (self._sources and self._sources[-1]() is source):
            return
        others = [each for each in self._sources if each() not in (None, source)]
        self._sources = deque([*others, weakref.ref(source)], _NUM_MODELS)

    def number(self) -> Number | None:
        """Return that of the forward that was begun last; None before any."""
        sources = self._alive()
        return sources[-1].number() if sources else None

    def difference(self, store: Any) -> str:
        """Say what differs from the first rank; empty where nothing is known to.

        Args:
            store: Through which the ranks tell each other; an error of it goes through.
        """
        own = [used for source in self._alive() for used in reversed(source.used())]
        if not own:
            return ""
        if self._rank == 0:
            if (told := _packed(own)) != self._said:
                store.set(_KEY, told)
                self._said = told
            return ""
        if not store.check([_KEY]):
            return ""
        return _difference(_unpacked(store.get(_KEY)), own, self._rank)

    def _alive(self) -> list[Noting]:
        return [source for each in list(self._sources) if (source := each()) is not None]


def _packed(used: Sequence[Used]) -> str:
    """Return it as text, in which each list of parts stands once: most forwards use the same."""
    kinds: dict[tuple[str, ...], int] = {}
    rows = [
        (each.number, kinds.setdefault(tuple(each.parts), len(kinds)), each.is_over)
        for each in used
    ]
    return json.dumps([rows, list(kinds)])


def _unpacked(text: str | bytes) -> list[Used]:
    rows, kinds = json.loads(text)
    return [Used(tuple(number), kinds[kind], over) for number, kind, over in rows]


def _difference(theirs: Sequence[Used], own: Sequence[Used], rank: int) -> str:
    of_first = {used.number: used for used in theirs}
    latest = {used.number[0]: used.number[1] for used in own}
    # The oldest first: what comes behind a difference may be due to it.
    for mine in own:
        first = of_first.get(mine.number)
        if first is None or first[1:] == mine[1:]:
            continue
        for place in range(max(len(first.parts), len(mine.parts))):
            here, there = _part(mine, place), _part(first, place)
            if here != there and None not in (here, there):
                ago = latest[mine.number[0]] - mine.number[1]
                when = {0: "", 1: ", a step ago"}.get(ago, f", {ago} steps ago")
                return f"rank 0 has {there}, rank {rank} has {here}{when}"
    return ""


def _part(used: Used, place: int) -> str | None:
    """Return what has run there, None where it may be to come."""
    if place < len(used.parts):
        return used.parts[place]
    return _NOTHING_MORE if used.is_over else None
