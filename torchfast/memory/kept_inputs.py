"""Attention whose inputs are kept, so that nothing has to be run again that leads to them.

In front of attention a Llama turns queries and keys by their positions, in float32 and operation by
operation. For a byte of what it makes that is more traffic than anything else in the block, and of
all of it autograd saves nothing but cosines and sines, which exist anyway. Attention saves what
comes out in the end. To keep that, in place of what the layers for queries, keys and values
returned, takes as many bytes as those and spares the second run these layers and the turning.

It is offered where it is known to do so: each input of attention comes from linear layers by
operations that do nothing but compute, and neither autograd nor anything else looks at what is
between. Should a later call differ, what is looked at is computed then (`deferred`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from torchfast.memory.caller_mode import is_in_parts
from torchfast.memory.deferred import can_wait


class Inputs(NamedTuple):
    """What attention reads, and where that comes from.

    Attributes:
        read_in: The stretch of the block in which attention is called.
        layers: The calls of layers that nothing else needs.
        moved_bytes: Read and written between these and attention.
        storages: What autograd saves in the call of attention, its results included.
    """

    read_in: Any
    layers: tuple[Any, ...]
    moved_bytes: int
    storages: dict[int, int]


class _Call:
    """A call of attention: what it saves, and the layers that it reads, if it reads no more."""

    __slots__ = ("is_in_parts", "saved_bytes", "sources", "storages")

    def __init__(self, sources: frozenset[Any]) -> None:
        self.sources = sources
        self.storages: dict[int, int] = {}
        self.saved_bytes = 0
        self.is_in_parts = False


@final
class InputWatch:
    """Finds in a call of a block the inputs of attention that can be kept in place of products."""

    def __init__(self) -> None:
        # Storages that come from layers, and these. Weak: an address is not another's meanwhile.
        self._from: dict[int, frozenset[Any]] = {}
        self._alive: list[StorageWeakRef] = []
        self._spoiled: set[Any] = set()
        self._moved: list[tuple[frozenset[Any], int]] = []
        self._calls: dict[Any, list[_Call]] = {}
        self._now = _Call(frozenset())

    def returned(self, stretch: Any, module: nn.Module, args: Any, out: Any) -> None:
        """Note what a leaf has returned."""
        if type(module) is nn.Linear and len(args) == 1 and type(out) is Tensor:
            self._note(out, frozenset((stretch,)))

    def enters(self, stretch: Any, tensors: list[Tensor] | None) -> None:
        """Note that torch's attention is called, with its queries, keys and values."""
        found = [self._sources([tensor]) for tensor in tensors or ()]
        self._now = _Call(frozenset().union(*found) if all(found) else frozenset())
        self._calls.setdefault(stretch, []).append(self._now)

    def leaves(self, inputs: list[Tensor], result: Tensor) -> None:
        """Note what that call returned."""
        self._now.is_in_parts = is_in_parts(inputs, result, self._now.saved_bytes)

    def ran(
        self, func: Any, args: list[Tensor], out: list[Tensor], *, may_read: bool, may_wait: bool
    ) -> None:
        """Note an operation.

        Args:
            func: The operation.
            args: The tensors that it got.
            out: Those that it made.
            may_read: Whether it is a part of attention.
            may_wait: Whether it is between layers.
        """
        if not self._from or may_read:
            return
        sources = self._sources(args)
        if not sources:
            return
        if not may_wait or not can_wait(func):
            self._spoiled |= sources
            return
        new = [tensor for tensor in out if _key(tensor) not in self._from]
        for tensor in new:
            self._note(tensor, sources)
        if new:
            self._moved.append((sources, sum(tensor.nbytes for tensor in (*args, *new))))

    def saves(self, tensor: Tensor, storages: dict[int, int], *, may_save: bool) -> None:
        """Note what autograd saves, in a call of attention or elsewhere."""
        if may_save:
            self._now.storages.update(storages)
            self._now.saved_bytes += tensor.nbytes
            self._alive.append(StorageWeakRef(tensor.untyped_storage()))
        elif self._from:
            self._spoiled |= self._sources([tensor])

    def found(self) -> list[Inputs]:
        """Return what can be kept, in the order of the calls."""
        inputs = []
        for stretch, calls in self._calls.items():
            call = calls[0]
            others = [other for calls in self._calls.values() for other in calls if other != call]
            if (
                len(calls) != 1
                or call.is_in_parts
                or call.sources & self._spoiled
                or any(call.sources & other.sources for other in others)
            ):
                continue
            moved = sum(size for sources, size in self._moved if sources <= call.sources)
            if not moved:  # it comes from elsewhere, or products do as well
                continue
            layers = tuple(sorted(call.sources))
            inputs.append(Inputs(stretch, layers, moved, call.storages))
        return inputs

    def _note(self, tensor: Tensor, sources: frozenset[Any]) -> None:
        storage = tensor.untyped_storage()
        self._alive.append(StorageWeakRef(storage))
        self._from[storage._cdata] = sources

    def _sources(self, tensors: Iterable[Tensor]) -> frozenset[Any]:
        keys = {_key(tensor) for tensor in tensors}
        return frozenset().union(*(self._from[key] for key in keys if key in self._from))


def _key(tensor: Tensor) -> int:
    if tensor.layout is not torch.strided:
        return 0
    return int(tensor.untyped_storage()._cdata)
