"""Where batches are fetched: ahead, in a thread that stages them, or in the loop's own thread.

Fetching ahead must not change a random number. An epoch begins in the caller's thread, ``iter()``
and the first batch, which is where samplers draw. The second batch of a loader's life is fetched
there too, and watched: if that moved a generator of the host, samples are augmented in this very
process, and fetching ahead would let training and augmentation draw in another order. Then all
fetching stays in the caller's thread, one batch at a time, as a plain loop does it; only the copies
overlap, where the loop runs ahead of the device. So it does while batches lie ready, which takes
less time than two threads lose by taking turns at the interpreter. Once fetching is seen to take
longer, or large batches are asked for by a loop that waits for the device, so that no kernel runs
beside their copies, a staging thread takes over. It
looks on now and then, and if a generator moved while it fetched or transformed, hands back to the
caller's thread. Some fetches are watched there, where nobody else draws: if one moves a generator,
fetching stays there, and if a transform does, only that; if none does, the thread goes on.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol, final

from typing_extensions import override

from torchfast._core.errors import ClosedError
from torchfast._core.phases import DATA_WAIT, phase_outside
from torchfast._core.rng import RNGState, get_rng_state, same_rng_state
from torchfast.data.position import Position
from torchfast.data.ring import Ring, Staged
from torchfast.data.stager import (
    BUS_BYTES_PER_S,
    CPU,
    END,
    LIMIT,
    SUSPECT,
    SWIFT_S,
    Batches,
    Failure,
    Fetching,
    Stager,
    end_thread,
    join,
    stage,
)
from torchfast.data.statistics import Counters
from torchfast.data.transport import Slot

# A loader's first start what upstream needs, and the ring's memory is laid out for them. Later the
# first of each epoch starts it. They are no sign of how long others take.
NUM_FIRST = 2
# What a loop is told whose feed another one has ended.
ENDED = (
    "another iteration over this PrefetchingLoader has begun, or it was closed, which ended this "
    "one; give each loop a PrefetchingLoader of its own"
)


class Feed(Protocol):
    """One pass over upstream, batch by batch.

    Attributes:
        finished: Whether there is nothing left to take.
    """

    finished: bool

    @property
    def has_next(self) -> bool:
        """Whether a batch lies ready to be taken; False where that is not known either."""
        return False

    def take(self) -> tuple[Any, Position, int] | None:
        """Return the next batch on the device, its position and bytes moved; None at the end."""

    def turn(self) -> None:
        """Say that the batches taken so far are done with."""

    def release(self) -> None:
        """Let their memory be written again; best when the next ones have been taken."""

    def close(self) -> None:
        """Stop fetching; what was fetched ahead is dropped."""

    def extend(self, limit: int | None) -> None:
        """Let so many batches more be taken than were taken by now; None means all."""


@final
class DirectFeed(Feed):
    """Fetches in the caller's thread and moves at once: for devices without a copy stream."""

    def __init__(
        self, batches: Batches, move: Callable[[Any], tuple[Any, int]], counters: Counters
    ) -> None:
        self._batches = batches
        self._move = move
        self._counters = counters
        self.finished = False

    @override
    def take(self) -> tuple[Any, Position, int] | None:
        with phase_outside(DATA_WAIT):
            return self._take()

    def _take(self) -> tuple[Any, Position, int] | None:
        start = time.perf_counter()
        try:
            pair = next(self._batches, None)
        except BaseException:
            self.finished = True
            raise
        spent = time.perf_counter() - start
        self._counters.fetched(spent)
        self._counters.waited(spent, starved=True)
        if pair is None:
            self.finished = True
            return None
        batch, position = pair
        moved, num_bytes = self._move(batch)
        return moved, position, num_bytes

    @override
    def turn(self) -> None:
        pass

    @override
    def release(self) -> None:
        pass

    @override
    def extend(self, limit: int | None) -> None:
        pass  # nothing is fetched ahead

    @override
    def close(self) -> None:
        self.finished = True
        _close(self._batches)


