"""The thread that fetches batches and stages them, and what is known about where to fetch."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Literal, final

import torch

from torchfast._core.decisions import Decision, Outcome
from torchfast._core.rng import RNGState, get_rng_state, same_rng_state
from torchfast.data.position import Position
from torchfast.data.process import this_process
from torchfast.data.ring import Ring, Staged
from torchfast.data.statistics import Counters
from torchfast.data.transport import Slot

CPU = torch.device("cpu")
LOOKS_FIRST, LOOKS_EVERY = 8, 16  # which of the thread's fetches are watched
# One takes as long as staging several small batches.
MANY, LOOKS_EVERY_OF_MANY = 256, 64
# Whether it was a fetch of the thread that moved a generator, or the training meanwhile, is seen in
# the caller's thread, where so many fetches are watched: more at the next suspicion, for data sets
# that draw rarely. Behind the last of these nobody looks any more.
WATCHED = (32, 128, 512)
WATCHED_IF_TRAINING_DRAWS = 4  # enough if the training was seen to draw as often
STARTS_IN_S = 1.0
# Fetching and staging a batch in no more than this costs a loop less than another thread, which
# takes turns with it at the interpreter. Time beyond it adds up, and time below it pays it off.
SWIFT_S = 300e-6
MOST_AT_ONCE_S = 2e-3  # of one batch: a hiccup is no sign
TOO_SLOW_S = 5e-3
# But many are, such as one in each shard: they add up on their own, and are paid off slowly.
HICCUP_S = 0.05
PAID_OFF_S = 5e-6
MANY_HICCUPS_S = 0.15
BUS_BYTES_PER_S = 25e9  # about; a copy that finds the device idle delays a loop as a fetch does
EXIT_S = 5.0  # how long the exit of Python waits for a fetch in progress

Batches = Iterator[tuple[Any, Position]]


@final
@dataclass
class Fetching:
    """Where a loader's batches are fetched, found out once and kept for its life.

    Attributes:
        where: ``"thread"``, ``"caller"``, or None while it is not known.
        reason: Why.
        training_draws: Whether a generator that moves is taken to be moved by the training.
        num_ahead: Batches that were fetched in the thread.
        num_moves: How often generators were set by the loader itself; odd while one is.
        num_watched: Fetches watched in the caller's thread since a generator moved during one of
            the thread's; None while none is suspected.
        num_training_moves: How often the training moved a generator since then.
        num_cleared: Suspicions that no watched fetch has confirmed.
        is_lazy: Whether the thread waits until fetching is seen to be slow.
        behind_s: How much slower fetching was of late than what is not worth a thread.
        hiccups_s: The time that single slow fetches have taken.
        num_here: Batches that were fetched in the caller's thread.
    """

    where: Literal["thread", "caller"] | None = None
    reason: str = "not known before the second batch"
    training_draws: bool = False
    num_ahead: int = 0
    num_moves: int = 0
    num_watched: int | None = None
    num_training_moves: int = 0
    num_cleared: int = 0
    is_lazy: bool = False
    behind_s: float = 0.0
    hiccups_s: float = 0.0
    num_here: int = 0

    @property
    def is_swift(self) -> bool:
        """Whether batches that could be fetched in the thread take no time worth it."""
        is_slow = self.behind_s >= TOO_SLOW_S or self.hiccups_s >= MANY_HICCUPS_S
        return self.is_lazy and not is_slow

    @property
    def is_ahead(self) -> bool:
        """Whether batches are fetched in the thread."""
        return self.where == "thread" and not self.is_suspect and not self.is_swift

    def note_time(self, seconds: float) -> bool:
        """Note what a batch of the caller's thread took: to fetch and stage, and to copy alone.

        Returns:
            Whether they are seen to be slow now, and were not before.
        """
        more = seconds - SWIFT_S
        if more <= 0.0 and not self.behind_s and not self.hiccups_s:
            return False  # nothing to add, and nothing to pay off: the steady case
        was_swift = self.is_swift
        if was_swift:
            self.behind_s = max(0.0, self.behind_s + min(more, MOST_AT_ONCE_S))
            self.hiccups_s = max(0.0, self.hiccups_s + min(max(more, 0.0), HICCUP_S) - PAID_OFF_S)
        return was_swift and not self.is_swift

    @property
    def is_suspect(self) -> bool:
        """Whether fetches are watched in the caller's thread before the thread goes on."""
        return self.num_watched is not None

    @contextmanager
    def setting_generators(self) -> Iterator[None]:
        """Let the body set generators without any fetch being suspected of it."""
        self.num_moves += 1
        try:
            yield
        finally:
            self.num_moves += 1

    def suspect(self) -> None:
        """Note that a generator moved during a fetch of the thread."""
        if self.where == "thread" and not self.training_draws and self.num_watched is None:
            self.num_watched = 0

    def absolve(self) -> None:
        """Note that it was the transform which moved a generator."""
        self.num_watched, self.num_training_moves = None, 0

    def note_fetch(self, *, draws: bool) -> None:
        """Note whether a fetch in the caller's thread, where nobody else draws, moved a generator.

        That the training moved none lately is no sign that fetching did: it may draw once an epoch.
        """
        if self.num_watched is not None and not draws:
            self.num_watched += 1
            is_training = (
                min(self.num_watched, self.num_training_moves) >= WATCHED_IF_TRAINING_DRAWS
            )
            if not is_training and self.num_watched < WATCHED[self.num_cleared]:
                return
            self.num_cleared += 1
            self.training_draws = is_training or self.num_cleared == len(WATCHED)
        self.num_watched, self.num_training_moves = None, 0
        if draws:
            self.where = "caller"
            self.reason = (
                "fetching draws from a random generator of this process, so it keeps its turn "
                "with the training; with worker processes batches are fetched ahead"
            )
        else:
            self.where = "thread"
            self.reason = "fetching draws no random number"

    def decision(self, depth: int) -> Decision:
        """Return what became of fetching ahead."""
        detail = self.reason
        if self.where == "thread":
            detail += (
                "; it takes too little time to be worth a thread, and the copies run ahead"
                if self.is_swift
                else f", so it runs ahead in a thread, up to {depth} steps"
            )
        if self.is_suspect:
            detail = (
                "a random generator of this process moved while a batch was fetched ahead, so "
                "fetching keeps its turn with the training until it is known whose draw that was"
            )
        elif self.where == "thread" and self.num_cleared:
            detail += (
                f"; generators moved meanwhile (seen {self.num_cleared}x), but by none of the "
                "fetches that were watched for it in the training's thread"
            )
        if self.where == "caller" and self.num_ahead:
            detail += (
                f"; {self.num_ahead} batches had been fetched ahead before that was seen, and "
                "their random numbers fell in another order than a plain loop's"
            )
        aside = self.where == "caller" or self.is_suspect
        outcome: Outcome = "stepped aside" if aside else "applied"
        return Decision(lever="prefetch", outcome=outcome, detail=detail)


