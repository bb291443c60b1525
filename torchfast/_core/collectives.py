"""When the collectives of a step run, told to whoever times the step.

Replicas and shards talk beside the step: a collective is put into a queue of its own, the step goes
on, and waits later for what it needs. So two things are noted: when each collective runs, and when
the step begins to wait for some. How long it really waits, which is what a step would be shorter by
if communication took no time, is seen once the moments have passed.

What issues collectives is a leaf, and what times steps another: they meet here. Nothing is noted in
a step that is not looked at, and nothing is put into its way then.

A collective runs on a rank from when it could begin until it is done. Waiting for a rank that is
late is part of that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, final

from torchfast._core.reading import Mark, Marks

T = TypeVar("T")


@final
class Collective:
    """When one collective runs.

    Attributes:
        begin: From when on it can run.
        end: When it is done; None until that is known.
        is_in_step: Whether the step itself stands still for it, as for one in its own queue.
    """

    __slots__ = ("begin", "end", "is_in_step")

    def __init__(self, begin: Mark, *, is_in_step: bool = False) -> None:
        self.begin, self.is_in_step = begin, is_in_step
        self.end: Mark | None = None

    def finish(self, end: Mark) -> None:
        """Say when it is done."""
        self.end = end


@final
class Wait:
    """A point from which the step goes on once some collectives are done.

    Attributes:
        begin: When it comes there.
        end: When it goes on, where that was noted; else it is when the last of them is done.
        collectives: What it waits for.
    """

    __slots__ = ("begin", "collectives", "end")

    def __init__(self, begin: Mark, collectives: Sequence[Collective]) -> None:
        self.begin, self.collectives = begin, tuple(collectives)
        self.end: Mark | None = None


@final
class Observation:
    """The collectives of one step, noted as they are issued, in any thread.

    Args:
        marks: What notes moments on the device.

    Attributes:
        collectives: Those of the step so far.
        waits: Where the step waits for them.
        knows_waits: Whether those are all.
        spent_s: What noting has taken the host.

    Synchronizes: Never.
    """

    def __init__(self, marks: Marks) -> None:
        self.collectives: list[Collective] = []
        self.waits: list[Wait] = []
        self.knows_waits = True
        self.spent_s = 0.0
        self._marks, self._step_queue = marks, marks.queue()
        self._moments: list[Mark] = []
        self._is_over = False

    @property
    def is_on(self) -> bool:
        """Whether anything is noted: not in a capture, whose moments never come."""
        return not self._is_over and not self._marks.is_capturing

    def end(self) -> None:
        """Note nothing from now on."""
        self._is_over = True

    def run(self, issue: Callable[[], T]) -> tuple[T, Collective | None]:
        """Issue a collective behind which the current queue goes on only once it is done."""
        if not self.is_on:
            return issue(), None
        begin = self._note(self._marks.now)
        result = issue()
        found = Collective(begin, is_in_step=self._marks.queue() == self._step_queue)
        found.finish(self._note(self._marks.now))
        self.collectives.append(found)
        return result, found

    def start(self, issue: Callable[[], Any]) -> tuple[Any, Collective | None]:
        """Issue a collective that runs by itself; what ``issue`` returns is its `Work`."""
        if not self.is_on:
            return issue(), None
        found = Collective(self._note(self._marks.beside))
        work = issue()
        # Some backends work in threads of the host even for a device, whose moments know nothing
        # of that: what they do is left out.
        if work is None or not self._note(lambda: self._marks.behind(work, found.finish)):
            self._moments.append(found.begin)
            return work, None
        self.collectives.append(found)
        return work, found

    def ran_until_now(self, begin: Mark) -> Collective | None:
        """Note one that could run from ``begin`` on and is done here in the current queue."""
        if not self.is_on:
            return None
        found = Collective(begin, is_in_step=self._marks.queue() == self._step_queue)
        found.finish(self._note(self._marks.now))
        self.collectives.append(found)
        return found

    def moment(self) -> Mark | None:
        """Note this moment in the current queue, where anything is noted."""
        if not self.is_on:
            return None
        self._moments.append(mark := self._note(self._marks.now))
        return mark

    def wait_for(self, collectives: Sequence[Collective]) -> Wait | None:
        """Note that the step goes no further until these are done."""
        beside = [each for each in collectives if not each.is_in_step]
        if not beside or not self.is_on:
            return None
        self.waits.append(found := Wait(self._note(self._marks.now), beside))
        return found

    def go_on(self, wait: Wait) -> None:
        """Note that it does."""
        if self.is_on:
            wait.end = self._note(self._marks.now)

    @property
    def is_complete(self) -> bool:
        """Whether it is known of each when it is done."""
        return all(each.end is not None for each in self.collectives)

    def marks(self) -> list[Mark]:
        """Return all moments that were noted, each once."""
        noted = [*self._moments]
        both: list[Collective | Wait] = [*self.collectives, *self.waits]
        for each in both:
            noted += [each.begin] if each.end is None else [each.begin, each.end]
        return list({id(mark): mark for mark in noted}.values())

    def _note(self, how: Callable[[], T]) -> T:
        started = time.perf_counter()
        try:
            return how()
        finally:
            self.spent_s += time.perf_counter() - started


@final
class Collectives:
    """Where those who issue collectives hear that somebody wants to know of them."""

    def __init__(self) -> None:
        self._issuers: list[Callable[[Observation | None], None]] = []

    @property
    def are_any(self) -> bool:
        """Whether anybody issues some."""
        return bool(self._issuers)

    def issued_by(self, issuer: Callable[[Observation | None], None]) -> None:
        """Say who issues some: called with where to note them, and with None when it is over."""
        self._issuers.append(issuer)

    def observe(self, observation: Observation | None) -> None:
        """Have all that is issued from now on noted there; None ends it."""
        for issuer in self._issuers:
            issuer(observation)
