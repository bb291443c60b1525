"""Ranks that agree with one another, on the host and beside the training.

What ranks decide, they must decide alike: one that saves while another does not, or takes a step
while another has no batch left, leaves all of them waiting for ever. So they tell one another what
they are about to do, or what became of it, and each draws the same conclusion from what all said.

That goes over a group of their own on the CPU (gloo). It orders nothing on the device, waits for
nothing there, and may be used in a thread beside the training. What is said is small: Python values
of this very job, which trusts itself. A rank that dies closes its connections, so the others hear
of it at once; one that hangs is given up after the timeout of the group.

Every call is collective: all ranks of a group make the same calls in the same order, and one thread
at a time makes them. In a run of one process everything returns at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Timer
from typing import Any, Final, TypeVar, final
from weakref import WeakSet

import torch
import torch.distributed as dist
from typing_extensions import override

from torchfast._core.closing import Closing
from torchfast._core.errors import RankError

logger = logging.getLogger(__name__)

T = TypeVar("T")

# As long as torch waits by itself: a slow disk is no dead rank.
TIMEOUT_S: Final = 1800.0
# Said by all ranks but the one that failed.
RAISED: Final = "another rank raised an error, so no rank can go on: "
# And far longer than ranks that make the same calls are apart.
_PATIENCE_S: Final = 60.0


def is_distributed() -> bool:
    """Whether this process is one of several, and knows the others already."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


