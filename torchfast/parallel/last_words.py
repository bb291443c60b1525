"""What a rank raised, told to the others at once.

They wait for it in a collective, in C++, until its process ends or their patience does; and if they
hear of its end, it is by an error that names an address. So a rank that fails leaves word in the
store through which the ranks have found each other: the error, and the line of the user's code. A
thread of each rank looks there twice a second, at one key. If it finds word of a step that this
rank has begun too, it waits a moment, since ranks may fail alike and all go on. Then it ends what
the rank waits in (see `connections`), and the rank raises an error that says who failed, and of
what. From then on the ranks cannot go on together, and each says so when it is asked to.

A rank that fails alone, catches its error and goes on with the next step would have its collectives
pair with those of the others' step before. So it first asks whether all have failed in that step.

The same thread finds out why ranks stand still of which none has failed: see `used_parts`.

A step does nothing of this: it counts that it has begun.
"""

from __future__ import annotations

import atexit
import itertools
import json
import logging
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Final, final

import torch.distributed as dist

from torchfast._core.errors import RankError
from torchfast._core.rank_group import RAISED
from torchfast._core.user_code import raised_at
from torchfast.parallel.connections import Ends, abort_groups, break_off, connections
from torchfast.parallel.rank_store import connection_to_store
from torchfast.parallel.used_parts import UsedParts

logger = logging.getLogger(__name__)

# In what torch raises where another rank is gone.
_OF_COLLECTIVES: Final = ("gloo", "NCCL", "Connection closed", "Connection reset", "Broken pipe")
_STORE_TIMEOUT_S: Final = 5.0
_INTERVAL_S: Final = 0.5
_RANKS_A_SECOND: Final = 2000  # that one store is asked by
_LOOKS_FOR_ALIKE: Final = 2  # at word of another rank, in which this one may come to fail, too
_PATIENCE_S: Final = 5.0  # for ranks that fail alike; they are ended before
_JOIN_S: Final = 2.0
_MOST_CHARACTERS: Final = 500
OTHER_PARTS: Final = (
    "the ranks used different parts of the model in a step ({}), and shards are gathered and "
    "reduced on all ranks at once; use the same parts in the same order on all ranks, without a "
    "branch on what each draws or is given, or take shard='ddp' with unused_parameters=True"
)
_ANY: Final = "any"  # how often a word was left


@final
@dataclass(frozen=True, kw_only=True)
class _Word:
    """What a rank leaves.

    Attributes:
        entry: Of its bodies under `LastWords.heard`, which one it failed in.
        text: The error, and where; empty where it only passes on that others failed.
        is_broken: Whether its connections are, so that it cannot go on.
        ends: Of its connections.
        is_over: Whether no rank can go on, in whichever body it is: what was found lies behind.
    """

    entry: int
    text: str
    is_broken: bool
    ends: list[Ends]
    is_over: bool = False


