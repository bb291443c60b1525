"""Storages that autograd saved, on their way to the host and back.

What is saved is a view; what goes to the host is the whole storage, once, however many operations
saved a view of it. Who may touch which memory when:

- **Out.** The storage is held until the stream of the computation has waited for its copy, or until
  the backward has used it, when what was copied does not matter any more. Only then is its memory
  given out again, and to that stream.
- **Back.** Memory is requested on the stream of the computation, and the stream that copies waits
  for what is enqueued there by then: all that used this memory before. The computation waits for
  the copy before it reads.
- **Host.** A range is given back only behind a `Lane.join`, after which every copy out comes behind
  every copy back.
- **Dropped unread.** An autograd graph that is dropped may have copies under way. What they read
  and write goes to the lane's ``limbo`` and is let go behind the next join. The finaliser does
  nothing else: it may run in any thread, at any time.

So no ``record_stream``, no wait on the host, and no event is asked whether it has passed: a capture
allows all of it.
"""

from __future__ import annotations

import weakref
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from torchfast.memory.copy_streams import CopyStreams
from torchfast.memory.host_pool import HostPool, HostRange
from torchfast.memory.offload_timeline import Timeline


class Flight(NamedTuple):
    """A copy out that the computation has not waited for; without ``copied`` what stays."""

    home: Any
    storage: Tensor | None
    copied: Any
    num_bytes: int
    saved: weakref.ref[SavedStorage]


@final
class Lane:
    """The two streams that copy, and what is under way on them.

    Eager steps have one, and each graph one of its own: events and memory of a capture are never
    mixed with others.

    Args:
        side: The device.
        pool: Memory of the host.

    Attributes:
        timeline: What notes when copies are made; None while nobody asks.
    """

    def __init__(self, side: CopyStreams, pool: HostPool) -> None:
        self.side = side
        self.pool = pool
        self.out, self.back = side.new(), side.new()
        self.flights: deque[Flight] = deque()
        self.limbo: deque[tuple[Any, Tensor | None, HostRange | None]] = deque()
        self.timeline: Timeline | None = None
        self._used = False
        self._used_back = False

    def send(self, saved: SavedStorage, *, may_grow: bool) -> bool:
        """Begin to copy a storage to the host; False if there is no memory for it."""
        assert saved.storage is not None
        host = self.pool.take(saved.num_bytes, may_grow=may_grow)
        if host is None:
            return False
        saved.host = host
        self._used = True
        self.out.wait_event(saved.made)
        with self.side.on(self.out), self._noted(self.out, "out", saved):
            saved.on_host.copy_(saved.storage, non_blocking=True)
        copied = self.out.record_event()
        self.flights.append(
            Flight(saved.home, saved.storage, copied, saved.num_bytes, weakref.ref(saved))
        )
        return True

    def keep(self, saved: SavedStorage) -> None:
        """Count a storage that stays: what was sent before it lands as if it went too."""
        self.flights.append(Flight(saved.home, None, None, saved.num_bytes, weakref.ref(saved)))

    def land(self, most_bytes: int) -> None:
        """Let the computation wait for the oldest copies out until so much is under way."""
        flying = sum(flight.num_bytes for flight in self.flights)
        while self.flights and flying > most_bytes:
            flight = self.flights.popleft()
            flying -= flight.num_bytes
            if flight.copied is None:
                continue
            self.wait(flight.home, flight.copied)
            saved = flight.saved()
            if saved is not None:
                saved.storage = None

    def land_dead(self) -> None:
        """Let go of storages that the backward has used before they were on the host."""
        # Nobody waits: what the copy reads from now on, nobody will read; and where it writes is
        # given out again behind the next join only.
        while self.flights and self.flights[-1].saved() is None:
            self.flights.pop()

    def fetch(self, saved: SavedStorage) -> None:
        """Begin to copy a storage back to the device."""
        home = saved.home
        with self.side.on(home), torch.no_grad():
            storage = torch.empty(
                saved.num_elements, dtype=saved.dtype, device=saved.device, requires_grad=False
            )
        self._used_back = True
        # Behind the copy out as well: its storage is let go only once the computation has waited.
        self.back.wait_event(home.record_event())
        with self.side.on(self.back), torch.no_grad(), self._noted(self.back, "back", saved):
            storage.copy_(saved.on_host, non_blocking=True)
        saved.storage = storage
        saved.fetched = self.back.record_event()

    def wait(self, home: Any, event: Any) -> None:
        """Let the computation wait for a copy."""
        if self.timeline is None:
            home.wait_event(event)
            return
        with self.timeline.waiting(home):
            home.wait_event(event)

    def _noted(self, stream: Any, way: str, saved: SavedStorage) -> AbstractContextManager[None]:
        """Return the context of a copy."""
        if self.timeline is None:
            return nullcontext()
        return self.timeline.copying(stream, way, saved.num_bytes)

    def join(self, home: Any) -> None:
        """Let the computation wait for all copies, and let go of what they read and wrote.

        Args:
            home: Its stream. Memory of forwards on others goes back to those, so they wait too.
        """
        # First what is there by now: a finaliser may add to it at any time.
        limbo = [self.limbo.popleft() for _ in range(len(self.limbo))]
        homes = [home, *(flight.home for flight in self.flights), *(own for own, *_ in limbo)]
        if self._used or self._used_back:
            # Not without need: a capture must not wait for what is no part of it.
            if self._used_back:
                self.out.wait_event(self.back.record_event())
            done = self.out.record_event()
            for stream in dict.fromkeys(homes):
                self.wait(stream, done)
        self._used = self._used_back = False
        while self.flights:
            flight = self.flights.popleft()
            saved = flight.saved()
            if flight.copied is not None and saved is not None and saved.fetched is None:
                saved.storage = None  # it is on the host now
        for _, _, host in limbo:
            if host is not None:
                host.pool.give(host)


