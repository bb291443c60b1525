"""A ring of slots: batches on their way to the device, and the memory they travel in.

A slot holds one batch in two blocks of memory, pinned on the host and on the device, laid out
alike, so that a batch of many small tensors crosses the bus in one copy. Tensors that upstream has
pinned already are copied from where they are. A batch of another shape gets views of its own shape
in the same block, never a part of another batch's; one that is larger gets a larger block.

Who owns what comes out? With ``reuse`` the tensors are views of the slot, right until the next
batch is asked for. Without it they are copied once more, on the device, into memory that is the
consumer's: a copy that runs at the speed of the device's memory, and that makes it safe to keep a
batch for as long as one likes. Copying straight into new memory would be worse: what the allocator
hands out may still be in use by kernels that were enqueued before, behind which a copy on another
stream would have to wait, and nothing would overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, final

import torch
from torch import Tensor

from torchfast._core.batches import map_batch, move_object, move_tensor
from torchfast._core.rng import get_rng_state, same_rng_state
from torchfast.data.position import Position
from torchfast.data.transport import Slot, Transport

ALIGNMENT = 512  # bytes, the allocator's own: what kernels that read by 16 bytes rely on
DIRECT_BYTES = 2**16  # a pinned tensor above this is not packed with the others


@dataclass(slots=True)
class Staged:
    """A batch whose copies are enqueued.

    Attributes:
        batch: On the device, but not before the slot is ready.
        position: Of this batch.
        slot: Where it travels.
        kept: The ids of tensors that were on the device already.
        finish_late: Whether the ring's ``finish`` is left to the consumer's stream.
        num_bytes: What crosses the bus.
    """

    batch: Any
    position: Position
    slot: Slot
    kept: set[int]
    finish_late: bool
    num_bytes: int


@final
class Ring:
    """Stages batches into slots and hands them out.

    Args:
        transport: The device.
        num_slots: How many batches can be on their way or in use.
        reuse: Hand out the slot's own memory, not a copy.
        transfer_dtype: What floating-point tensors cross the bus as; None leaves them.
        finish: What is done to each batch on the device; enqueued behind its copy.
        trust_pinned: Whether upstream leaves pinned memory alone once it has handed it on.

    Synchronizes: `stage` waits for the slot's previous copy.
    """

    def __init__(
        self,
        transport: Transport,
        num_slots: int,
        *,
        reuse: bool,
        transfer_dtype: torch.dtype | None = None,
        finish: Callable[[Any], Any] | None = None,
        trust_pinned: bool = False,
    ) -> None:
        self.transport = transport
        self.slots = [transport.slot() for _ in range(num_slots)]
        self.free: SimpleQueue[Slot | None] = SimpleQueue()
        for slot in self.slots:
            self.free.put(slot)
        self._reuse = reuse
        self._transfer_dtype = transfer_dtype
        self._finish = finish
        self._finish_draws: bool | None = None
        self._trust_pinned = trust_pinned

    @property
    def finishes_late(self) -> bool:
        """Whether the transform draws random numbers, and so runs in the consumer's thread."""
        return bool(self._finish_draws)

    def stage(self, slot: Slot, batch: Any, position: Position) -> Staged:
        """Lay ``batch`` out in ``slot`` and enqueue its copies."""
        cargo = _Cargo(self, batch)
        self.transport.settle(slot)
        self._make_room(slot, cargo)
        placed, copies = cargo.load(slot)
        late = self._finish is not None and (
            self.finishes_late or cargo.has_resident or (cargo.has_objects and not self._reuse)
        )

        def arrive() -> Any:
            moved = map_batch(cargo.batch, lambda t: self._arrived(t, placed), self._object_fn)
            return moved if late or self._finish is None else self._finish_watched(moved)

        arrived = self.transport.upload(slot, copies, arrive)
        slot.held = cargo.batch, arrived
        return Staged(arrived, position, slot, cargo.kept, late, cargo.num_bytes)

    def hand_out(self, staged: Staged) -> Any:
        """Return the batch for the consumer's stream."""
        self.transport.receive(staged.slot)
        batch = staged.batch
        if not self._reuse:
            device, clone = self.transport.device, self.transport.clone
            batch = map_batch(
                batch,
                lambda t: t if id(t) in staged.kept else clone(t),
                lambda value: move_object(value, device),
            )
        if staged.finish_late and self._finish is not None:
            batch = self._finish(batch)
        return batch

    def take_back(self, slot: Slot) -> None:
        """Let the slot be written again, behind what was enqueued until now."""
        self.transport.release(slot)
        self.free.put(slot)

    def wake(self) -> None:
        """Let a thread that waits for a slot go on without one."""
        self.free.put(None)

    def forget_wakes(self) -> None:
        """Forget what `wake` left behind, once nobody waits any more."""
        for _ in range(self.free.qsize()):
            slot = self.free.get()
            if slot is not None:
                self.free.put(slot)

    # -- Staging -----------------------------------------------------------------------------------

    @property
    def _object_fn(self) -> Callable[[Any], Any] | None:
        # What an unknown object holds cannot be copied out of the ring.
        return (lambda value: move_object(value, self.transport.device)) if self._reuse else None

    def _arrived(self, tensor: Tensor, placed: dict[int, Tensor]) -> Tensor:
        found = placed.get(id(tensor))
        return move_tensor(tensor, self.transport.device) if found is None else found

    def _finish_watched(self, batch: Any) -> Any:
        """Run ``finish``; the first time, find out whether it draws random numbers."""
        assert self._finish is not None
        if self._finish_draws is not None:
            return self._finish(batch)
        before = get_rng_state(self.transport.device)
        result = self._finish(batch)
        self._finish_draws = not same_rng_state(before, get_rng_state(self.transport.device))
        return result

    def _make_room(self, slot: Slot, cargo: _Cargo) -> None:
        needed = cargo.pinned_bytes, cargo.device_bytes
        if slot.device is None:  # the first batch: all at once, since pinning stalls the device
            for each in self.slots:
                self._allocate(each, *needed)
        else:
            self._allocate(slot, *needed)

    def _allocate(self, slot: Slot, pinned_bytes: int, device_bytes: int) -> None:
        pinned = 0 if slot.pinned is None else slot.pinned.numel()
        device = -1 if slot.device is None else slot.device.numel()
        if pinned >= pinned_bytes and device >= device_bytes:
            return
        # Some more than asked, or lengths that grow bit by bit would move the slot each time.
        grown = [
            old if old >= new else new + (new // 4 if old > 0 else 0)
            for old, new in ((pinned, pinned_bytes), (device, device_bytes))
        ]
        with torch.inference_mode(False):  # such memory could not be written outside of it
            self.transport.allocate(slot, *grown)


class _Cargo:
    """A batch, taken apart: what is packed, what goes directly, what goes its own way."""

    def __init__(self, ring: Ring, batch: Any) -> None:
        self._ring = ring
        self._packed: list[Tensor] = []
        self._direct: list[Tensor] = []
        self.kept: set[int] = set()
        self.has_objects = False
        self.num_bytes = 0
        # A container that makes tensors on demand comes back as one that holds them.
        self.batch = map_batch(batch, self._sort, self._note_object)
        self._layouts = {id(t): self._layout(t) for t in (*self._packed, *self._direct)}
        self._offsets: dict[int, int] = {}
        self.pinned_bytes = self._reserve(self._packed, 0)
        self.device_bytes = self._reserve(self._direct, self.pinned_bytes)

    @property
    def has_resident(self) -> bool:
        """Whether a tensor is on the device already."""
        return bool(self.kept)

    def load(self, slot: Slot) -> tuple[dict[int, Tensor], list[tuple[Tensor, Tensor]]]:
        """Fill the pinned block; return the views on the device and the copies to make."""
        assert slot.device is not None
        placed = {key: self._view(slot.device, key) for key in self._layouts}
        copies = []
        if self._packed:
            assert slot.pinned is not None
            for tensor in self._packed:
                self._view(slot.pinned, id(tensor)).copy_(tensor)
            copies.append((slot.device[: self.pinned_bytes], slot.pinned[: self.pinned_bytes]))
        copies += [(placed[id(tensor)], tensor) for tensor in self._direct]
        return placed, copies

    def _sort(self, tensor: Tensor) -> Tensor:
        if tensor.device == self._ring.transport.device and tensor.device.type != "cpu":
            self.kept.add(id(tensor))
            return tensor
        dtype = self._ring._transfer_dtype
        if dtype is not None and tensor.is_floating_point() and tensor.dtype != dtype:
            if not _is_plain(tensor):
                tensor = tensor.to(dtype)
        else:
            dtype = tensor.dtype
        size = tensor.numel() * dtype.itemsize
        self.num_bytes += size
        if not _is_plain(tensor):
            return tensor
        if (
            self._ring._trust_pinned
            and size >= DIRECT_BYTES
            and dtype == tensor.dtype
            and tensor.is_pinned()
            and _dense_strides(tensor) == tensor.stride()
        ):
            self._direct.append(tensor)
        else:
            self._packed.append(tensor)
        return tensor

    def _note_object(self, value: Any) -> Any:
        self.has_objects = True
        return value

    def _layout(self, tensor: Tensor) -> tuple[torch.dtype, torch.Size, tuple[int, ...]]:
        dtype = self._ring._transfer_dtype
        if dtype is None or not tensor.is_floating_point():
            dtype = tensor.dtype
        return dtype, tensor.shape, _dense_strides(tensor)

    def _reserve(self, tensors: Iterable[Tensor], end: int) -> int:
        for tensor in tensors:
            start = -(-end // ALIGNMENT) * ALIGNMENT
            self._offsets[id(tensor)] = start
            end = start + tensor.numel() * self._layouts[id(tensor)][0].itemsize
        return end

    def _view(self, block: Tensor, key: int) -> Tensor:
        dtype, shape, strides = self._layouts[key]
        start = self._offsets[key]
        size = shape.numel() * dtype.itemsize
        return block[start : start + size].view(dtype).as_strided(shape, strides)


def _is_plain(tensor: Tensor) -> bool:
    """Whether the elements are all there is to a tensor, so that they can be laid out anew."""
    return (
        type(tensor) is Tensor
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg())
        and not tensor.is_quantized
    )


def _dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides that ``tensor.to(device)`` would give: its own where it has no gaps."""
    return torch.empty_like(tensor, device="meta").stride()