@final
class RankGroup(Closing):
    """All ranks of the run, or this process alone.

    Made by `join` and `alone`.

    Attributes:
        rank: The number of this one.
        size: How many there are.
    """

    def __init__(
        self, group: Any, rank: int, size: int, told: Callable[[], str] = lambda: ""
    ) -> None:
        self._group, self._told = group, told
        self._is_early = False
        self._graphed: WeakSet[Closing] = WeakSet()
        self.rank = rank
        self.size = size

    @classmethod
    def alone(cls) -> RankGroup:
        """Return a group of this process only, whatever else runs."""
        return cls(None, 0, 1)

    @classmethod
    def join(cls, timeout_s: float = TIMEOUT_S, told: Callable[[], str] = lambda: "") -> RankGroup:
        """Return a new group of all ranks, collectively; of this process where it is the only one.

        Args:
            timeout_s: How long a rank waits for the others in one call.
            told: Returns what another rank is known to have raised, for errors.
        """
        if not is_distributed():
            group = cls.alone()
            group._is_early = True
            return group
        rank = dist.get_rank()
        with _waited_for(rank, "make a group, as a Trainer and a CheckpointManager do"):
            all_ranks = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        return cls(all_ranks, rank, dist.get_world_size(), told)

    @property
    def is_outdated(self) -> bool:
        """Whether it was to be of all ranks, and the process did not know the others yet."""
        return self._is_early and is_distributed()

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which does what is done once."""
        return self.rank == 0

    def gather(self, value: T, what: str | None = None) -> list[T]:
        """Return what each rank gave, by rank.

        Args:
            value: What this one gives.
            what: The user's call, where it is one that only some ranks may have made.

        Raises:
            RankError: A rank cannot be reached.
        """
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with _reached(self._told), _waited_for(self.rank, what):
            dist.all_gather_object(values, (value,), group=self._checked())
        return [value for (value,) in values]

    def together(self, work: Callable[[], T], what: str | None = None) -> list[T]:
        """Do ``work`` on each rank; return what it returned on each, or raise on all of them.

        Args:
            work: What this one does.
            what: As in `gather`.

        Raises:
            BaseException: What it raised here.
            RankError: It raised on other ranks, which the message names; or one cannot be reached.
        """
        if self.size == 1:
            return [work()]
        own: BaseException | None = None
        result: Any = None
        try:
            result = work()
        except BaseException as error:
            own = error
        try:
            outcomes = self.gather((None if own is None else _told(own), result), what)
        except RankError as error:
            if own is not None:
                raise own from error  # it tells more than that nobody listens any more
            raise
        if own is not None:
            raise own
        failed = {rank: text for rank, (text, _) in enumerate(outcomes) if text is not None}
        if failed:
            raise RankError("; ".join(f"rank {rank}: {text}" for rank, text in failed.items()))
        return [value for _, value in outcomes]

    def alike(self, work: Callable[[], T]) -> T:
        """Do ``work`` on each rank; return what it returned here, or raise as `together` does."""
        kept: list[T] = []
        self.together(lambda: kept.append(work()))
        return kept[0]

    def send_from_first(self, tensor: torch.Tensor) -> None:
        """Make a tensor on the host what it is on the first rank, in place.

        Raises:
            RankError: A rank cannot be reached.
        """
        if self.size > 1:
            with _reached(self._told):
                dist.broadcast(tensor, src=0, group=self._checked())

    def all_agree(self, yes: bool) -> bool:
        """Return whether all ranks say yes.

        Raises:
            RankError: A rank cannot be reached.
        """
        return self.least(int(yes)).wait() == 1

    def least(self, value: int) -> Least:
        """Begin to find the least of what the ranks give, and do not wait for it."""
        number = torch.tensor([value], dtype=torch.int64, device="cpu")
        return Least(self._reduced(number), number)

    def span(self, value: int) -> tuple[int, int]:
        """Return the least and the greatest of what the ranks give, found in one round.

        Raises:
            RankError: A rank cannot be reached.
        """
        ends = torch.tensor([value, -value], dtype=torch.int64, device="cpu")
        self._reduced(ends).wait()
        least, greatest = ends.tolist()
        return least, -greatest

    def each(self, value: int) -> Each:
        """Begin to find out what each rank gives, and do not wait for it."""
        number = torch.tensor([value], dtype=torch.int64, device="cpu")
        numbers = number.repeat(self.size, 1)

        def gather() -> Any:
            return dist.all_gather(list(numbers), number, group=self._checked(), async_op=True)

        return Each(self._begin(gather), numbers)

    def _reduced(self, numbers: torch.Tensor) -> _Arrival:
        """Begin to make each number the least of the ranks'."""

        def reduce() -> Any:
            group = self._checked()
            return dist.all_reduce(numbers, dist.ReduceOp.MIN, group=group, async_op=True)

        return self._begin(reduce)

    def _begin(self, collective: Callable[[], Any]) -> _Arrival:
        if self.size == 1:
            return _Arrival(None, self._told)
        with _reached(self._told):
            return _Arrival(collective(), self._told)

    def holds_graphs(self, graphed: Closing) -> None:
        """Note who may hold graphs of what all ranks do, until it is gone; see `drop_graphs`."""
        self._graphed.add(graphed)

    def drop_graphs(self) -> None:
        """Close who holds graphs with collectives, before groups of the device are destroyed.

        NCCL ends a communicator only once no graph is left that was captured with it, and waits.
        """
        for graphed in list(self._graphed):
            with suppress(RuntimeError):  # of a device that has failed, of which nothing is left
                graphed.close()

    def _checked(self) -> Any:
        # torch takes None for all ranks, and a call on a group that is gone for none of its own:
        # it warns, and returns as if all had been said.
        if self._group is None or dist.get_rank(self._group) < 0:
            raise RuntimeError("the group of ranks is closed")
        return self._group

    @override
    def close(self) -> None:
        """Leave the group; a second call does nothing."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            with suppress(ValueError, RuntimeError):  # destroyed with all others already
                dist.destroy_process_group(group)


@final
class Least:
    """The least of some numbers, on its way."""

    def __init__(self, arrival: _Arrival, number: torch.Tensor) -> None:
        self._arrival, self._number = arrival, number

    def wait(self) -> int:
        """Return it, once all ranks have given theirs.

        Raises:
            RankError: A rank cannot be reached.
        """
        self._arrival.wait()
        return int(self._number)


@final
class Each:
    """A number of each rank, on its way."""

    def __init__(self, arrival: _Arrival, numbers: torch.Tensor) -> None:
        self._arrival, self._numbers = arrival, numbers

    def wait(self) -> list[int]:
        """Return them by rank, once all have given theirs.

        Raises:
            RankError: A rank cannot be reached.
        """
        self._arrival.wait()
        return [int(number) for number in self._numbers]


@final
class _Arrival:
    """When what a collective brings is there."""

    def __init__(self, work: Any, told: Callable[[], str]) -> None:
        self._work, self._told = work, told

    def wait(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            with _reached(self._told):
                work.wait()


@final
class _reached:  # noqa: N801
    """Turn what gloo raises into an error that says what it means."""

    def __init__(self, told: Callable[[], str]) -> None:
        self._told = told

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # A group that was destroyed meanwhile is a ValueError of torch's.
        if isinstance(error, RuntimeError | ValueError) and not isinstance(error, RankError):
            if told := self._told():
                raise RankError(f"{RAISED}{told}") from error
            raise RankError(
                f"another rank cannot be reached ({str(error).splitlines()[0][:200]}): it has "
                "ended or hangs, or the process group was destroyed first; look at the end of the "
                "other ranks' output"
            ) from error


@contextmanager
def _waited_for(rank: int, what: str | None) -> Iterator[None]:
    """Say so where the others let this rank wait: else a call on one rank only is a mute hang."""
    if what is None:
        yield
        return
    timer = Timer(
        _PATIENCE_S,
        logger.warning,
        (
            "rank %d has waited %g s for the other ranks to %s; make, save, load and evaluate on "
            "all ranks, or give a CheckpointManager of one process across_ranks=False",
            rank,
            _PATIENCE_S,
            what,
        ),
    )
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
