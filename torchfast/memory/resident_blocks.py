"""Which blocks have their parameters on the device, and the copies that bring them there.

Who may touch which memory when:

- **To the device.** Memory is requested on the stream of the computation, and the stream that
  copies waits for what is enqueued there by then. The computation waits for the copy before it
  reads. Memory of a block that goes is free for what is enqueued on that stream from then on.
- **On the host** a parameter may be written at any time, by the optimizer or by anybody. So each
  call of a block returns only when its copies are done, behind a computation that is enqueued; a
  copy that was made ahead is used only if the parameter is what it was; what is left of a backward
  is waited for at its end; and no forward finds what an earlier one has left, since torch keeps no
  count of fused updates.
- **Gradients** go to the host as they are made, by a stream of their own, and the computation waits
  for the older ones, so that they do not gather on the device. They arrive in pinned memory of
  their own, and autograd adds them to ``.grad`` there: see `brought_parameters`.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
from torch import Tensor

from torchfast._core.errors import CaptureError
from torchfast.memory.copy_streams import CopyStreams

if TYPE_CHECKING:
    from torchfast.memory.host_block import HostBlock


class DeviceCopy(NamedTuple):
    """A parameter on the device.

    Attributes:
        source: The parameter, on the host.
        tensor: Its values, in the same layout.
        written: What changes when the parameter is written or replaced.
        version: How often the copy was written, which nobody should.
    """

    source: Tensor
    tensor: Tensor
    written: tuple[int, int]
    version: int

    @property
    def is_current(self) -> bool:
        """Whether the parameter holds what was copied."""
        return self.written == written_of(self.source)


class Flight(NamedTuple):
    """A gradient on its way to the host."""

    home: Any
    gradient: Tensor
    landed: Any


@final
@dataclass(eq=False)
class Resident:
    """A block whose parameters are on the device.

    Attributes:
        home: The stream of the computation.
        copies: By the ``id`` of the parameter.
        fetched: The event behind which they are there.
        has_arrived: Whether the computation has waited for that.
    """

    home: Any
    copies: dict[int, DeviceCopy]
    fetched: Any
    has_arrived: bool = False

    def fits(self, sources: list[Tensor]) -> bool:
        """Whether these are the parameters, and hold what was copied."""
        return len(sources) == len(self.copies) and all(
            (copy := self.copies.get(id(source))) is not None and copy.is_current
            for source in sources
        )


@final
@dataclass
class _Guess:
    """What is expected to come next."""

    block: HostBlock
    is_trusted: bool = True


@final
@dataclass
class _Order:
    """The order in which blocks are called: that of the last time is the best guess."""

    after: dict[HostBlock, _Guess] = field(default_factory=dict)
    before: dict[HostBlock, HostBlock] = field(default_factory=dict)
    called: set[HostBlock] = field(default_factory=set)
    last: HostBlock | None = None

    def note(self, block: HostBlock) -> None:
        """Note a call in a forward."""
        if block in self.called:  # the next forward, or a block that is shared
            self.end()
        self.called.add(block)
        if (last := self.last) is not None:
            self.before[block] = last
            guess = self.after.get(last)
            if guess is None:
                self.after[last] = _Guess(block)
            else:
                # A wrong guess has cost a copy, so it has to be right twice before the next one.
                self.after[last] = _Guess(block, is_trusted=guess.block is block)
        self.last = block

    def end(self) -> None:
        """Note that what comes is another forward."""
        self.called.clear()
        self.last = None

    def following(self, block: HostBlock) -> HostBlock | None:
        """Return the block that is likely to be called after another one."""
        guess = self.after.get(block)
        return guess.block if guess is not None and guess.is_trusted else None

    def preceding(self, block: HostBlock) -> HostBlock | None:
        """Return the block before, of those whose parameters the backward needs."""
        passed = {block}
        before = self.before.get(block)
        while before is not None and before not in passed:
            if before.is_needed_again:
                return before
            passed.add(before)
            before = self.before.get(before)
        return None


@final
class ResidentBlocks:
    """Brings parameters of blocks to a device, a few blocks at a time.

    Args:
        side: The device.
        device: Where memory is requested.
        max_blocks: The most blocks there at a time; calls within calls may need more.

    Attributes:
        counts: What was copied so far.
        most_at_once: The most blocks that were there.
    """

    def __init__(self, side: CopyStreams, device: torch.device, max_blocks: int) -> None:
        self.side, self.device = side, device
        self._max_blocks = max_blocks
        self._back, self._out = side.new(), side.new()
        self._lock = threading.RLock()  # the backward has threads of its own
        self._residents: dict[HostBlock, Resident] = {}  # what was used last comes last
        self._order = _Order()
        self._flights: deque[Flight] = deque()
        self._last_copy: Any = None
        self._task = -1  # the graph task whose end is waited for
        self.counts = dict.fromkeys(("fetched_blocks", "unused_blocks", "fetched_bytes"), 0)
        self.counts |= {"gradient_bytes": 0}
        self.most_at_once = 0

    # -- A call of a block -------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """Let go of what an earlier forward has left, for its parameters may be others by now.

        A backward lets blocks go as it ends. But there need not be one, and neither fused updates
        nor writes through ``.data`` leave a trace. In a capture, which may be of another model's
        update, no copy may be waited for, and nothing is written yet.
        """
        with self._lock:
            if torch._C._current_graph_task_id() == -1 and not self.side.is_capturing():
                self.drop_all()

    def begin(self, block: HostBlock) -> Resident:
        """Return a block's parameters for a call, and begin to bring those of the next block.

        Raises:
            CaptureError: Something captures this into a graph.
        """
        with self._lock, torch.inference_mode(False), torch.no_grad():
            if self.side.is_capturing():
                raise CaptureError(
                    f"block {block.path!r} has its parameters on the host, and which of them a "
                    "step needs, and its gradients, the host finds out in every step; take "
                    "Plan(cuda_graph=False), or leave the block out of what is offloaded"
                )
            if torch._C._current_graph_task_id() != -1:  # recompute runs it again
                self.join_behind_backward()
                resident = self._bring(block)
                block.num_active += 1
                self._bring_ahead(self._order.preceding(block))
                return resident
            self._land(0)  # of a backward that ended by an error
            self._order.note(block)
            resident = self._bring(block)
            block.num_active += 1
            self._bring_ahead(self._order.following(block))
            return resident

    def end(self, block: HostBlock, resident: Resident) -> None:
        """Note that a call is over; its copies are done then. Synchronizes: With those copies."""
        with self._lock:
            block.num_active -= 1
            # No backward will come for it, whose end lets blocks go; and until the next forward a
            # parameter may be written through .data, which nobody sees.
            is_done = not (torch.is_grad_enabled() and block.is_needed_again)
            if is_done and block.num_active == 0:
                self._drop(block)
            is_in_backward = torch._C._current_graph_task_id() != -1
        if not is_in_backward:
            resident.fetched.synchronize()

    # -- The backward ------------------------------------------------------------------------------

    def copy_for_backward(self, block: HostBlock, source: Tensor) -> Tensor:
        """Return a parameter for the backward, and begin to bring the block before its own."""
        with self._lock, torch.inference_mode(False), torch.no_grad():
            self.join_behind_backward()
            resident = self._bring(block)
            found = resident.copies.get(id(source))
            if found is None:  # it was replaced since
                raise RuntimeError(
                    f"a parameter of block {block.path!r} was replaced between the forward and the "
                    "backward that needs it; replace parameters behind the backward"
                )
            self._bring_ahead(self._order.preceding(block))
            return found.tensor

    def send_gradient(self, block: HostBlock, source: Tensor, gradient: Tensor) -> tuple[Any, Any]:
        """Begin to copy a gradient to the host; return where it will be, and the event behind it.

        Args:
            block: Its block.
            source: The parameter.
            gradient: On the device, dense.
        """
        with self._lock, torch.inference_mode(False), torch.no_grad():
            self.join_behind_backward()
            target = self.host_memory(source)
            home = self.side.current()
            if gradient.stride() != target.stride() or gradient.is_conj() or gradient.is_neg():
                laid_out = torch.empty_strided(
                    target.size(), target.stride(), dtype=target.dtype, device=self.device
                )
                gradient = laid_out.copy_(gradient)
            self._out.wait_event(home.record_event())
            with self.side.on(self._out):
                target.copy_(gradient, non_blocking=True)
            landed = self._out.record_event()
            self._flights.append(Flight(home, gradient, landed))
            self.counts["gradient_bytes"] += gradient.nbytes
            self._land(block.num_bytes)
            return target, landed

    def host_memory(self, like: Tensor) -> Tensor:
        """Return pinned memory of its own for a tensor like another one, in its layout."""
        num_bytes = like.numel() * like.element_size()
        flat = self.side.pinned(max(1, num_bytes))[:num_bytes].view(like.dtype)
        if like.is_contiguous():
            return flat.view(like.shape)
        dense = torch.empty_like(like, device="meta").stride()
        return flat.as_strided(like.shape, dense)

    def join_behind_backward(self) -> None:
        """Ask once for a join at the end of the backward that runs now."""
        task = torch._C._current_graph_task_id()
        if task in (-1, self._task):
            return
        self._task = task
        torch.autograd.Variable._execution_engine.queue_callback(self._join)

    def _join(self) -> None:
        with self._lock:
            self._task = -1
            self._order.end()
            self._land(0)
            self.drop_all()
            last, self._last_copy = self._last_copy, None
        if last is not None:
            last.synchronize()

    def _land(self, most_bytes: int) -> None:
        """Let the computation wait for the oldest gradients until so much is under way."""
        flying = sum(flight.gradient.nbytes for flight in self._flights)
        while self._flights and flying > most_bytes:
            flight = self._flights.popleft()
            flying -= flight.gradient.nbytes
            flight.home.wait_event(flight.landed)

    # -- Blocks on the device ----------------------------------------------------------------------

    @property
    def num_residents(self) -> int:
        """How many blocks are there, or on their way."""
        return len(self._residents)

    def on_device(self) -> dict[str, list[Tensor]]:
        """Return what is on the device now, by what it is."""
        with self._lock:
            copies = [copy for r in self._residents.values() for copy in r.copies.values()]
            gradients = [flight.gradient for flight in self._flights]
        return {
            "parameters brought from the host": [copy.tensor for copy in copies],
            "gradients on their way to the host": gradients,
        }

    def drop_all(self) -> None:
        """Let all blocks go that are not in use."""
        for block in list(self._residents):
            if block.num_active == 0:
                self._drop(block)

    def _bring(self, block: HostBlock) -> Resident:
        home = self.side.current()
        found = self._residents.get(block)
        if found is not None and not (found.home == home and found.fits(block.sources())):
            self._drop(block)
            found = None
        if found is None:
            self._make_room(keep=block)
            found = self._fetch(block, home)
        self._residents[block] = self._residents.pop(block)
        if not found.has_arrived:
            home.wait_event(found.fetched)
            found.has_arrived = True
        return found

    def _bring_ahead(self, block: HostBlock | None) -> None:
        if block is None or block in self._residents or self._max_blocks == 1:
            return
        newest = next(reversed(self._residents))
        if not self._make_room(keep=newest):
            return
        try:
            self._fetch(block, self.side.current())
        except torch.OutOfMemoryError:  # it may fit when it is needed
            return
        # What is in use now is the last to go.
        self._residents[newest] = self._residents.pop(newest)

    def _make_room(self, keep: HostBlock) -> bool:
        """Let the oldest go; False if all are in use."""
        for block in list(self._residents):
            if len(self._residents) < self._max_blocks:
                break
            if block is not keep and block.num_active == 0:
                self._drop(block)
        return len(self._residents) < self._max_blocks

    def _fetch(self, block: HostBlock, home: Any) -> Resident:
        sources = block.sources()
        written = [written_of(source) for source in sources]  # before any of it is read
        with self.side.on(home):
            tensors = [
                torch.empty_strided(p.size(), p.stride(), dtype=p.dtype, device=self.device)
                for p in sources
            ]
        self._back.wait_event(home.record_event())
        with self.side.on(self._back):
            for tensor, source in zip(tensors, sources, strict=True):
                tensor.copy_(source.detach(), non_blocking=True)
        self._last_copy = self._back.record_event()
        copies = {
            id(source): DeviceCopy(source, tensor, before, tensor._version)
            for source, tensor, before in zip(sources, tensors, written, strict=True)
        }
        resident = Resident(home, copies, self._last_copy)
        self._residents[block] = resident
        block.num_bytes = sum(tensor.nbytes for tensor in tensors)
        self.counts["fetched_blocks"] += 1
        self.counts["fetched_bytes"] += block.num_bytes
        self.most_at_once = max(self.most_at_once, len(self._residents))
        return resident

    def _drop(self, block: HostBlock) -> None:
        resident = self._residents.pop(block, None)
        if resident is not None and not resident.has_arrived:
            # Guessed wrong. Nothing waits for this copy, whose memory is given out again.
            resident.fetched.synchronize()
            self.counts["unused_blocks"] += 1


def written_of(parameter: Tensor) -> tuple[int, int]:
    """Return what changes when a parameter is written or replaced."""
    return parameter._version, parameter.data_ptr()