@final
class RingFeed(Feed):
    """Fetches ahead where that changes no random number, through a ring of slots.

    Args:
        batches: Upstream's batches with their positions; begun in the caller's thread.
        ring: Where they travel.
        fetching: What is known about where to fetch; written to.
        counters: Written to.
        limit: Fetch no more than so many batches; what upstream has left stays there.

    Raises:
        ClosedError: In a process that was forked, where there is no staging thread.
        Exception: What upstream raised, once, behind the batches before it.
    """

    def __init__(
        self,
        batches: Batches,
        ring: Ring,
        fetching: Fetching,
        counters: Counters,
        *,
        limit: int | None = None,
    ) -> None:
        self._stager = Stager(batches, ring, counters, fetching, limit)
        self._ring = ring
        self._fetching = fetching
        self._counters = counters
        self._thread: threading.Thread | None = None
        self._held: list[Slot] = []
        self._used: list[Slot] = []
        self._released: Slot | None = None
        self._left_rng: RNGState | None = None
        self._primed: Staged | None = None
        self._num_taken = 0
        self._watches_next = False
        self.finished = False
        self._finalizer: weakref.finalize[Any, Any] | None = None

    @property
    def num_ahead(self) -> int | None:
        """How many batches are left, once upstream has come to its end; None before."""
        if self.finished:
            return 0
        return max(0, self._stager.staged.qsize() - 1) if self._stager.exhausted else None

    @property
    @override
    def has_next(self) -> bool:
        # Behind the last batch comes what says why it was the last.
        return self._primed is not None or self._stager.staged.qsize() > 1

    def prime(self) -> None:
        """Fetch the first batch in the caller's thread, before it is asked for."""
        self._primed = self._fetch_here()

    @override
    def extend(self, limit: int | None) -> None:
        self._stager.limit = None if limit is None else self._num_taken + limit

    @override
    def take(self) -> tuple[Any, Position, int] | None:
        with phase_outside(DATA_WAIT):
            return self._take()

    def _take(self) -> tuple[Any, Position, int] | None:
        if self._left_rng is not None:
            self._look_back(self._left_rng)
        if self._primed is None:
            staged = self._next()
            if staged is None:
                return None
        else:
            staged, self._primed = self._primed, None
        self._num_taken += 1
        self._held.append(staged.slot)
        if self._stager.suspects or (self._thread is None and self._fetching.is_suspect):
            self._left_rng = get_rng_state(CPU)
        return self._ring.hand_out(staged), staged.position, staged.num_bytes

    def _look_back(self, left: RNGState) -> None:
        """Note whether a generator moved since the last batch, when nobody fetched: in training."""
        self._left_rng = None
        if not same_rng_state(left, get_rng_state(CPU)):
            self._fetching.num_training_moves += 1

    @override
    def turn(self) -> None:
        if self._thread is not None and not self._stager.process.is_here:
            # The thread is the parent's, and a lock that it held then is held for ever.
            self.finished = True
            self._held.clear()
            raise ClosedError(
                f"this iteration began in process {self._stager.process.pid} and cannot go on in "
                f"its fork {os.getpid()}; make another PrefetchingLoader there"
            )
        if self._used:
            self._used += self._held
            self._held.clear()
        else:
            self._used, self._held = self._held, self._used

    @override
    def release(self) -> None:
        while self._used:
            self._released = slot = self._used.pop(0)
            self._ring.take_back(slot)

    @override
    def close(self) -> None:
        self.finished = True
        stager = self._stager
        if not stager.process.is_here:
            return  # the thread and the locks are the parent's
        if self._finalizer is not None:
            self._finalizer.detach()
        if self._thread is not None:
            stager.stop()
            self._ring.is_broken = True  # unless the thread is seen to end
            if self._thread is threading.current_thread():
                return  # the garbage collector runs anywhere
            join(self._thread)
            self._ring.is_broken = False
            self._thread = None
            self._ring.forget_wakes()
            self._take_up_suspicion()
        with ExitStack() as stack:  # all of it, whatever fails
            stack.callback(stager.staged.put, END)  # for a thread that still waits for a batch
            stack.callback(self._close_batches)
            stack.callback(self._drop_staged)
            stack.callback(self.release)
            stack.callback(self.turn)

    # -- Fetching ----------------------------------------------------------------------------------

    def _next(self) -> Staged | None:
        while not self.finished:
            if self._thread is None:
                return self._fetch_here()
            try:
                item = self._stager.staged.get_nowait()
            except queue.Empty:
                item = self._wait_for_one()
            if isinstance(item, Staged):
                return item
            if self._thread is not None:
                self._thread.join()
                self._thread = None
            if item is LIMIT:
                continue
            if item is SUSPECT:
                self._take_up_suspicion()
                continue
            self.finished = True
            if isinstance(item, Failure):
                try:
                    raise item.error
                finally:
                    del item  # its traceback refers to this frame
        return None

    def _wait_for_one(self) -> Any:
        # It may be waiting for just these slots. Otherwise they are released behind the next batch:
        # the thread that they wake would compete with this one for the interpreter.
        self.release()
        start = time.perf_counter()
        item = self._stager.staged.get()
        self._count_wait(time.perf_counter() - start)
        return item

    def _count_wait(self, seconds: float) -> None:
        self._counters.waited(seconds, starved=self._is_idle())

    def _is_idle(self) -> bool:
        return self._released is None or self._ring.transport.is_idle(self._released)

    def _fetch_here(self) -> Staged | None:
        stager, fetching = self._stager, self._fetching
        if stager.limit is not None and stager.num_fetched >= stager.limit:
            return None
        self.release()
        is_open = fetching.where is None or fetching.is_suspect or self._watches_next
        watched = is_open and stager.num_fetched > 0  # samplers draw at the first
        before = get_rng_state(CPU) if watched else None
        try:
            pair = stager.fetch()
        except BaseException:
            self.finished = True
            raise
        if self.finished:  # closed by another thread, which could not close this
            _close(stager.batches)
            return None
        self._counters.waited(stager.fetch_s, starved=self._is_idle())
        if pair is None:
            self.finished = True
            return None
        between = None if before is None else self._state_to_stage()
        slot = stager.free_slot()  # a loop ahead of the device waits here: no time of the loader's
        assert slot is not None
        staged = stage(self._ring, slot, *pair)
        if before is not None and between is not None:
            self._note_watched(between)
            moved = not same_rng_state(before, between)
            fetching.note_fetch(draws=moved or pair[1].draws_apart)
        fetching.num_here += 1
        has_become_slow = False
        if fetching.num_here > NUM_FIRST and stager.num_fetched > 1:
            seconds = stager.fetch_s + time.perf_counter() - stager.now
            copy_s = staged.num_bytes / BUS_BYTES_PER_S
            if copy_s > SWIFT_S and self._is_idle():  # asked here, some time behind the release
                seconds += copy_s
            has_become_slow = fetching.note_time(seconds)
        self._watches_next = False
        if fetching.where == "thread" and not fetching.is_swift:
            if has_become_slow:
                self._watches_next = True  # seen only now to be slow, it may draw by now
            else:
                self.start()
        return staged

    def _state_to_stage(self) -> RNGState:
        transforms = self._ring.finishes_ahead  # it may draw on the device as well
        return get_rng_state(self._ring.transport.device if transforms else CPU)

    def _note_watched(self, between: RNGState) -> None:
        """Note whether a transform drew as a batch was staged here, where nobody else draws."""
        ring, fetching = self._ring, self._fetching
        if not ring.finishes_ahead:
            return
        if not same_rng_state(between, get_rng_state(ring.transport.device)):
            ring.finish_late(drew_ahead=fetching.num_ahead > 0)
            fetching.absolve()

    def _take_up_suspicion(self) -> None:
        """Watch the fetches that come next, if the thread has ended with a suspicion."""
        if self._stager.suspects:
            self._stager.suspects = False
            self._fetching.suspect()

    def start(self) -> None:
        """Start the staging thread, unless fetches are to be watched in the caller's."""
        if self._fetching.is_suspect:
            return
        self._thread = self._stager.thread()
        if self._finalizer is not None:
            self._finalizer.detach()
        # Python's exit waits for the finalizer, which does not wait for ever.
        self._finalizer = weakref.finalize(self, end_thread, self._stager, self._thread)
        self._thread.start()  # last: an interrupt can come while it starts

    def _close_batches(self) -> None:
        try:
            _close(self._stager.batches)
        except ValueError as error:
            # Another thread fetches from it, and closes it when that is done.
            if "already executing" not in str(error):
                raise

    def _drop_staged(self) -> None:
        """Free the slots of batches that nobody has read."""
        dropped = [] if self._primed is None else [self._primed]
        self._primed = None
        while not self._stager.staged.empty():
            item = self._stager.staged.get()
            if isinstance(item, Staged):
                dropped.append(item)
        for staged in dropped:
            self._ring.take_back(staged.slot)


def _close(batches: Batches) -> None:
    """Let go of upstream's iterator, and so of its workers."""
    close = getattr(batches, "close", None)
    if close is not None:
        close()
