"""Reading device scalars and step times on the host without making it wait.

A host that reads a scalar waits until the device has caught up, and the queue that it had filled
runs empty. So a reading is staged: the scalars go to pinned memory behind an event, and are read
some steps later, when the event has passed. On the CPU everything is ready at once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, final

import torch
from torch import Tensor


@final
class Reading:
    """Scalars on their way to the host.

    Args:
        values: Scalars by name; numbers pass through.
        device: Where the tensors are.

    Synchronizes: Only `read` before `is_ready`.
    """

    def __init__(self, values: Mapping[str, Tensor | float], device: torch.device) -> None:
        staged = {
            k: v for k, v in values.items() if isinstance(v, Tensor) and v.device.type != "cpu"
        }
        self._numbers = {k: float(v) for k, v in values.items() if k not in staged}
        self._names = list(staged)
        self._order = list(values)
        self._event: torch.cuda.Event | None = None
        dtype = torch.float32 if device.type == "mps" else torch.float64
        if not staged:
            self._host = torch.empty(0)
            return
        scalars = [v.detach().reshape(()).to(device, dtype) for v in staged.values()]
        self._host = torch.stack(scalars)
        if device.type == "cuda":
            pinned = torch.empty(len(scalars), dtype=dtype, pin_memory=True)
            self._host = pinned.copy_(self._host, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(device))

    @property
    def is_ready(self) -> bool:
        """Whether `read` returns at once."""
        return self._event is None or bool(self._event.query())

    def read(self) -> dict[str, float]:
        """Return the values, in the order given; waits for the device if it has to."""
        if self._event is not None:
            self._event.synchronize()
        values = dict(zip(self._names, self._host.tolist(), strict=True)) | self._numbers
        return {name: values[name] for name in self._order}


# A moment: of the device's queue where there is one, else of the host's clock.
Mark = torch.cuda.Event | float


@final
class Marks:
    """Notes moments on a device, to be compared once they have passed.

    Args:
        device: Where.

    Synchronizes: Never.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spare: list[torch.cuda.Event] = []
        self._beside: torch.cuda.Stream | None = None  # on which collectives are waited for
        self._stream: torch.cuda.Stream | None = None  # the current one, when it was last asked

    @property
    def is_capturing(self) -> bool:
        """Whether what is enqueued now is captured: an event in it could never be asked."""
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def now(self) -> Mark:
        """Note this moment, on the device's current stream."""
        if self._device.type != "cuda":
            return time.perf_counter()
        return self._on(self._current())

    def _current(self) -> torch.cuda.Stream:
        """Return the current stream, and the very object that it was for as long as it stays."""
        index: int | None = self._device.index
        if index is None:
            return torch.cuda.current_stream(self._device)
        # Of its three numbers the first: torch.cuda.current_stream() takes as long as a launch.
        number = torch._C._cuda_getCurrentStream(index)[0]
        stream = self._stream  # which another thread may replace meanwhile
        if stream is None or stream.stream_id != number:
            stream = self._stream = torch.cuda.current_stream(self._device)
        return stream

    def queue(self) -> int | None:
        """Return which of the device's queues `now` notes moments of; None for the host's clock."""
        if self._device.type != "cuda":
            return None
        return int(torch.cuda.current_stream(self._device).cuda_stream)

    def beside(self) -> Mark:
        """Note from when on what is issued now can run in a queue of its own.

        That is when the current queue has come here, and what `behind` was told of is done.
        """
        if self._device.type != "cuda":
            return time.perf_counter()
        if self._beside is None:
            self._beside = torch.cuda.Stream(self._device)
        self._beside.wait_stream(torch.cuda.current_stream(self._device))
        return self._on(self._beside)

    def behind(self, work: Any, note: Callable[[Mark], None]) -> bool:
        """Give ``note`` the moment when work that was issued behind `beside` is done.

        Args:
            work: What a collective returns that nobody has waited for.
            note: Called at once, or in another thread once the moment is there.

        Returns:
            Whether that can be told without a wait.
        """
        future = work.get_future()
        if self._device.type != "cuda":
            future.add_done_callback(lambda _: note(time.perf_counter()))
            return True
        # What is enqueued on the device counts as done, and whoever waits is a queue, not the host.
        if self._beside is None or not future.done():
            return False
        with torch.cuda.stream(self._beside):
            future.wait()
        note(self._on(self._beside))
        return True

    def _on(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def has_passed(self, mark: Mark) -> bool:
        """Whether the device has come to it."""
        return isinstance(mark, float) or bool(mark.query())

    def between_ms(self, before: Mark, after: Mark) -> float:
        """Return the time between two moments that have passed."""
        if isinstance(before, float) and isinstance(after, float):
            return (after - before) * 1e3
        assert isinstance(before, torch.cuda.Event)
        assert isinstance(after, torch.cuda.Event)
        return float(before.elapsed_time(after))

    def give_back(self, marks: Iterable[Mark]) -> None:
        """Let events be used again that nobody will ask any more."""
        self._spare += [mark for mark in marks if isinstance(mark, torch.cuda.Event)]


# From the end of a step to that of the next; or of several that ended together, and how many.
Lap = tuple[Mark, Mark, int]


@final
class StepClock:
    """Times steps from the end of one to the end of the next, on the device where there is one.

    The interval holds everything in between, waiting for data included.

    Synchronizes: Never in `start`, `tick` and `count`; `Laps.milliseconds` if the device is behind.
    """

    def __init__(self, device: torch.device) -> None:
        self._moments = Marks(device)
        self._last: Mark | None = None  # None before the first `start`, and in a pause
        self._ended: deque[Lap | None] = deque()  # of steps that are not counted yet
        self._counted: list[Lap] = []

    def start(self) -> None:
        """Begin to time, at first or after `pause`."""
        self._last = self._moments.now()

    def pause(self) -> None:
        """Leave out what comes until `start`; the steps so far are kept."""
        self._last = None

    def tick(self, num_steps: int = 1) -> None:
        """Note the end of a step, or of several that came to their end together."""
        now = self._moments.now()
        lap = None if self._last is None else (self._last, now, num_steps)
        self._ended += [lap] * num_steps
        self._last = now

    def count(self) -> None:
        """Count the first of the steps that have ended to those that `collect` returns."""
        if (lap := self._ended.popleft()) is not None:
            self._counted.append(lap)

    def collect(self) -> Laps:
        """Return the steps that were counted since the last call."""
        laps, self._counted = Laps(self._counted, self._moments), []
        return laps


@final
class Laps:
    """What some steps took, in order."""

    def __init__(self, laps: list[Lap], moments: Marks) -> None:
        self._laps = laps
        self._moments = moments

    def milliseconds(self) -> list[float]:
        """Return the time of each step."""
        times: list[float] = []
        known: Lap | None = None
        for lap in self._laps:
            if lap is not known:
                before, after, num_steps = known = lap
                if isinstance(after, torch.cuda.Event):
                    after.synchronize()
                each_ms = self._moments.between_ms(before, after) / num_steps
            times.append(each_ms)
        return times
