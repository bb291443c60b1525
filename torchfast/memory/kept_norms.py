"""Norms whose result is kept as the layers behind them see it, so that nobody computes them again.

A norm in front of linear layers, as in every transformer, is read by them alone. Autocast casts
what it returns to half its width, and that is what the layers save for the backward. To keep that
much, with the statistics of the norm, which are tiny, spares the norm and the cast: of all that a
block computes besides attention they cost most for a byte.

The second run leaves the norm out, then, and what stands for its result is a `Deferred`. The layers
take what they have kept in its place. Whatever else looks at it computes it after all, so the block
may do in a later call what it did not in the one that was measured.

In a convolutional network a ReLU alone reads most batch norms, and the next convolution reads
that. They move memory, twice as much as the convolutions, and take longer. To keep what the ReLU
returns, which is saved anyway, spares both. And a batch norm whose result is read only when all is
saved that the second run is for, as in front of the sum at the end of a block, is never computed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from torchfast.memory.kept_results import Result

NORMS = (nn.LayerNorm, nn.RMSNorm)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
ACTIVATIONS = (nn.ReLU,)  # which save what they return, and not what they get

# Than a convolution a batch norm and a ReLU take so many times as long to move a byte: 1.7 TB/s in
# place of 2.8 in bottlenecks on an H200 (benchmarks/recompute.py).
_SLOWER = 1.6
# Of what a norm returns: more than its statistics, and it is not one operation.
_MOST_STATISTICS = 8


class Norm(NamedTuple):
    """A norm that is read by linear layers alone, or by an activation, or not in time.

    Attributes:
        made_in: The stretch of the block in which it runs.
        readers: Those of the layers.
        activation: That of the activation, whose result is kept.
        read_at: How many tensors are saved before somebody reads the norm; None if others have kept
            what they read.
        result: What it would take to keep, and what it costs.
        storages: What is kept.
    """

    made_in: Any
    readers: tuple[Any, ...]
    activation: Any
    read_at: int | None
    result: Result
    storages: dict[int, int]


@final
class _Made:
    __slots__ = (
        "activated", "activation", "is_batch", "made_in", "out", "read_at", "readers", "saved", "x",
    )  # fmt: skip

    def __init__(self, made_in: Any, x: int, out: Tensor, *, is_batch: bool) -> None:
        self.made_in, self.x, self.out, self.is_batch = made_in, x, out, is_batch
        self.readers: list[Any] = []
        self.activation: Any = None
        self.activated: Tensor | None = None  # what that returned
        self.saved: dict[int, int] = {}  # and saved
        self.read_at: int | None = None  # how many tensors had been saved by then


@final
class NormWatch:
    """Finds in a call of a block the norms that need not be computed again.

    Args:
        batch_norms: Whether to look for those.
    """

    def __init__(self, *, batch_norms: bool) -> None:
        self._kinds = (*NORMS, *BATCH_NORMS) if batch_norms else NORMS
        self._made: dict[int, _Made] = {}
        self._read_otherwise: set[int] = set()
        self._saved: dict[Any, dict[int, int]] = {}
        self._num_saved = 0
        self._saved_at: dict[int, int] = {}  # behind how many others, by storage
        self._activations: set[Any] = set()
        self._activating: _Made | None = None  # under way
        self._activated: list[tuple[int, _Made]] = []

    def returned(self, stretch: Any, module: nn.Module, args: Any, out: Any) -> None:
        """Note what a leaf has returned."""
        kind = type(module)
        if len(args) != 1 or type(out) is not Tensor or not out.requires_grad:
            return
        if kind in self._kinds:
            x = args[0].untyped_storage()._cdata
            made = _Made(stretch, x, out.detach(), is_batch=kind in BATCH_NORMS)
            self._made[out.untyped_storage()._cdata] = made
        elif kind in ACTIVATIONS:
            self.activated(args[0], out)

    def enters(self, stretch: Any, module: nn.Module, args: Any) -> None:
        """Note that a leaf is called."""
        if len(args) != 1 or type(args[0]) is not Tensor:
            return
        if type(module) is nn.Linear:
            made = self._of(args[0])
            if made is not None and not made.is_batch:
                made.readers.append(stretch)
        elif type(module) in ACTIVATIONS:
            self.activates(stretch, args[0])

    def activates(self, stretch: Any, x: Tensor) -> None:
        """Note that an activation is called; the first one of a stretch counts."""
        is_first = stretch not in self._activations
        self._activations.add(stretch)
        made = self._of(x)
        if is_first and made is not None and made.is_batch and made.activation is None:
            made.activation, self._activating = stretch, made

    def activated(self, x: Tensor, out: Any) -> None:
        """Note what it has returned."""
        made = self._activating
        if made is not None and type(out) is Tensor:
            made.activated = out.detach()
            key = x.untyped_storage()._cdata
            if out.untyped_storage()._cdata == key:
                # In place: who reads that from now on does not read the norm.
                self._activated.append((key, self._made.pop(key)))
        self._activating = None

    def _of(self, x: Tensor) -> _Made | None:
        """Return the norm whose result it is."""
        made = self._made.get(x.untyped_storage()._cdata)
        return made if made is not None and made.out.shape == x.shape else None

    def runs(self, stretch: Any, tensors: Iterable[Tensor]) -> None:
        """Note what an operation reads."""
        if not self._made:
            return
        for tensor in tensors:
            if tensor.layout is torch.strided:
                key = tensor.untyped_storage()._cdata
                made = self._made.get(key)
                if made is None:
                    continue
                if made.read_at is None:
                    made.read_at = self._num_saved
                if made is not self._activating and stretch not in made.readers:
                    self._read_otherwise.add(key)

    def saves(self, stretch: Any, storages: dict[int, int]) -> None:
        """Note what autograd saves."""
        for key in storages:
            self._saved_at.setdefault(key, self._num_saved)
        self._num_saved += 1
        self._saved.setdefault(stretch, {}).update(storages)
        if self._activating is not None:
            self._activating.saved.update(storages)

    def found(self, num_waited: int, returned: Collection[int]) -> list[Norm]:
        """Return the norms.

        Args:
            num_waited: How many of the saved tensors a second run is for.
            returned: The storages of what the block returned.
        """
        norms = []
        for key, made in (*self._made.items(), *self._activated):
            statistics = {
                k: size for k, size in self._saved.get(made.made_in, {}).items() if k != made.x
            }
            if sum(statistics.values()) * _MOST_STATISTICS > made.out.nbytes:  # not one operation
                continue
            if made.is_batch:
                norm = self._batch_norm(key, made, statistics, num_waited, returned)
            else:
                norm = self._norm(key, made, statistics)
            if norm is not None:
                norms.append(norm)
        return norms

    def _norm(self, key: int, made: _Made, statistics: dict[int, int]) -> Norm | None:
        if not made.readers or key in self._read_otherwise:
            return None
        held = self._held(key, made)
        if held is None:
            return None
        kept = statistics | {held[0]: held[1]}
        # It reads its input and writes its result; a cast reads that and writes what is held.
        moved = 2 * made.out.nbytes
        if held[0] != key:
            moved += len(made.readers) * (made.out.nbytes + held[1])
        result = Result("norm", sum(kept.values()), 0.0, moved_bytes=moved)
        return Norm(made.made_in, tuple(made.readers), None, None, result, kept)

    def _batch_norm(
        self,
        key: int,
        made: _Made,
        statistics: dict[int, int],
        num_waited: int,
        returned: Collection[int],
    ) -> Norm | None:
        moved = 3 * made.out.nbytes * _SLOWER  # it reads its input twice
        own = None if made.activated is None else made.activated.untyped_storage()._cdata
        is_read_alone = key not in self._read_otherwise and own not in returned
        if made.activated is not None and is_read_alone and list(made.saved) == [own]:
            kept = statistics | made.saved
            moved += (made.out.nbytes + made.activated.nbytes) * _SLOWER
            result = Result("norm", sum(kept.values()), 0.0, moved_bytes=round(moved))
            return Norm(made.made_in, (), made.activation, None, result, kept)
        read_at = made.read_at
        # Of what nobody was seen to read nobody knows: compiled code and kernels are not seen.
        if read_at is None or min(read_at, self._saved_at.get(key, read_at)) < num_waited:
            return None
        result = Result("norm", sum(statistics.values()), 0.0, moved_bytes=round(moved))
        return Norm(made.made_in, (), None, read_at, result, statistics)

    def _held(self, key: int, made: _Made) -> tuple[int, int] | None:
        """Return the storage that the first reader saves of the norm's result."""
        saved = self._saved.get(made.readers[0], {})
        if key in saved:
            return key, saved[key]
        casts = [(k, size) for k, size in saved.items() if size * 2 == made.out.nbytes]
        return casts[0] if len(casts) == 1 else None
