"""Which parts of a sharded model the ranks have used in a step, compared while it stands still.

A rank that runs a block which another leaves out waits in a collective that the other never joins,
so what is compared behind the step is never reached. The thread that listens for other ranks'
errors compares it meanwhile: where a step has not gone on for a few looks, the first rank says in
the store what it has gathered so far, and each other rank holds its own against that. One that is
only slower has the beginning of the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol, final

_KEY: Final = "parts"

# The numbers of a step and of a forward in it, and what has run in the step so far.
Used = tuple[tuple[int, int], list[str]]


class _Told(Protocol):
    def used(self) -> Used | None: ...


@final
class UsedParts:
    """What this rank has used, and the first one.

    Args:
        rank: This one.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._source: _Told | None = None
        self._said = ""  # by the first one

    @contextmanager
    def told_by(self, source: _Told | None) -> Iterator[None]:
        """Enter it around steps; ``source`` is None where nothing is in shards."""
        before, self._source = self._source, source
        try:
            yield
        finally:
            self._source = before

    def number(self) -> tuple[int, int] | None:
        """Return those of the forward that was begun last; None outside of steps."""
        used = self._now()
        return None if used is None else used[0]

    def difference(self, store: Any, entry: int) -> str:
        """Say what differs from the first rank in this step; empty where nothing is known to.

        Args:
            store: Through which the ranks tell each other; an error of it goes through.
            entry: What else must be the same for forwards to be compared.
        """
        used = self._now()
        if used is None:
            return ""
        number, own = used
        if self._rank == 0:
            if (told := json.dumps([entry, *number, own])) != self._said:
                store.set(_KEY, told)
                self._said = told
            return ""
        if not store.check([_KEY]):
            return ""
        *at, others = json.loads(store.get(_KEY))
        if at != [entry, *number]:
            return ""
        # As far as both have come.
        for first, mine in zip(others, own, strict=False):
            if first != mine:
                return f"rank 0 has {first}, rank {self._rank} has {mine}"
        return ""

    def _now(self) -> Used | None:
        source = self._source
        return None if source is None else source.used()