@final
class SavedStorage:
    """One storage that autograd saved.

    Attributes:
        index: Its place among those of its forward.
        storage: All of it on the device, flat; None while it is on the host only.
        host: Where it is on the host; None if it never left.
        made: The event behind which it holds what was saved.
        fetched: The event behind which it is on the device again.
        arrived: Whether the computation has waited for that.
        version: How often it had been written when it was saved.
        writes: What shares that count, and no memory.
    """

    __slots__ = (
        "__weakref__",
        "arrived",
        "device",
        "dtype",
        "fetched",
        "home",
        "host",
        "index",
        "lane",
        "made",
        "num_bytes",
        "num_elements",
        "siblings",
        "storage",
        "version",
        "writes",
    )

    def __init__(
        self,
        tensor: Tensor,
        writes: Tensor,
        lane: Lane,
        home: Any,
        siblings: list[weakref.ref[SavedStorage]],
    ) -> None:
        self.num_bytes = tensor.untyped_storage().nbytes()
        self.num_elements = self.num_bytes // tensor.element_size()
        self.dtype, self.device = tensor.dtype, tensor.device
        flat = tensor.detach().as_strided((self.num_elements,), (1,), 0)
        self.storage: Tensor | None = flat
        self.version, self.writes = tensor._version, writes
        self.lane, self.home = lane, home
        self.siblings, self.index = siblings, len(siblings)
        siblings.append(weakref.ref(self))
        self.host: HostRange | None = None
        self.made = home.record_event()
        self.fetched: Any = None
        self.arrived = False

    @property
    def on_host(self) -> Tensor:
        """Its bytes on the host."""
        assert self.host is not None
        return self.host.memory[: self.num_bytes].view(self.dtype)

    def bring(self, ahead_bytes: int) -> Tensor:
        """Return the storage for the stream of the computation, and begin to fetch the next ones.

        Args:
            ahead_bytes: How much is to be on the device, or on its way there, before it is needed.
        """
        lane = self.lane
        if self.storage is None:
            lane.fetch(self)
        if self.fetched is not None and not self.arrived:
            lane.wait(self.home, self.fetched)
            self.arrived = True
        lane.land_dead()
        # The backward goes the way of the forward back.
        for index in range(self.index - 1, -1, -1):
            saved = self.siblings[index]()
            if saved is None:
                continue
            if saved.storage is None:
                lane.fetch(saved)
            ahead_bytes -= saved.num_bytes
            if ahead_bytes <= 0:
                break
        assert self.storage is not None
        return self.storage

    def __del__(self) -> None:
        lane = getattr(self, "lane", None)
        if lane is None:
            return
        unread = self.fetched is not None and not self.arrived
        if self.host is not None or unread:
            lane.limbo.append((self.home, self.storage if unread else None, self.host))