@final
class LastWords:
    """The errors of the ranks of a process group, which each rank builds as often as the others.

    Args:
        rank: This one.
        world_size: How many there are.

    Attributes:
        used: What this rank has used of its models, in this step and some before it.
    """

    _numbers = itertools.count()

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._others = [other for other in range(world_size) if other != rank]
        self._prefix = f"torchfast/last_words/{next(self._numbers)}"
        self._world = weakref.ref(_world())
        self._interval_s = max(_INTERVAL_S, world_size / _RANKS_A_SECOND)
        self._entry = 0  # counts outermost bodies, as many on each rank
        self._is_inside = False
        self._failed_at = self._settled = 0
        self._heard = ""  # what others have raised, once this rank cannot go on for it
        self._store: Any = None
        self._thread: threading.Thread | None = None
        self._aborts: list[threading.Thread] = []
        self._ends = threading.Event()
        self.used = UsedParts(rank)

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Tell the others if the body fails, and raise if another rank fails in it.

        All ranks enter as many. One within another is a part of it.

        Raises:
            RankError: Another rank has failed, or this one has in another body, alone.
        """
        if self._is_inside:
            yield
            return
        self._enter()
        try:
            yield
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._is_inside = False
        self._raise_heard(None)

    def told(self) -> str:
        """Return what other ranks have raised for which this one cannot go on."""
        return self._heard

    @property
    def has_failed(self) -> bool:
        """Whether this rank cannot go on, or does not know whether it can."""
        return bool(self._heard) or self._failed_at > self._settled

    def close(self) -> None:
        """End the threads; a second call does nothing."""
        self._ends.set()
        for thread in (self._thread, *self._aborts):
            if thread is not None:
                thread.join(_JOIN_S)

    # -- The thread that trains --------------------------------------------------------------------

    def _enter(self) -> None:
        self._raise_heard(None)
        if self._failed_at > self._settled:
            self._settle()
        if self._thread is None:
            self._store = connection_to_store(self._prefix, _STORE_TIMEOUT_S)
            self._thread = threading.Thread(
                target=self._listen, name="torchfast-last-words", daemon=True
            )
            self._thread.start()
            # A thread that still is in torch when the interpreter ends takes the process down.
            atexit.register(self.close)
        self._entry += 1
        self._is_inside = True

    def _raise_heard(self, cause: BaseException | None) -> None:
        if self._heard:
            raise RankError(f"{RAISED}{self._heard}") from cause

    def _fail(self, error: BaseException) -> None:
        """Leave word of an error; raise another one if it only tells that others failed."""
        is_broken = _is_of_collectives(error)
        if is_broken and not self._heard:
            self._heard = _told(self._pending(self._words()))
        self._failed_at = self._entry
        if self._heard:
            self._leave("", is_broken=True)
            self._raise_heard(error)
        text = "" if isinstance(error, RankError) else _text_of(error)
        self._leave(text, is_broken=is_broken)

    def _settle(self) -> None:
        """Find out that all ranks have failed in the body in which this one has.

        Raises:
            RankError: Not all, or not so that they could go on.
        """
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            words = self._words()
            alike = [rank for rank, word in words.items() if word.entry >= self._failed_at]
            is_broken = any(word.is_broken for word in words.values())
            if len(alike) == len(self._others) and not is_broken:
                self._settled = self._failed_at
                return
            if is_broken or time.monotonic() > deadline:
                raise RankError(
                    f"rank {self._rank} raised an error that not all ranks raised, so they cannot "
                    "go on together; let such an error end the process"
                )
            time.sleep(0.02)

    # -- The thread that listens -------------------------------------------------------------------

    def _listen(self) -> None:
        seen, waits_in = 0, 0
        still, step = 0, None
        number, words = b"", dict[int, _Word]()
        while not self._ends.wait(self._interval_s):
            if self._is_over():
                atexit.unregister(self.close)
                return
            try:
                is_any = self._store.check([_ANY])
                if is_any and (now := self._store.get(_ANY)) != number:
                    number, words = now, self._words()
            except Exception as error:  # of any store, which is gone with the rank that held it
                logger.debug("the other ranks' errors cannot be asked for: %s", error)
                return
            still = still + 1 if step == (step := self._step()) else 0
            if step is not None and still > _LOOKS_FOR_ALIKE:
                differs = self._other_parts()
                if differs and step == self._step():
                    self._end_wait({}, OTHER_PARTS.format(differs))
                    return
            found = self._pending(words)
            if not found or waits_in != self._entry:
                seen, waits_in = 0, self._entry
            seen += bool(found)
            if seen > _LOOKS_FOR_ALIKE:
                self._end_wait(found)
                return

    def _step(self) -> tuple[int, ...] | None:
        """Return what is another in each forward of shards, None where there are no shards."""
        number = self.used.number()
        return None if number is None else (self._entry, *number)

    def _other_parts(self) -> str:
        try:
            return self.used.difference(self._store)
        except Exception as error:  # of any store, or of a model that is taken apart meanwhile
            logger.debug("what the ranks used cannot be compared: %s", error)
            return ""

    def _end_wait(self, found: dict[int, _Word], own: str = "") -> None:
        """End what this rank waits in, for ranks that failed or for what it found, for good."""
        # First the word for the others: a process whose training has heard of it may end at once.
        self._leave(own, is_broken=True, is_over=bool(own))
        self._heard = own or _told(found)
        logger.error("rank %d ends what it waits in: %s", self._rank, self._heard)
        self._aborts = abort_groups()
        while not (self._ends.is_set() or self._is_over()):  # others hear of it a moment later
            words = self._words()
            break_off(end for word in words.values() for end in word.ends)
            if len(words) in (0, len(self._others)):  # none where the store is gone
                return
            self._ends.wait(self._interval_s)

    def _pending(self, words: dict[int, _Word]) -> dict[int, _Word]:
        """Return those of bodies that this rank has begun, too, and not failed in; or of any."""
        return {
            rank: word
            for rank, word in words.items()
            if word.is_over or self._failed_at < word.entry <= self._entry
        }

    def _is_over(self) -> bool:
        world = self._world()
        return world is None or _world() is not world

    # -- The store ---------------------------------------------------------------------------------

    def _leave(self, text: str, *, is_broken: bool, is_over: bool = False) -> None:
        try:
            ends = connections(self._store)
            word = _Word(
                entry=self._entry, text=text, is_broken=is_broken, ends=ends, is_over=is_over
            )
            self._store.set(str(self._rank), json.dumps(asdict(word)))
            self._store.add(_ANY, 1)
        except Exception as error:  # of any store; what is raised here must be the user's own
            logger.debug("no word could be left for the other ranks: %s", error)

    def _words(self) -> dict[int, _Word]:
        """Return what the other ranks have left."""
        found = {}
        try:
            for rank in self._others:
                if self._store.check([str(rank)]):
                    word = json.loads(self._store.get(str(rank)))
                    ends: list[Ends] = [tuple(each) for each in word.pop("ends")]
                    found[rank] = _Word(**word, ends=ends)
        except Exception as error:  # the store is gone with the rank that held it
            logger.debug("the other ranks cannot be asked: %s", error)
        return found


def _world() -> Any:
    return dist.group.WORLD


def _told(words: dict[int, _Word]) -> str:
    """Return what they say: the errors that others only follow, where there are such."""
    first = {rank: word for rank, word in words.items() if word.text and not word.is_broken}
    chosen = first or words
    return "; ".join(f"rank {rank}: {word.text or 'it follows'}" for rank, word in chosen.items())


def _text_of(error: BaseException) -> str:
    where = raised_at(error)
    text = f"{type(error).__name__}: {error}"[:_MOST_CHARACTERS]
    return text if where is None else f"{text}, at {where}"


def _is_of_collectives(error: BaseException) -> bool:
    text = str(error)
    return isinstance(error, RuntimeError) and any(part in text for part in _OF_COLLECTIVES)
