"""PrefetchingLoader: batches that are on the device when the step asks for them.

A training loop that copies a batch and then computes leaves the device idle while it copies, and
idle again while the next batch is loaded. Here three things go on at once: a thread fetches from
the loader and fills pinned memory, a copy stream moves what is filled, and the training's stream
computes on what has arrived. Events keep the order between them, and nothing waits on the host.

It helps where loading or copying takes a noticeable part of a step. It does not where the loader
supplies less than the step consumes: then the device waits all the same, and the report says so.
On a CPU there is nothing to overlap with: batches are fetched one by one, with the same semantics.

With ``reuse=True`` a batch is valid until the next one is asked for. A loader that hands out device
memory must not write into it again, nor a DataLoader or a list into pinned memory. What is drawn at
random is drawn where a plain loop draws it, or the report says why not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, final

import torch
from torch.utils.data import DataLoader
from typing_extensions import override

from torchfast._core.arguments import (
    check_batches,
    check_flag,
    check_flag_or_auto,
    check_int,
    explain_keywords,
)
from torchfast._core.closing import Closing
from torchfast._core.decisions import Report
from torchfast._core.device import check_device
from torchfast._core.errors import ClosedError, IterationError
from torchfast._core.rank_group import RankGroup
from torchfast.data.arrival import move_to
from torchfast.data.epoch_ahead import EpochAhead
from torchfast.data.even_ends import check_ranks, even, heard
from torchfast.data.feed import ENDED, DirectFeed, Feed, RingFeed
from torchfast.data.grouping import AtOnce, Grouping
from torchfast.data.loader_report import loader_report
from torchfast.data.monitored import pinned_by, unpin
from torchfast.data.position import PositionedLoader
from torchfast.data.ring import Ring
from torchfast.data.stager import Fetching
from torchfast.data.statistics import Counters, LoaderStatistics
from torchfast.data.structure import StructureCheck
from torchfast.data.transport import Transport, transport_for


@final
class PrefetchingLoader(Closing):
    """Iterates over a loader's batches on the device, fetched and copied ahead.

    Args:
        loader: Any iterable of batches; nested at will, of one shape or many. ``torch``'s
            DataLoader, torchdata's, a list, a generator. Of another PrefetchingLoader what becomes
            of a batch is kept (``transform``, ``transfer_dtype``, ``channels_last``).
        device: Where the tensors go.
        depth: Batches in flight beyond the one in use. Each costs one batch of pinned memory and
            one of device memory.
        reuse: Hand out the ring's own memory: a batch is valid until the next one is asked for.
            False hands out memory of its own, for one copy on the device more.
        accumulate: With more than 1, yields `MicroBatches` of so many batches; the last group of
            an epoch may be shorter, and none crosses an epoch.
        unroll: Yields `StepBatches`, what so many steps take, for ``trainer.steps``; the last ones
            of an epoch may be fewer.
        transform: ``batch -> batch``, run on the device behind the copy, on the copy stream:
            normalise there, cast uint8 to float there, and fewer bytes cross the bus. It may write
            into a batch that came from the host. One that draws random numbers runs on the
            training's stream, where a plain loop would run it.
        transfer_dtype: What floating-point tensors are rounded to before they cross, and stay.
        channels_last: Lay 4-d tensors out as NHWC, on the device, behind ``transform``.
        across_epochs: Begin the next epoch while the last batches of this one are consumed.
            Its first draws are then made with the generators as they stand at that moment.
        background: ``"auto"`` fetches in a thread once that is seen to take time, or large copies
            to find the device idle. True, and ``across_epochs``, do so from the second batch on.
            False never does, for loaders that must stay in the thread that made them.
        strict: Raise where a batch has a leaf that cannot be moved, or another structure than
            the first one.
        ranks: Who end an epoch together, as a Trainer gives it that trains on several ranks.

    Raises:
        TypeError: An argument of the wrong kind, or an unknown keyword.
        ValueError: An argument out of range.
        UnsupportedDeviceError: A device that this machine lacks.

    Numerics: Exact, but for ``transfer_dtype`` and what ``transform`` does.
    Synchronizes: Whoever stages waits for copies: the thread, or without one a loop that is
        ``depth`` steps ahead of the device.

    Example:
        >>> import torch
        >>> loader = [(torch.ones(2, 3), torch.zeros(2))] * 4
        >>> with PrefetchingLoader(loader, "cpu", depth=2) as batches:
        ...     total = sum(float(inputs.sum()) for inputs, targets in batches)
        >>> total
        24.0
    """

    @explain_keywords
    def __init__(
        self,
        loader: Iterable[Any],
        device: torch.device | str | int,
        *,
        depth: int = 2,
        reuse: bool = False,
        accumulate: int = 1,
        unroll: int | None = None,
        transform: Callable[[Any], Any] | None = None,
        transfer_dtype: torch.dtype | None = None,
        channels_last: bool = False,
        across_epochs: bool = False,
        background: bool | Literal["auto"] = "auto",
        strict: bool = False,
        ranks: RankGroup | None = None,
    ) -> None:
        check_batches("loader", loader)
        # Wrapped twice, it would group groups. The position is one for all that wrap a loader.
        self._upstream: PositionedLoader = (
            loader._upstream if isinstance(loader, PrefetchingLoader) else PositionedLoader(loader)
        )
        self.loader: Iterable[Any] = self._upstream.loader
        self.device = check_device(device)
        self.depth = check_int("depth", depth, minimum=1)
        self.ranks = check_ranks(ranks)
        self._grouping = Grouping(accumulate, unroll, are_even=self.ranks.size > 1)
        self.accumulate, self.unroll = self._grouping.accumulate, self._grouping.unroll
        self.reuse = check_flag("reuse", reuse)
        self.across_epochs = check_flag("across_epochs", across_epochs)
        self.background = check_flag_or_auto("background", background)
        self._check = StructureCheck() if check_flag("strict", strict) else None
        inner = loader._move if isinstance(loader, PrefetchingLoader) else None
        check_flag("channels_last", channels_last)
        self._move = move_to(
            self.loader, self.device, transform, transfer_dtype, channels_last, inner
        )
        self.channels_last = self._move.finish.channels_last
        self._epoch: int | None = None
        self.epoch_ended = False  # whether the last iteration came to the end of its epoch
        self._iteration = 0
        self._closed = False
        self._ring: Ring | None = None
        self._feed: Feed | None = None
        self._counters = Counters()
        self._fetching = Fetching() if self.background else Fetching("caller", "background=False")
        self._fetching.is_lazy = self.background == "auto" and not self.across_epochs
        self._ahead = EpochAhead(self._upstream, self._fetching)

    # -- The loader's own --------------------------------------------------------------------------

    @property
    def is_one_shot(self) -> bool:
        """Whether the loader is an iterator, which serves one epoch only."""
        return self._upstream.is_one_shot

    def set_epoch(self, epoch: int) -> None:
        """Tell the loader, its samplers and its data set which epoch starts, where they ask."""
        if self._ahead.epoch != epoch:
            self._upstream.tell_epoch(epoch)
        self._epoch = epoch

    def __len__(self) -> int:
        """Return how often an epoch yields; TypeError where the loader has no length."""
        return -(-self.steps_in_epoch() // (self.unroll or 1))

    def steps_in_epoch(self) -> int:
        """Return for how many steps an epoch has batches; TypeError likewise."""
        return self._grouping.steps_in_epoch(self.loader)

    def ungrouped(self) -> PrefetchingLoader:
        """Return another one over its loader, at the start: single batches, to this rank's end."""
        return PrefetchingLoader(
            self.loader,
            self.device,
            depth=self.depth,
            reuse=True,
            transform=self._move.finish.transform,
            transfer_dtype=self._move.transfer_dtype,
            channels_last=self.channels_last,
            background=self.background,
        )

    # -- Iterating ---------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch, or go on in the one whose position was loaded.

        Raises:
            ClosedError: After `close`.
            IterationError: While iterating, if another iteration has begun meanwhile.
            BatchStructureError: While iterating under ``strict``.
        """
        return self.iterate()

    def iterate(
        self, *, max_steps: int | None = None, last: bool = False, at_once: AtOnce | None = None
    ) -> Iterator[Any]:
        """Iterate over one epoch, and fetch no more than ``max_steps`` need.

        Args:
            max_steps: End after so many, with the rest of a generator's batches left in it.
            last: No epoch follows, so none is begun ahead.
            at_once: Under ``unroll``, says before each group of how many steps it is at most.
        """
        if self._closed:
            raise ClosedError("this PrefetchingLoader is closed; make another one to iterate again")
        return self._batches(max_steps, last, at_once)

    def _batches(self, max_steps: int | None, last: bool, at_once: AtOnce | None) -> Iterator[Any]:
        self._iteration += 1
        mine = self._iteration
        feed = self._begin(None if max_steps is None else max_steps * self.accumulate)
        looks_ahead = self.across_epochs and not last
        num_steps, self.epoch_ended = 0, False
        try:
            self._counters.begin(time.perf_counter())
            while max_steps is None or num_steps < max_steps:
                feed.turn()
                left = None if max_steps is None else max_steps - num_steps
                taken = self._grouping.take(feed, self._counters, left, at_once)
                feed.release()
                if self._iteration != mine:  # closed by another thread meanwhile
                    raise IterationError(ENDED)
                if taken is None:
                    self.epoch_ended = True
                    self.end_epoch()
                    self._counters.end(time.perf_counter())
                    if num_steps == 0 and at_once is None:  # fit raises instead
                        self._upstream.warn_if_spent()
                    return
                self._upstream.hand_out(taken[1])
                num_steps += len(taken[1])
                if looks_ahead and self._looks_ahead(feed, max_steps, num_steps):
                    self._begin_ahead()
                yield taken[0]
                if self._iteration != mine:
                    raise IterationError(ENDED)
            if any(self.ranks.gather(self._upstream.may_be_at_end and not self.is_one_shot)):
                # Samplers draw at the end, so it has to be asked for; a batch that comes instead
                # is not counted, and comes again where the position is loaded.
                feed.extend(1)
                self.epoch_ended = feed.take() is None
            self._counters.end(time.perf_counter())
        finally:
            if self._iteration == mine:
                self._leave(feed)

    def _begin(self, limit: int | None) -> Feed:
        """Return what this iteration takes from; the one before it, if any, ends."""
        kept, self._feed = self._feed, None
        if kept is not None:
            if self.is_one_shot and not self._upstream.will_resume:
                kept.extend(limit)  # what was fetched from an iterator is not to be had again
                self._feed = kept
                return kept
            self._abandon(kept)
        if (ahead := self._ahead.take(self._epoch)) is not None:
            ahead.extend(limit)
        self._feed = ahead or self._open(limit)
        return self._feed

    def _leave(self, feed: Feed) -> None:
        """End an iteration: at its end, by a break, or by an error."""
        if self.is_one_shot and not feed.finished:
            return  # the batch in use is released when the next one is asked for
        self._feed = None
        feed.close() if feed.finished else self._abandon(feed)

    def _abandon(self, feed: Feed) -> None:
        """Drop an epoch that was not consumed, as if nothing of it had been fetched ahead."""
        self._drop_ahead()
        feed.close()
        self._upstream.rewind()

    def _open(self, limit: int | None) -> Feed:
        if self._ring is None or self._ring.is_broken:
            self._ring = self._make_ring(t) if (t := transport_for(self.device)) else None
        # The ring holds what copies read.
        with heard(self.ranks), pinned_by(self.loader, self._ring and self._ring.pin):
            batches = self._upstream.begin()
        if self._check is not None:
            batches = self._check.checked(batches)
        feed: Feed = DirectFeed(batches, self._move, self._counters)
        if self._ring is not None:
            feed = RingFeed(batches, self._ring, self._fetching, self._counters, limit=limit)
        return even(feed, self.ranks, self.loader)

    def _make_ring(self, transport: Transport) -> Ring:
        return Ring(
            transport,
            (self.depth + 1) * self._grouping.size,
            reuse=self.reuse,
            transfer_dtype=self._move.transfer_dtype,
            finish=self._move.finish if self._move.finish.is_needed else None,
            # A DataLoader pins batches anew, or waits for them; others may fill one block for ever.
            trust_pinned=isinstance(self.loader, DataLoader | list | tuple),
        )

    # -- The next epoch, ahead ---------------------------------------------------------------------

    def _looks_ahead(self, feed: Feed, max_steps: int | None, num_steps: int) -> bool:
        """Whether upstream has nothing left in this epoch, and the next one may begin."""
        if (
            self._ahead.has_begun
            or not isinstance(feed, RingFeed)
            or self._fetching.where != "thread"
            or self.is_one_shot
            or self._upstream.carries_state
        ):
            return False
        left = feed.num_ahead
        if left is None or (max_steps is not None and num_steps + left >= max_steps):
            return False
        # The first fetch needs a slot, which nobody would free while it waits for one.
        return self._ring is not None and not self._ring.free.empty()

    def _begin_ahead(self) -> None:
        with self._ahead.beginning() as begin:
            if self._epoch is not None:
                begin.epoch = self._epoch + 1
                self._upstream.tell_epoch(begin.epoch)
            begin.feed = self._open_ahead()

    def _open_ahead(self) -> RingFeed:
        feed = self._open(None)
        assert isinstance(feed, RingFeed)
        if isinstance(self.loader, DataLoader) and self.loader.num_workers > 0:
            feed.start()  # its samplers have drawn in iter(), and its first batch takes long
        else:
            feed.prime()
        return feed

    def _drop_ahead(self) -> None:
        if self._ahead.drop() and self._epoch is not None:
            self._upstream.tell_epoch(self._epoch)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep the staging thread off the device for the length of the body.

        For a capture in torch's default mode, which any thread's allocation would end. What is
        staged stays; ask for no batch within, nor leave the loop.
        """
        with nullcontext() if self._ring is None else self._ring.lock:
            yield

    # -- State -------------------------------------------------------------------------------------

    @property
    def will_resume(self) -> bool:
        """Whether the next iteration goes on in the middle or at the end of an epoch."""
        return self._upstream.will_resume

    def end_epoch(self) -> None:
        """Count the epoch as finished, though the loader was not asked for more than its last."""
        self._upstream.position = None

    def go_to(self, place: int) -> None:
        """Be behind the step in this place of the group handed out last, from 0; as if no more."""
        self._upstream.go_to(place)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that was yielded, for ``torch.save``.

        What was fetched ahead comes again. Save ``trainer.state_dict()`` too: it has the global
        random generators.
        """
        return {**self._upstream.state_dict(), "epoch": self._epoch}

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise what `load_state_dict` would raise, and change nothing."""
        self._upstream.check(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at a saved position: the next iteration yields the batches that were left.

        A loader that carries state (torchdata's StatefulDataLoader) is given its own. Any other
        begins the epoch again, with the generators as they were, and drops what had been yielded,
        which takes as long as loading it. A position at the end of an epoch yields nothing.

        Raises:
            TypeError: Not a mapping.
            StateMismatchError: It is the position of another loader: another number of samples,
                batch size, order, number of workers or replicas. Or the loader is an iterator that
                has begun, and is elsewhere.
        """
        self.check_state_dict(state)
        if self._upstream.goes_on_only:
            self._iteration += 1  # it is there already, with what was fetched
        else:
            self._stop()
            self._upstream.load_state_dict(state)
            self.loader = self._upstream.loader
        if state.get("epoch") is not None:
            self.set_epoch(state["epoch"])

    # -- Report and end ----------------------------------------------------------------------------

    def statistics(self) -> LoaderStatistics:
        """Return what was counted since the loader was made. Synchronizes: Never."""
        if self._ring is not None:
            self._counters.note_times(*self._ring.transport.take_times())
        return self._counters.snapshot()

    def report(self) -> Report:
        """Return the verdict, with what to do about it, and how batches are fetched and moved."""
        crosses = self._ring is not None or self.device.type == "cuda"
        return loader_report(
            self.loader,
            self.device,
            self.statistics(),
            self._fetching.decision(self.depth) if crosses else None,
            self._ahead.decision(self.ranks.size) if self.across_epochs else None,
            ring=self._ring,
            is_ahead=self._fetching.is_ahead,
        )

    @override
    def close(self) -> None:
        """End the thread and let the memory go, not the loader's workers; again does nothing."""
        self._closed = True
        self._stop()
        if self._ring is not None:
            self._ring.settle_all()
            unpin(self.loader, self._ring.pin)
        self._ring = None

    def _stop(self) -> None:
        """End what iterates now; it hears of it when it is asked for more."""
        self._iteration += 1
        feed, self._feed = self._feed, None
        if feed is not None:
            self._abandon(feed)
        self._drop_ahead()

    def __repr__(self) -> str:
        return (
            f"PrefetchingLoader({type(self.loader).__name__}, device={str(self.device)!r}, "
            f"depth={self.depth}, reuse={self.reuse}, accumulate={self.accumulate}"
            f"{'' if self.unroll is None else f', unroll={self.unroll}'})"
        )
