"""Which rank stands where, when a run of many ranks stands still.

Ranks wait for each other in every step, so one that is stuck stops all of them, and all of them
look alike: each waits in some collective. What says more is where they stand. Here a thread of each
rank leaves word now and then, in the store through which the ranks have found each other: the phase
of the step (`torchfast.phase`), the number of steps, and the line of code that its training thread
is in. When a rank has seen no new phase begin for longer than the timeout, it reads what all ranks
have said and logs it, once for each standstill. The one that is elsewhere than the others is the
one to look at; one that says nothing any more is dead or cut off.

It decides nothing: the run goes on if the ranks do, and is ended by the timeout of the process
group if they do not, which should be longer. A step notes its phases as it begins them, which takes
a microsecond each; all else happens in the thread, some times a minute. It does not see into the
device: a rank whose GPU is stuck stands where its host next waits for it.
"""

from __future__ import annotations

import itertools
import json
import logging
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Final, final

import torch.distributed as dist
from typing_extensions import override

from torchfast._core import phases
from torchfast._core.arguments import check_callable, check_positive, explain_keywords
from torchfast._core.closing import Closing
from torchfast._core.user_code import owner_of, place_of
from torchfast.parallel.rank_store import connection_to_store

logger = logging.getLogger(__name__)

_MOST_INTERVAL_S: Final = 10.0
_WORDS_IN_TIMEOUT: Final = 5
_INTERVALS_FOR_A_WORD: Final = 3
_STORE_TIMEOUT_S: Final = 10.0
_JOIN_S: Final = 2.0

# Names of the watchdogs in the store. Ranks make theirs in the same order, and an older one's last
# words must not be taken for a newer one's.
_numbers = itertools.count()


@final
class Watchdog(Closing):
    """Says where every rank stands when this one has stood still for too long.

    Make it on all ranks, in the thread that trains, behind ``init_process_group()``. In a run of
    one process it says where that one stands.

    Args:
        timeout_s: How long no phase may begin. Longer than compiling, evaluating or saving takes,
            and shorter than the timeout of the process group.
        num_steps: Called in the watchdog's thread for the number of steps done, for the message.

    Raises:
        TypeError: An argument of the wrong kind.
        ValueError: A timeout that is not above zero.

    Numerics: Exact.
    Synchronizes: Never.

    Example:
        >>> with Watchdog(timeout_s=300.0):
        ...     pass  # train
    """

    @explain_keywords
    def __init__(
        self, *, timeout_s: float = 300.0, num_steps: Callable[[], int] | None = None
    ) -> None:
        self._timeout_s = check_positive("timeout_s", timeout_s)
        if num_steps is not None:
            check_callable("num_steps", num_steps, "num_steps()")
        self._num_steps = num_steps
        is_many = dist.is_available() and dist.is_initialized()
        self._rank = dist.get_rank() if is_many else 0
        self._world_size = dist.get_world_size() if is_many else 1
        self._store = (
            connection_to_store(f"torchfast/watchdog/{next(_numbers)}", _STORE_TIMEOUT_S)
            if self._world_size > 1
            else None
        )
        self._watched = threading.get_ident()
        self._interval_s = min(_MOST_INTERVAL_S, self._timeout_s / _WORDS_IN_TIMEOUT)
        self._number = 0  # of the words that were left
        self._ends = threading.Event()
        self._note = _Note()
        phases.start_watching(self._note)
        self._thread = threading.Thread(target=self._run, name="torchfast-watchdog", daemon=True)
        self._thread.start()

    @override
    def close(self) -> None:
        """End the thread; a second call does nothing."""
        phases.stop_watching(self._note)
        self._ends.set()
        # A store whose host is gone holds a call for a while; the thread holds nothing up then.
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        seen, since, is_told = self._note.count, time.monotonic(), False
        while not self._ends.wait(self._interval_s):
            if self._note.count != seen:
                seen, since, is_told = self._note.count, time.monotonic(), False
            idle_s = time.monotonic() - since
            self._leave_word(idle_s)
            if idle_s >= self._timeout_s and not is_told:
                is_told = True
                self._tell(idle_s)

    def _leave_word(self, idle_s: float) -> None:
        self._number += 1
        if self._store is None:
            return
        word = json.dumps([self._number, self._standing(idle_s)])
        try:
            self._store.set(str(self._rank), word)
        except Exception as error:  # whatever a store of any kind raises: the next word may arrive
            logger.debug("the watchdog could not leave word: %s", error)

    def _standing(self, idle_s: float) -> str:
        """Return where this rank stands, as the others are to read it."""
        steps = "" if self._num_steps is None else f"after step {self._num_steps()}, "
        phase = self._note.phase
        if idle_s < self._interval_s:
            return f"{steps}goes on, now in {phase}"
        where = _where(sys._current_frames().get(self._watched))
        return f"{steps}in {phase} for {idle_s:.0f} s, at {where}"

    def _tell(self, idle_s: float) -> None:
        standings = self._standings(idle_s)
        if standings is None:
            return
        logger.error(
            "rank %d has stood still for %.0f s (timeout_s=%g). Where each rank stands; look at "
            "the one that is elsewhere than the others:\n%s",
            self._rank,
            idle_s,
            self._timeout_s,
            "\n".join(f"  rank {rank}: {text}" for rank, text in standings.items()),
        )

    def _standings(self, idle_s: float) -> dict[int, str] | None:
        """Return what all ranks say; None if the watchdog is closed meanwhile."""
        own = {self._rank: self._standing(idle_s)}
        if self._store is None:
            return own
        before = self._words()
        # Another rank's clock is not ours: whether it still speaks is told by its next word.
        for _ in range(_INTERVALS_FOR_A_WORD):
            if self._ends.wait(self._interval_s):
                return None
            self._leave_word(idle_s)  # they may be asking the same
        after = self._words()
        found: dict[int, str] = {}
        for rank in range(self._world_size):
            number, text = after.get(rank, (0, "has never said anything"))
            if number == before.get(rank, (0, ""))[0] and rank in after:
                text = f"says nothing any more; before: {text}"
            found[rank] = text
        return found | own

    def _words(self) -> dict[int, tuple[int, str]]:
        assert self._store is not None
        words = {}
        for rank in range(self._world_size):
            try:
                if self._store.check([str(rank)]):
                    number, text = json.loads(self._store.get(str(rank)))
                    words[rank] = int(number), str(text)
            except Exception as error:  # the store is on rank 0, which may be the one that is gone
                words[rank] = -1, f"cannot be asked ({str(error).splitlines()[0][:100]})"
        return words


@final
class _Note:
    """The phase that a thread is in, written by it and read by another."""

    def __init__(self) -> None:
        self.count = 0
        self._names: list[str] = []

    def begin(self, name: str) -> None:
        self._names.append(name)
        self.count += 1

    def end(self, begun: None) -> None:
        del begun
        # Empty where the watchdog was made within a phase.
        if self._names:
            self._names.pop()
        self.count += 1

    @property
    def phase(self) -> str:
        names = tuple(self._names)
        return f"the phase {names[-1]!r}" if names else "no phase of a step"


def _where(frame: FrameType | None) -> str:
    """Return the line that a thread is in: the innermost of the user's, and what it waits in."""
    if frame is None:
        return "its end"
    innermost = place_of(frame)
    at: FrameType | None = frame
    while at is not None and owner_of(at) != "user":
        at = at.f_back
    return innermost if at in (None, frame) else f"{place_of(at)}, there in {innermost}"