@dataclass(frozen=True, slots=True)
class Failure:
    """What ended the thread."""

    error: BaseException


END = object()
SUSPECT = object()  # a generator of the host moved during a fetch, or a transform
LIMIT = object()


class Stager:
    """Fetches ahead into a ring, in a thread of its own.

    The thread refers to this object and this object to no feed, so a feed that is let go is
    collected, and takes the thread with it.
    """

    def __init__(
        self,
        batches: Batches,
        ring: Ring,
        counters: Counters,
        fetching: Fetching,
        limit: int | None,
    ) -> None:
        self.batches = batches
        self.ring = ring
        self.counters = counters
        self.limit = limit
        self._fetching = fetching
        self.num_fetched = 0
        self.staged: SimpleQueue[Any] = SimpleQueue()
        self.stopped = False
        self.suspects = False  # of drawing random numbers; the thread has ended
        self.exhausted = False
        self.process = this_process()
        self._num_before = 0  # fetches before the thread's first
        # The clock is read as seldom as can be: where it is a call of the system, it is slow.
        self.now = self.fetch_s = 0.0

    def fetch(self) -> tuple[Any, Position] | None:
        """Return upstream's next batch, None at its end."""
        start = time.perf_counter()
        pair = next(self.batches, None)
        self.now = time.perf_counter()
        self.fetch_s = self.now - start
        self.counters.fetched(self.fetch_s)
        self.num_fetched += 1
        return pair

    def stop(self) -> None:
        """Let the thread end after the fetch it is in."""
        self.stopped = True
        self.ring.wake()

    def run(self) -> None:
        """Fetch and stage until the end, an error, a limit or a suspicion."""
        followed = None
        try:
            while not self.stopped:
                if self.limit is not None and self.num_fetched >= self.limit:
                    self.staged.put(LIMIT)
                    return
                moves, before = self._fetching.num_moves, self._state()
                followed = self.ring.transport.follow(followed)
                pair = self.fetch()
                if pair is None:
                    self.exhausted = True
                    self.staged.put(END)
                    return
                self._fetching.num_ahead += 1
                suspect = before is not None and self._moved(before, moves)
                slot = self.free_slot()
                if slot is None:
                    return
                # Looked at apart: in between, the training of a whole step may have drawn.
                moves = self._fetching.num_moves
                looks = before is not None and self.ring.finishes_ahead
                before = get_rng_state(CPU) if looks else None
                staged = stage(self.ring, slot, *pair)
                suspect = suspect or (before is not None and self._moved(before, moves))
                self.staged.put(staged)
                del staged  # it would hold the batch while the next one is fetched
                if suspect:
                    self.suspects = True
                    self.staged.put(SUSPECT)
                    return
        except BaseException as error:
            self.staged.put(Failure(error))

    def _state(self) -> RNGState | None:
        number = self.num_fetched - self._num_before
        every = LOOKS_EVERY if number < MANY else LOOKS_EVERY_OF_MANY
        due = number <= LOOKS_FIRST or number % every == 0
        return get_rng_state(CPU) if due and not self._fetching.training_draws else None

    def _moved(self, before: RNGState, moves: int) -> bool:
        """Whether a generator moved since then, and not because the loader itself set it."""
        moved = not same_rng_state(before, get_rng_state(CPU))
        return moved and moves % 2 == 0 and moves == self._fetching.num_moves

    def free_slot(self) -> Slot | None:
        """Wait for a slot whose last copy is done; None once this was told to stop."""
        fetched_at = self.now
        slot = self.ring.free.get()
        while slot is None and not self.stopped:  # a wake that was meant for another
            slot = self.ring.free.get()
        if slot is not None:
            try:
                self.ring.settle(slot)
            except BaseException:  # such as an interrupt: a loop ahead of the device waits here
                self.ring.take_back(slot)
                raise
        self.now = time.perf_counter()
        self.counters.stager_wait_s += self.now - fetched_at
        return slot

    def thread(self) -> threading.Thread:
        """Return a thread to run in; it sees torch's thread-local settings as the caller does."""
        self._num_before = self.num_fetched
        context = contextvars.copy_context()
        settings = _Settings(self.ring.transport.device)

        def run() -> None:
            try:
                with settings.applied():
                    context.run(self.run)
            except BaseException as error:  # nobody waits for a thread that says nothing
                self.staged.put(Failure(error))

        # Not joined by Python's exit: a fetch may never return.
        return threading.Thread(target=run, name="torchfast-stager", daemon=True)


