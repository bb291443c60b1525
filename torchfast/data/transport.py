"""Streams and events: the order in which a ring's copies and the training's reads happen.

One copy stream serves a loader for its whole life. Two events belong to each slot of the ring:
``ready``, recorded on the copy stream behind the copy, for which the consumer's stream waits; and
``free``, recorded on the consumer's stream behind the last use, for which the copy stream waits
before it writes again. The host waits in one place only, before it writes into pinned memory of
which a copy may still be under way.

All that a ring asks of a device is here, so that its logic can be run against a simulated device
whose streams are as slow as a test likes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, final

import torch
from torch import Tensor
from typing_extensions import override

from torchfast._core.phases import H2D, annotation
from torchfast._core.pinning import pin_in_place
from torchfast._core.stream_context import on_stream
from torchfast.data.mold import Mold

# Of so many batches one is timed on the device, and of later ones fewer: two events more on each of
# the two streams take the host longer than all else that it does for a batch.
TIMED_EVERY = 16
MANY, TIMED_EVERY_OF_MANY = 256, 64

Unpin = Callable[[], None]


class Slot:
    """A batch's place in the ring: memory on both sides, and the events that guard it.

    Attributes:
        ready: Recorded behind the copies into it.
        free: Recorded behind the consumer's last use.
        pinned: Memory on the host, bytes.
        blocks: Memory on the device, bytes each.
        molds: How either was cut, by what was laid out in it; for as long as it stays.
        sources: What the copies into it read where it is; another process may write there as soon
            as it is let go, so it is held until they are done, not only enqueued.
        lent: A batch with objects that move their own tensors; held until the consumer is done.
        held: What must live until the consumer is done: what a transform made.
        stream: Where the consumer received it, until it is released.
        home: The stream whose pool the device memory comes from.
    """

    def __init__(self, ready: Any, free: Any) -> None:
        self.ready = ready
        self.free = free
        self.pinned: Tensor | None = None
        self.blocks: list[Tensor] = []
        self.molds: dict[Any, Mold] = {}
        self.sources: Any = None
        self.lent: Any = None
        self.held: Any = None
        self.stream: Any = None
        self.home: Any = None

    @property
    def is_received(self) -> bool:
        """Whether the consumer has got the batch that is in it."""
        return self.stream is not None


class Transport(Protocol):
    """What a ring asks of a device."""

    device: torch.device

    def slot(self) -> Slot:
        """Return a slot without memory."""

    def allocate(self, slot: Slot, pinned_bytes: int, block_bytes: Sequence[int]) -> None:
        """Give the slot memory of at least these sizes; nothing may be on its way in it."""

    def renew(self, slot: Slot) -> None:
        """Replace the slot's device blocks, which the consumer keeps, by as large ones."""

    def pin(self, address: int, num_bytes: int) -> Unpin:
        """Pin memory where it is, and return what unpins it; before it is unmapped.

        Raises:
            RuntimeError: It cannot be pinned.
        """

    def is_copied(self, slot: Slot) -> bool:
        """Whether the slot's last copy is done; nobody waits for it."""

    def settle(self, slot: Slot) -> None:
        """Make the host wait until the slot's last copy is done."""

    def settle_lent(self, slot: Slot) -> None:
        """Make the host wait until the consumer is done with a slot that was released."""

    def upload(
        self, slot: Slot, copies: Sequence[tuple[Tensor, Tensor]], finish: Callable[[], Any] | None
    ) -> Any:
        """Enqueue copies of (target, source) once the slot is free, then what ``finish`` enqueues.

        Returns:
            What ``finish`` returned; None without it.
        """

    def receive(self, slot: Slot) -> None:
        """Make the consumer's stream wait for the slot's copies."""

    def release(self, slot: Slot) -> None:
        """Mark the slot free behind what is enqueued by now on the stream that received it.

        One that nobody received stays free from where it was.
        """

    def clone(self, tensor: Tensor) -> Tensor:
        """Return a copy in memory of the consumer's own, enqueued on its stream."""

    def is_idle(self, slot: Slot) -> bool:
        """Whether the consumer's stream has passed the slot's last release."""

    def follow(self, followed: Any) -> Any:
        """Let a thread that fetches enqueue where the consumer does, as its thread would.

        Returns:
            What to call it with before the next fetch; the first time it is None.
        """

    def drain(self) -> None:
        """Order the two streams behind each other, before memory of either is let go."""

    def take_times(self) -> tuple[list[float], list[float]]:
        """Return the copies' and the consumer's waits' times that are known by now, in ms."""


