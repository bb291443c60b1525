"""ActivationOffload: what autograd saves goes to the host and is back before it is needed.

Between its forward and its backward a saved activation only lies there, that of the first block
for nearly the whole step. Under `ActivationOffload` what a forward saves is copied to pinned
memory of the host by a stream of its own while the next blocks compute, its memory on the device is
free for them, and in the backward it is copied back before its turn. Both ways run beside the
computation, through the copy engines, on a bus that training leaves idle.

- **Window.** The newest ``window_bytes`` stay: their backward comes first. So much at most is on
  its way to the host at a time, and so much is fetched ahead. If the bus is slower than the
  computation, the computation waits: memory comes first here. ``max_bytes`` sends less.
- **By measurement**, with ``auto``: only what hides behind the computation goes, and as much more
  as ``max_slowdown`` lets the computation wait for. The first steps are looked at, then it stays as
  it is; see `offload_choice`.
- **Whole storages**, each once. Several views of one, or one tensor saved by several operations,
  are one copy. Parameters, buffers, what is small, and what was saved on another stream or is not
  an ordinary dense tensor stay where they are.
- **Pinned memory** is taken in the first steps and used again; a steady step asks for none.
- **Bits.** What comes back is what was there. torch does not look under hooks whether a saved
  tensor was written meanwhile, so that is looked at here, as it would be without them.
- **Capture.** Waits are events, memory is in place after the warm-up: a graph holds the copies too.
  The host memory of a capture belongs to its graph from then on, until `close`.

It helps where memory bounds the batch and the bus is fast beside the computation: long sequences,
large hidden sizes, a recent GPU. Recompute inside of it (offload outermost) sends only the inputs
of the blocks, which is the least to send for most of the gain. It does not help a step that waits
for the host, and small models fit anyway.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from torchfast._core.arguments import check_flag, check_int, check_not_negative, explain_keywords
from torchfast._core.blocks import find_blocks
from torchfast._core.decisions import Decision
from torchfast._core.device import resolve_device
from torchfast.memory.copy_streams import copy_streams_for
from torchfast.memory.host_pool import HostPool, default_host_bytes
from torchfast.memory.offload_choice import OffloadChoice
from torchfast.memory.offload_tuner import OffloadTuner, TunedForward
from torchfast.memory.packed_tensor import PackedTensor, SentTensor, share_count
from torchfast.memory.saved_storage import Lane, SavedStorage

_FIRST_WINDOW: Final = 1 << 26  # before anything is known of the model
_PARTS: Final = 16  # of a model without repeated blocks; a part is what one would be


@final
class ActivationOffload:
    """A context for the forward, under which what is saved for the backward goes to the host.

    Enter it around each forward; the backward may come in it or behind it. One object serves a
    model for its whole life.

    Args:
        model: What is trained. Its parameters and buffers stay on the device.
        min_bytes: Smaller storages stay.
        window_bytes: The newest bytes that stay; also the most on the way at a time. None takes
            what one block of the model has saved in the forward before.
        max_bytes: The most to send of one forward, the earliest first; None sends all.
        max_host_bytes: The most pinned memory, that of graphs included; what finds no room stays on
            the device. None takes half of the memory of the machine or the container, divided by
            ``LOCAL_WORLD_SIZE``.
        auto: Send only what hides behind the computation, as measured in the first steps; until
            then all of it.
        max_slowdown: With ``auto``, the part of the time of forward and backward by which they may
            take longer, waiting for copies, so that more goes than hides: 0.05 for a twentieth.
        device: Where to compute; None means where the first parameter is.

    Raises:
        TypeError: An argument of the wrong kind.
        ValueError: A number that is too small, a model without parameters, or ``max_slowdown``
            without ``auto``.

    Numerics: Bitwise equal to the step without it.
    Synchronizes: In the first steps, where memory is pinned, and with ``auto`` behind each
        backward that is looked at; then never.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> offload = ActivationOffload(model)
        >>> with offload:
        ...     loss = model(torch.ones(4, 8)).mean()
        >>> loss.backward()
        >>> offload.decision.outcome  # on the CPU there is nowhere to go
        'stepped aside'
    """

    @explain_keywords
    def __init__(
        self,
        model: nn.Module,
        *,
        min_bytes: int = 1 << 20,
        window_bytes: int | None = None,
        max_bytes: int | None = None,
        max_host_bytes: int | None = None,
        auto: bool = False,
        max_slowdown: float = 0.0,
        device: torch.device | str | int | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        self._min_bytes = check_int("min_bytes", min_bytes, minimum=1)
        self._window_bytes = _optional("window_bytes", window_bytes)
        self._max_bytes = _optional("max_bytes", max_bytes)
        self._max_host_bytes = _optional("max_host_bytes", max_host_bytes)
        self._device = resolve_device(device, model)
        self._model = model
        blocks = sum(group.num_uses for group in find_blocks(model))
        self._num_parts = blocks if blocks > 1 else _PARTS
        self._side = copy_streams_for(self._device)
        self._tuner: OffloadTuner | None = None
        self._is_auto = check_flag("auto", auto)
        self._max_slowdown = check_not_negative("max_slowdown", max_slowdown)
        if self._max_slowdown and not auto:
            raise ValueError(
                f"max_slowdown={self._max_slowdown} limits what is chosen by measurement, so it "
                "goes with auto=True only; without it max_bytes limits what is sent"
            )
        if auto and self._side is not None:
            self._tuner = OffloadTuner(self._side, self._max_bytes, self._max_slowdown)
        self._lock = threading.RLock()
        self._eager: Lane | None = None  # made at the first use: streams and memory
        self._captured: list[Lane] = []
        self._is_capture = False
        self._known: frozenset[int] | None = None
        self._saved_bytes = 0  # by the last forward, of what may go
        self._contexts: list[ExitStack] = []
        self._backward = -1  # the graph task that a join was asked for
        self._counts = dict.fromkeys(("forwards", "sent_bytes", "kept_no_room_bytes"), 0)

    @property
    def decision(self) -> Decision:
        """Whether anything goes to the host, and how much."""
        if self._side is None:
            detail = f"activations stay on {self._device}: only CUDA devices copy beside their work"
            return Decision(lever="offload", outcome="stepped aside", detail=detail)
        detail = (
            f"activations of {self._min_bytes:,} bytes and more go to pinned memory of the host, "
            "but for the newest, and are back before the backward needs them"
        )
        if self._tuner is None:
            return Decision(lever="offload", outcome="applied", detail=detail)
        choice, hides = self._tuner.choice, "hide behind the computation"
        if self._max_slowdown:
            hides += f" or hold it up by at most {100 * self._max_slowdown:g}% of its time"
        if choice is None:
            detail += "; how much of it hides behind the computation is not measured yet"
        elif choice.sent_bytes or not choice.is_settled:
            detail += f", as far as copies {hides}: {choice}"
        else:
            detail = f"activations stay on {self._device}: no copy would {hides}, {choice}"
            return Decision(lever="offload", outcome="stepped aside", detail=detail)
        return Decision(lever="offload", outcome="applied", detail=detail)

    @property
    def choice(self) -> OffloadChoice | None:
        """What ``auto`` has chosen for forwards like the last one; None before, or without it."""
        return None if self._tuner is None else self._tuner.choice

    def counters(self) -> dict[str, int]:
        """Return what the host has seen so far: of a captured step its capture, no replays.

        ``offload_forwards``; ``offload_sent_bytes``, in all of them; ``offload_kept_no_room_bytes``
        for want of pinned memory; ``offload_host_bytes`` and ``offload_host_slabs``, pinned now.
        """
        lanes = [*self._captured, *([] if self._eager is None else [self._eager])]
        return {
            "offload_forwards": self._counts["forwards"],
            "offload_sent_bytes": self._counts["sent_bytes"],
            "offload_kept_no_room_bytes": self._counts["kept_no_room_bytes"],
            "offload_host_bytes": sum(lane.pool.num_bytes for lane in lanes),
            "offload_host_slabs": sum(lane.pool.num_slabs for lane in lanes),
        }

    def close(self) -> None:
        """Let go of the pinned memory. Graphs that were captured under it must be gone."""
        with self._lock:
            self._eager = None
            self._captured.clear()
            if self._tuner is not None:
                self._tuner.forget()

    def __enter__(self) -> ActivationOffload:
        stack = ExitStack()
        if self._side is not None and torch.is_grad_enabled():
            with self._lock:
                one = self._begin()
            stack.enter_context(saved_tensors_hooks(one.pack, one.unpack))
            stack.callback(one.end)
        self._contexts.append(stack)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._contexts.pop().__exit__(kind, error, trace)

    def __repr__(self) -> str:
        return (
            f"ActivationOffload({type(self._model).__name__}, min_bytes={self._min_bytes}, "
            f"window_bytes={self._window_bytes}, max_bytes={self._max_bytes}, "
            f"max_host_bytes={self._max_host_bytes}, auto={self._is_auto}, "
            f"max_slowdown={self._max_slowdown})"
        )

    # -- A forward ---------------------------------------------------------------------------------

    def _begin(self) -> _Forward:
        assert self._side is not None
        lane = self._lane()
        home = self._side.current()
        if lane.limbo:  # a graph was dropped, or a backward ended by an error
            lane.join(home)
        self._backward = -1
        self._counts["forwards"] += 1
        window = self._window_bytes
        if window is None:
            window = self._saved_bytes // self._num_parts if self._saved_bytes else _FIRST_WINDOW
        tuned = None
        if self._tuner is not None:
            tuned = self._tuner.begin(lane, home, window, is_capture=self._is_capture)
        return _Forward(self, lane, home, window, tuned)

    def _lane(self) -> Lane:
        """Return the lane of eager steps, or that of the capture that is under way."""
        assert self._side is not None
        if self._eager is None:
            self._eager = Lane(self._side, self._pool())
        is_capture = self._side.is_capturing()
        if is_capture and not self._is_capture:
            # Filled by the warm-up. Replays write there at any time, so nobody else may.
            self._captured.append(Lane(self._side, self._eager.pool))
            self._eager.pool = self._pool()
        self._is_capture = is_capture
        return self._captured[-1] if is_capture else self._eager

    def _pool(self) -> HostPool:
        assert self._side is not None
        limit = default_host_bytes() if self._max_host_bytes is None else self._max_host_bytes
        # What captures took is still pinned.
        held = sum(lane.pool.num_bytes for lane in self._captured)
        return HostPool(self._side.pinned, max(0, limit - held))

    def _known_storages(self) -> frozenset[int]:
        """Return the storages of parameters and buffers, that is of what lives on anyway."""
        if self._known is None:
            tensors = [*self._model.parameters(), *self._model.buffers()]
            self._known = frozenset(
                t.untyped_storage()._cdata for t in tensors if type(t) in (Tensor, nn.Parameter)
            )
        return self._known

    def _may_go(self, tensor: Tensor, home: Any) -> bool:
        assert self._side is not None
        if type(tensor) is not Tensor or tensor.layout is not torch.strided:
            return False
        if not self._side.holds(tensor) or tensor.is_conj() or tensor.is_neg():
            return False
        storage = tensor.untyped_storage()
        num_bytes = storage.nbytes()
        if num_bytes < self._min_bytes or num_bytes % tensor.element_size():
            return False
        # A parameter of an FSDP block lies in another storage each time; a view of it tells.
        if any(isinstance(t, nn.Parameter) for t in (tensor, tensor._base)):
            return False
        if storage._cdata in self._known_storages():
            return False
        return bool(self._side.current() == home)

    def _join_behind_backward(self, lane: Lane, home: Any) -> None:
        """Ask once for a join at the end of the backward that runs now."""
        task = torch._C._current_graph_task_id()
        if task == -1 or task == self._backward:
            return
        self._backward = task

        def end() -> None:
            with self._lock:
                lane.join(home)
                if self._tuner is not None:
                    self._tuner.behind_backward()

        torch.autograd.Variable._execution_engine.queue_callback(end)


@final
class _Forward:
    """One forward: what it has saved."""

    def __init__(
        self,
        offload: ActivationOffload,
        lane: Lane,
        home: Any,
        window: int,
        tuned: TunedForward | None,
    ) -> None:
        self._offload, self._tuned = offload, tuned
        self._lane = lane
        self._home = home
        self._window_bytes = window
        self._siblings: list[weakref.ref[SavedStorage]] = []
        # The newest, which stay for now; held by autograd alone, so that they go with its graph.
        self._window: deque[weakref.ref[SavedStorage]] = deque()
        self._in_window = 0
        self._sent = 0
        self._saved = 0
        self._by_storage: dict[int, tuple[StorageWeakRef, weakref.ref[SavedStorage]]] = {}
        self._nothing = torch.empty(0, device=offload._device)

    def pack(self, tensor: Tensor) -> Any:
        """Take what autograd saves."""
        offload = self._offload
        with torch.no_grad(), offload._lock:
            if not offload._may_go(tensor, self._home):
                # Detached, since an output that its own node keeps would never go away.
                return PackedTensor(tensor.detach(), tensor._version)
            # It shares the count of writes with the tensor, and no memory.
            writes = tensor.detach()
            writes.data = self._nothing
            saved = self._find(tensor)
            if saved is None:
                saved = self._take(tensor, writes)
            return SentTensor(saved, writes, tensor)

    def unpack(self, packed: PackedTensor) -> Tensor:
        """Return to autograd what it saved."""
        packed.check()
        if not isinstance(packed, SentTensor):
            return packed.kept
        offload = self._offload
        with torch.no_grad(), offload._lock:
            offload._join_behind_backward(self._lane, self._home)
            if self._tuned is not None:
                self._tuned.used(packed.saved.index)
            return packed.view(packed.saved.bring(self._window_bytes))

    def end(self) -> None:
        """Note what the next forward is to know."""
        with self._offload._lock:
            if self._saved:
                self._offload._saved_bytes = self._saved
                if self._tuned is not None:
                    self._tuned.end()
            self._by_storage.clear()

    def _find(self, tensor: Tensor) -> SavedStorage | None:
        """Return the same storage with the same content, if it was saved before."""
        # While there is a weak reference, no other storage gets its number.
        found = self._by_storage.get(tensor.untyped_storage()._cdata)
        if found is None or found[0].expired():
            return None
        saved = found[1]()
        if saved is None or saved.version != tensor._version:
            return None
        fits = saved.num_bytes == tensor.untyped_storage().nbytes()
        return saved if fits and share_count(saved.writes, tensor) else None

    def _take(self, tensor: Tensor, writes: Tensor) -> SavedStorage:
        saved = SavedStorage(tensor, writes, self._lane, self._home, self._siblings)
        held = weakref.ref(saved)
        storage = tensor.untyped_storage()
        self._by_storage[storage._cdata] = (StorageWeakRef(storage), held)
        self._window.append(held)
        self._in_window += saved.num_bytes
        self._saved += saved.num_bytes
        if self._tuned is not None:
            self._tuned.saved(saved.num_bytes)
        while self._window and self._in_window > self._window_bytes:
            oldest = self._window[0]()
            if oldest is None:  # its graph is gone, and its size is not known any more
                self._window.popleft()
                alive = [found for held in self._window if (found := held()) is not None]
                self._in_window = sum(each.num_bytes for each in alive)
                continue
            if oldest is saved:
                break  # the very newest stays, however large
            self._window.popleft()
            self._in_window -= oldest.num_bytes
            self._send(oldest)
        return saved

    def _send(self, saved: SavedStorage) -> None:
        counts, limit = self._offload._counts, self._offload._max_bytes
        goes = self._tuned is None or self._tuned.sends(saved.index)
        if not goes or (limit is not None and self._sent + saved.num_bytes > limit):
            self._lane.keep(saved)
        elif self._lane.send(saved, may_grow=not self._offload._is_capture):
            self._sent += saved.num_bytes
            counts["sent_bytes"] += saved.num_bytes
        else:
            counts["kept_no_room_bytes"] += saved.num_bytes
            self._lane.keep(saved)
            if self._tuned is not None:
                self._tuned.found_no_room(self._sent)
        self._lane.land(self._window_bytes)


def is_offloading(pack: Any) -> bool:
    """Whether a hook on what is saved is that of a forward under an `ActivationOffload`."""
    return isinstance(getattr(pack, "__self__", None), _Forward)


def _optional(name: str, value: int | None) -> int | None:
    return None if value is None else check_int(name, value, minimum=0)