def stage(ring: Ring, slot: Slot, batch: Any, position: Position) -> Staged:
    """Stage a batch; the slot is free again if that fails."""
    try:
        return ring.stage(slot, batch, position)
    except BaseException:
        ring.take_back(slot)
        raise


def join(thread: threading.Thread) -> None:
    """Wait for a thread to end, also for one whose start an interrupt has cut short."""
    deadline = time.monotonic() + STARTS_IN_S
    while True:
        try:
            thread.join()
            return
        except RuntimeError:  # not started, as far as it knows
            if time.monotonic() > deadline:
                return
            time.sleep(0.001)


def end_thread(stager: Stager, thread: threading.Thread) -> None:
    """End a thread whose feed is gone, or the exit of Python has come."""
    if not stager.process.is_here:
        return
    stager.stop()
    if thread is not threading.current_thread():
        with suppress(RuntimeError):  # an interrupt has cut its start short: it ends by itself
            thread.join(timeout=EXIT_S)


class _Settings:
    """torch's thread-local settings, as the thread that makes this has them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._grad_enabled = torch.is_grad_enabled()
        self._inference_mode = torch.is_inference_mode_enabled()
        self._default_device = torch.get_default_device()
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind))
            for kind in dict.fromkeys(("cpu", device.type))
            if torch.is_autocast_enabled(kind)
        ]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let another thread have them."""
        with ExitStack() as stack:
            if self._inference_mode:  # switching it off would switch gradients on
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self._grad_enabled))
            for kind, dtype in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype))
            if self._default_device != CPU:
                stack.enter_context(self._default_device)
            if self._device.type == "cuda":
                stack.enter_context(torch.cuda.device(self._device))
            yield