@final
class CUDATransport(Transport):
    """Streams and events of a CUDA device.

    Args:
        device: The device, with its index.

    Synchronizes: `settle` waits on the host, for a copy.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Of its three numbers the first: torch.cuda.current_stream() takes as long as a launch.
        self._current = partial(torch._C._cuda_getCurrentStream, device.index)
        self._copy_stream = torch.cuda.Stream(device)
        self._consumer = torch.cuda.current_stream(device)
        self._num_uploads = 0
        self._num_receipts = 0
        self._timed: dict[str, deque[tuple[Any, Any]]] = {
            name: deque(maxlen=256) for name in ("copy", "wait")
        }

    @override
    def slot(self) -> Slot:
        # Blocking: the thread that waits sleeps, and leaves its core to the loader's workers.
        return Slot(ready=torch.cuda.Event(blocking=True), free=torch.cuda.Event())

    @override
    def allocate(self, slot: Slot, pinned_bytes: int, block_bytes: Sequence[int]) -> None:
        # Not record_stream, which would hold freed memory back: the memory is the consumer's, and
        # the copy stream waits below for all that the consumer had enqueued when it got it.
        self.settle(slot)
        if slot.pinned is None or slot.pinned.numel() < pinned_bytes:
            # The device is named, since a default device may be set.
            slot.pinned = torch.empty(
                pinned_bytes, dtype=torch.uint8, device="cpu", pin_memory=True
            )
        with torch.cuda.stream(self._consumer):
            slot.blocks = []
            slot.blocks = [self._block(size) for size in block_bytes]
            slot.home = self._consumer
            slot.free.record(self._consumer)

    @override
    def renew(self, slot: Slot) -> None:
        slot.home = stream = slot.stream
        if self._current()[0] == stream.stream_id:
            slot.blocks = _others(slot.blocks)
            return
        with on_stream(stream):  # any thread may drop a batch
            slot.blocks = _others(slot.blocks)

    def _block(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    @override
    def pin(self, address: int, num_bytes: int) -> Unpin:
        error, unpin = pin_in_place(address, num_bytes, self.device)
        if error:
            raise RuntimeError(
                f"CUDA could not pin {num_bytes} bytes of shared memory where they are (error "
                f"{error}), so batches are copied to pinned memory first; raise the limit of "
                "locked memory (ulimit -l), or give recycle_memory=False"
            )
        return unpin

    @override
    def is_copied(self, slot: Slot) -> bool:
        return bool(slot.ready.query())

    @override
    def settle_lent(self, slot: Slot) -> None:
        slot.free.synchronize()

    @override
    def settle(self, slot: Slot) -> None:
        if not slot.ready.query():  # asking makes nobody wait
            slot.ready.synchronize()

    @override
    def upload(
        self, slot: Slot, copies: Sequence[tuple[Tensor, Tensor]], finish: Callable[[], Any] | None
    ) -> Any:
        self._num_uploads += 1
        stream = self._copy_stream
        with stream:  # torch.cuda.stream() would take ten times as long
            stream.wait_event(slot.free)
            slot.held = None  # what the consumer has read may be overwritten from here on
            try:
                start = self._marked(stream) if _is_timed(self._num_uploads) else None
                with annotation(H2D):  # beside the step, and mostly in another thread than its
                    for target, source in copies:
                        target.copy_(source, non_blocking=True)
                if start is not None:
                    self._timed["copy"].append((start, self._marked(stream)))
                return None if finish is None else finish()
            finally:
                slot.ready.record(stream)  # behind what was enqueued, though it may have failed

    @override
    def receive(self, slot: Slot) -> None:
        self._num_receipts += 1
        if self._current()[0] != self._consumer.stream_id:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_stream(self._consumer)
            self._consumer = stream
        # The very object, by which threads know that it stayed.
        slot.stream = stream = self._consumer
        if slot.home is not stream and slot.home != stream:
            for block in slot.blocks:  # they go back to the pool of another stream than reads them
                block.record_stream(stream)
        if not _is_timed(self._num_receipts):
            slot.ready.wait(stream)
            return
        start = self._marked(stream)
        slot.ready.wait(stream)
        self._timed["wait"].append((start, self._marked(stream)))

    @override
    def release(self, slot: Slot) -> None:
        if slot.stream is not None:
            # Not on the current stream, which may be another by now.
            slot.free.record(slot.stream)
            slot.stream = None

    @override
    def clone(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @override
    def is_idle(self, slot: Slot) -> bool:
        return bool(slot.free.query())

    @override
    def follow(self, followed: Any) -> Any:
        # Device work of the loader's own is then ordered before the step that uses it.
        consumer = self._consumer
        if followed is not consumer:
            torch.cuda.set_stream(consumer)
        return consumer

    @override
    def drain(self) -> None:
        self._consumer.wait_stream(self._copy_stream)
        self._copy_stream.wait_stream(self._consumer)

    @override
    def take_times(self) -> tuple[list[float], list[float]]:
        return self._passed(self._timed["copy"]), self._passed(self._timed["wait"])

    @staticmethod
    def _marked(stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    @staticmethod
    def _passed(pairs: deque[tuple[Any, Any]]) -> list[float]:
        times = []
        while pairs and pairs[0][1].query():
            start, end = pairs.popleft()
            times.append(start.elapsed_time(end))
        return times


def _is_timed(number: int) -> bool:
    return not number % TIMED_EVERY and (number <= MANY or not number % TIMED_EVERY_OF_MANY)


def _others(blocks: list[Tensor]) -> list[Tensor]:
    """Return other memory of the same sizes, from the current stream's pool."""
    # It names neither dtype nor device: to read them takes longer than to find the memory. Nobody
    # was given a block without bytes.
    return [torch.empty_like(block) if block.numel() else block for block in blocks]


def transport_for(device: torch.device) -> Transport | None:
    """Return the device's transport; None where a copy cannot run beside a step."""
    return CUDATransport(device) if device.type == "cuda" else None
