"""A ring of slots: batches on their way to the device, and the memory they travel in.

A slot holds one batch, in pinned memory and on the device, laid out by `layout.py`. Tensors that
upstream has pinned already are copied from where they are. A batch of another shape gets tensors of
its own shape in the same blocks, never a part of another batch's; one that is larger gets larger
blocks.

Who owns what comes out? With ``reuse`` the tensors lie in the slot, right until the next batch is
asked for, and the slot is written again behind the consumer's reads. Without it the slot gives its
device blocks away with the batch and gets new ones in their place, at the moment it is released
and on the consumer's stream. What the allocator hands out there may be in use by kernels enqueued
before that moment, and behind just these the slot's next copy has to wait anyway. So it costs no
copy, and the copies overlap as they do with ``reuse``.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import Parameter

from torchfast._core.batches import map_batch, move_object, move_tensor, tensors
from torchfast._core.rng import get_rng_state, same_rng_state
from torchfast.data.cargo import Cargo, put_back
from torchfast.data.layout import Layout, lay_out
from torchfast.data.mold import Mold
from torchfast.data.position import Position
from torchfast.data.transport import Slot, Transport, Unpin

MOST_LAYOUTS, MOST_MOLDS = (
    64,
    8,
)  # that are remembered; batches of ever new lengths make ever new ones


@dataclass(slots=True)
class Staged:
    """A batch whose copies are enqueued.

    Attributes:
        batch: On the device, but not before the slot is ready.
        position: Of this batch.
        slot: Where it travels.
        owned: The ids of tensors that the consumer may keep as they are; None if it may all.
        finish_late: Whether the ring's ``finish`` is left to the consumer's stream.
        num_bytes: What crosses the bus.
    """

    batch: Any
    position: Position
    slot: Slot
    owned: set[int] | None
    finish_late: bool
    num_bytes: int


@final
class Ring:
    """Stages batches into slots and hands them out.

    Args:
        transport: The device.
        num_slots: How many batches can be on their way or in use.
        reuse: Hand out the slot's own memory.
        transfer_dtype: What floating-point tensors cross the bus as; None leaves them.
        finish: What is done to each batch on the device; enqueued behind its copy.
        trust_pinned: Whether upstream leaves pinned memory alone once it has handed it on.

    Attributes:
        lock: Held while anything is enqueued or allocated for a slot.
        pin: Pins memory where it is; see `Transport`.
        is_broken: Whether a thread was left behind in it, so that it serves no other iteration.
        drew_ahead: Whether ``finish`` was seen to draw only when it had run in a thread.

    Synchronizes: `settle` waits for a copy, in the thread that stages.
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
        # Before the memory is let go: it goes back to the consumer's stream, and a batch that was
        # dropped may still be on its way into it. Python's exit frees nothing.
        self.slots = [transport.slot() for _ in range(num_slots)]
        weakref.finalize(self, _let_go, transport, self.slots).atexit = False
        self.free: SimpleQueue[Slot | None] = SimpleQueue()
        for slot in self.slots:
            self.free.put(slot)
        self.lock = threading.Lock()
        # Not a method: a loader that is told of it may live longer than this.
        self.pin = partial(_pin, self.lock, transport)
        self.is_broken = self.drew_ahead = False
        self.transfer_dtype = transfer_dtype
        self.trust_pinned = trust_pinned
        self._reuse = reuse
        self._finish = finish
        self._finish_draws: bool | None = None
        self._finish_makes_objects = False
        self._has_room = False
        self._layouts: dict[Any, Layout] = {}

    @property
    def finishes_late(self) -> bool:
        """Whether the transform draws random numbers, and so runs in the consumer's thread."""
        return bool(self._finish_draws)

    @property
    def finishes_ahead(self) -> bool:
        """Whether batches are transformed as they are staged, in whichever thread that is."""
        return self._finish is not None and self._finish_draws is False

    def finish_late(self, *, drew_ahead: bool) -> None:
        """Note that the transform draws by now: from here on it runs in the consumer's thread."""
        with self.lock:
            self.transport.drain()  # what it keeps was made on the copy stream
        self._finish_draws = True
        self.drew_ahead = drew_ahead

    def settle(self, slot: Slot) -> None:
        """Wait until the slot's previous copy is done, before anything is staged in it."""
        with self.lock:
            self.transport.settle(slot)
            slot.sources = None
            if slot.lent is not None:
                self.transport.settle_lent(slot)
                slot.lent = None

    def settle_all(self) -> None:
        """Wait until no copy reads its source any more, where that is another's memory."""
        with self.lock:
            _settle(self.transport, self.slots)

    def stage(self, slot: Slot, batch: Any, position: Position) -> Staged:
        """Lay ``batch`` out in a slot that is settled, and enqueue its copies."""
        cargo = Cargo(batch, self.transport.device, self.transfer_dtype, self.trust_pinned)
        finish = self._finish
        late = finish is not None and (
            # Not known before the first batch is handed out, in the consumer's thread.
            self._finish_draws is not False
            or self._finish_makes_objects
            or bool(cargo.resident)
            or (cargo.has_objects and not self._reuse)
        )
        with self.lock:
            self._let_sources_go()
            mold = self._mold(slot, cargo)
            mold.fill(cargo.plain)
            on_device, copies = mold.cut(slot.blocks, cargo.plain)
            owned: set[int] | None = None
            # Before a copy can begin: if what comes behind it fails, it reads them all the same.
            slot.sources = cargo.direct
            slot.lent = batch if cargo.has_objects else None
            if cargo.is_simple and (late or finish is None):
                arrived = put_back(cargo.batch, iter(on_device))
                self.transport.upload(slot, copies, None)
            else:
                owned = cargo.resident | set(map(id, on_device))
                arrive = partial(self._arrive, cargo, on_device, late)
                arrived = self.transport.upload(slot, copies, arrive)
                # What lies in memory of the copy stream's. What the consumer owns is not held: it
                # would live here for a round of the ring after it was let go.
                foreign = [t for t in tensors(arrived) if id(t) not in owned]
                slot.held = arrived if self._reuse else foreign
        return Staged(arrived, position, slot, owned, late, mold.layout.num_bytes)

    def _let_sources_go(self) -> None:
        """Let the sources of copies that are done go, long before their slot is used again."""
        for slot in self.slots:
            if slot.sources and self.transport.is_copied(slot):
                slot.sources = None

    def _arrive(self, cargo: Cargo, on_device: list[Tensor], late: bool) -> Any:
        if cargo.is_simple:
            moved = put_back(cargo.batch, iter(on_device))
        else:
            placed = {id(t): there for t, there in zip(cargo.plain, on_device, strict=True)}
            moved = map_batch(
                cargo.batch,
                lambda t: self._arrived(t, placed),
                self._object_arrived,
                anew=self._finish is not None,  # which may write to what upstream keeps
            )
        return moved if late or self._finish is None else self._finish(moved)

    def hand_out(self, staged: Staged) -> Any:
        """Return the batch for the consumer's stream."""
        self.transport.receive(staged.slot)
        batch = staged.batch
        owned = staged.owned
        if owned is not None and not self._reuse:
            device = self.transport.device
            batch = map_batch(
                batch,
                lambda t: t if id(t) in owned else self._own(t),
                lambda value: move_object(value, device),
            )
        if staged.finish_late and self._finish is not None:
            batch = self._finish_watched(batch)
        return batch

    def _own(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, Parameter):
            return tensor
        if tensor.requires_grad and tensor.is_leaf:
            return self.transport.clone(tensor.detach()).requires_grad_()
        return self.transport.clone(tensor)

    def take_back(self, slot: Slot) -> None:
        """Let the slot be written again, behind what was enqueued until now."""
        try:
            if not self._reuse and slot.stream is not None:
                self._renew(slot)
        finally:
            self.transport.release(slot)
            self.free.put(slot)

    def _renew(self, slot: Slot) -> None:
        try:
            if torch.is_inference_mode_enabled():
                with torch.inference_mode(False):
                    self.transport.renew(slot)
            else:
                self.transport.renew(slot)
        except BaseException:
            slot.blocks = []  # the next batch in it asks for memory again
            raise

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

    def _object_arrived(self, value: Any) -> Any:
        # What an unknown object holds cannot be copied out of the copy stream's memory: without
        # reuse it moves as it is handed out.
        return move_object(value, self.transport.device) if self._reuse else value

    def _arrived(self, tensor: Tensor, placed: dict[int, Tensor]) -> Tensor:
        found = placed.get(id(tensor))
        return move_tensor(tensor, self.transport.device) if found is None else found

    def _finish_watched(self, batch: Any) -> Any:
        """Run ``finish``; the first time, find out whether it may run beside the step."""
        assert self._finish is not None
        if self._finish_draws is not None:
            return self._finish(batch)
        before = get_rng_state(self.transport.device)
        result = self._finish(batch)
        draws = not same_rng_state(before, get_rng_state(self.transport.device))
        self._finish_makes_objects = _has_objects(result)  # whose memory cannot be copied out
        # What it made on the device for itself, such as constants, is there for the copy stream.
        self.transport.drain()
        self._finish_draws = draws
        return result

    def _mold(self, slot: Slot, cargo: Cargo) -> Mold:
        # What is cut in inference mode is of no use outside of it.
        keeps = not torch.is_inference_mode_enabled()
        mold = slot.molds.get(cargo.key) if keeps else None
        if mold is not None and slot.blocks:
            return mold
        layout = self._layout(cargo)
        self._make_room(slot, layout)
        assert slot.pinned is not None
        mold = Mold(layout, slot.pinned, slot.blocks if self._reuse else None)
        if keeps:
            if len(slot.molds) >= MOST_MOLDS:
                slot.molds.clear()
            slot.molds[cargo.key] = mold
        return mold

    def _layout(self, cargo: Cargo) -> Layout:
        layout = self._layouts.get(cargo.key)
        if layout is None:
            if len(self._layouts) >= MOST_LAYOUTS:
                self._layouts.clear()
            layout = self._layouts[cargo.key] = lay_out(cargo.kinds())
        return layout

    def _make_room(self, slot: Slot, layout: Layout) -> None:
        # At the first batch all slots at once, since pinning stalls the device.
        slots = [slot] if self._has_room else self.slots
        self._has_room = True
        for each in slots:
            pinned = 0 if each.pinned is None else each.pinned.numel()
            have = [block.numel() for block in each.blocks]
            have += [-1] * (len(layout.block_bytes) - len(have))
            if pinned >= layout.host_bytes and all(map(int.__ge__, have, layout.block_bytes)):
                continue
            each.molds.clear()
            with torch.inference_mode(False):  # such memory could not be written outside of it
                self.transport.allocate(
                    each,
                    _grown(pinned, layout.host_bytes),
                    [_grown(*sizes) for sizes in zip(have, layout.block_bytes, strict=False)],
                )


def _pin(lock: threading.Lock, transport: Transport, address: int, num_bytes: int) -> Unpin:
    with lock:
        return transport.pin(address, num_bytes)


def _let_go(transport: Transport, slots: list[Slot]) -> None:
    _settle(transport, slots)
    transport.drain()


def _settle(transport: Transport, slots: list[Slot]) -> None:
    for slot in slots:
        if slot.sources:  # whose memory another process may write as soon as they are gone
            transport.settle(slot)
        slot.sources = None
        if slot.lent is not None and slot.stream is None:
            transport.settle_lent(slot)
            slot.lent = None


def _grown(old: int, new: int) -> int:
    # Some more than asked, or lengths that grow bit by bit would move the slot each time.
    return old if old >= new else new + (new // 4 if old > 0 else 0)


def _has_objects(batch: Any) -> bool:
    found: list[Any] = []

    def note(value: Any) -> Any:
        found.append(value)
        return value

    map_batch(batch, lambda tensor: tensor, note)
    return bool(found)
