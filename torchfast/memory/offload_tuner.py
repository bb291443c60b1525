"""Looking at the first steps, choosing what goes to the host, and following the choice.

Forwards that save the same sizes in the same order are one kind, and have one choice. Which kind a
forward is shows as it goes on: it follows the choice of the last one until a size differs, then
that of the kind that has begun like it. One that is like none follows the last one, storage by
storage, and is looked at itself, if there have not been too many.
"""

from __future__ import annotations

from typing import Any, Final, final

from torchfast.memory.copy_streams import CopyStreams
from torchfast.memory.offload_choice import KindOfForward, OffloadChoice
from torchfast.memory.offload_timeline import Timeline
from torchfast.memory.saved_storage import Lane

_MOST_KINDS: Final = 8  # as of batches of so many shapes
_PATIENCE: Final = 16  # forwards for which to go on looking where nothing comes of it


@final
class OffloadTuner:
    """The choices for one model.

    Args:
        side: The device.
        max_bytes: The most to send of a forward; None for all.
        max_slowdown: The part of its time for which the computation may wait for copies.
    """

    def __init__(self, side: CopyStreams, max_bytes: int | None, max_slowdown: float = 0.0) -> None:
        self._side, self._max_bytes, self._max_slowdown = side, max_bytes, max_slowdown
        self._kinds: dict[tuple[int, ...], KindOfForward] = {}
        self._latest: KindOfForward | None = None
        self._rates: tuple[float | None, float | None] = None, None
        self._open: TunedForward | None = None  # is looked at, and its backward has not come
        self._patience, self._left_to_find = _PATIENCE, _MOST_KINDS

    @property
    def choice(self) -> OffloadChoice | None:
        """What was chosen for forwards like the last one; None before a choice."""
        return None if self._latest is None else self._latest.choice

    def begin(self, lane: Lane, home: Any, window_bytes: int, *, is_capture: bool) -> TunedForward:
        """Begin a forward, and to look at it, if there is something to find out."""
        looks = self._patience > 0 and not is_capture
        lane.timeline = Timeline(self._side, home) if looks else None
        forward = TunedForward(self, lane, window_bytes, self._latest, is_capture=is_capture)
        self._open = forward if looks else None
        return forward

    def behind_backward(self) -> None:
        """Choose by what was seen, once a backward is through.

        Synchronizes: If something was looked at.
        """
        forward = self._open
        if forward is None or not forward.was_used:
            return
        self._stop_looking(forward)
        timeline = forward.timeline
        assert timeline is not None
        timing = timeline.read()
        out, back = self._rates
        out = timing.out_bytes_per_s or out
        if out is None:
            self._patience = 0  # nothing found room on the host, nor will it in the next steps
            return
        back = timing.back_bytes_per_s or back or out
        self._rates = out, back
        new = KindOfForward(timing.sizes, self._max_slowdown)
        kind = self._kinds.setdefault(timing.sizes, new)
        kind.learn(
            timing,
            (out, back),
            window_bytes=forward.window_bytes,
            max_bytes=self._max_bytes,
            room_bytes=forward.room_bytes,
            was_followed=forward.kind is kind,
            is_steady=forward.lane.pool.num_slabs == forward.num_slabs,
        )
        self._latest = kind
        self._patience = _PATIENCE

    def kind_of(self, sizes: list[int]) -> KindOfForward | None:
        """Return a kind that begins with these sizes."""
        number, begun = len(sizes), tuple(sizes)
        return next((kind for known, kind in self._kinds.items() if known[:number] == begun), None)

    def end(self, forward: TunedForward) -> None:
        """Take in what a forward was, now that all of it is known."""
        kind = self._kinds.get(tuple(forward.sizes))
        if kind is not None:
            self._latest = kind
            if forward.is_capture:
                kind.settle()  # steps to come are to be those that the graph holds
        is_known = kind is not None and kind.is_settled
        is_one_too_many = kind is None and len(self._kinds) >= _MOST_KINDS
        if is_known or is_one_too_many or not forward.was_pushed:
            self._stop_looking(forward)
        elif not self._patience and self._left_to_find and not forward.is_capture:
            self._left_to_find -= 1
            self._patience = _PATIENCE
            return
        self._patience = max(0, self._patience - 1)

    def forget(self) -> None:
        """Let go of a forward whose backward never came, and of the memory of its copies."""
        if self._open is not None:
            self._stop_looking(self._open)

    def _stop_looking(self, forward: TunedForward) -> None:
        if self._open is forward:
            forward.lane.timeline = self._open = None


@final
class TunedForward:
    """One forward under a choice.

    Args:
        tuner: Whose it is.
        lane: What copies for it, and notes when, if it is looked at.
        window_bytes: What stays of it.
        kind: The kind that it is taken for.
        is_capture: Whether a graph is captured.

    Attributes:
        sizes: What it has saved so far.
        was_pushed: Whether anything of it was to go.
        was_used: Whether its backward has begun.
        room_bytes: What there was room for on the host; None if that was enough.
    """

    def __init__(
        self,
        tuner: OffloadTuner,
        lane: Lane,
        window_bytes: int,
        kind: KindOfForward | None,
        *,
        is_capture: bool,
    ) -> None:
        self._tuner, self.lane, self.timeline = tuner, lane, lane.timeline
        self.window_bytes, self.kind, self.is_capture = window_bytes, kind, is_capture
        self.num_slabs = lane.pool.num_slabs
        self.sizes: list[int] = []
        self.was_pushed = self.was_used = False
        self.room_bytes: int | None = None
        self._has_all_room = lane.pool.used_bytes == 0  # no other forward waits for its backward
        self._is_like_none = False

    def saved(self, num_bytes: int) -> None:
        """Note what was saved."""
        self.sizes.append(num_bytes)
        if (timeline := self._looking) is not None:
            timeline.saved(num_bytes)
        number = len(self.sizes)
        is_like = self.kind is not None and self.kind.sizes[number - 1 : number] == (num_bytes,)
        if is_like or self._is_like_none:
            return
        found = self._tuner.kind_of(self.sizes)
        self._is_like_none = found is None
        self.kind = found or self.kind

    def sends(self, index: int) -> bool:
        """Whether a storage is to go, now that newer ones take its place."""
        self.was_pushed = True
        if (timeline := self._looking) is not None:
            timeline.pushed(index)
        return self.kind is None or self.kind.sends(index, is_capture=self.is_capture)

    def found_no_room(self, sent_bytes: int) -> None:
        """Note that the host had no memory for a storage, after so many bytes."""
        if self._has_all_room:
            self.room_bytes = sent_bytes

    def used(self, index: int) -> None:
        """Note that the backward uses a storage."""
        if (timeline := self._looking) is not None:
            self.was_used = True
            timeline.used(index)

    def end(self) -> None:
        """Note that the forward is at its end."""
        self._tuner.end(self)

    @property
    def _looking(self) -> Timeline | None:
        """What notes its moments, unless another forward has come between."""
        return self.timeline if self.lane.timeline is self.timeline else None
