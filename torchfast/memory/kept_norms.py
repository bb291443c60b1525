"""Norms whose result is kept as the layers behind them see it, so that nobody computes them again.

A norm in front of linear layers, as in every transformer, is read by them alone. Autocast casts
what it returns to half its width, and that is what the layers save for the backward. To keep that
much, with the statistics of the norm, which are tiny, spares the norm and the cast: of all that a
block computes besides attention they cost most for a byte.

The second run leaves the norm out, then, and what stands for its result is a `Deferred`. The layers
take what they have kept in its place. Whatever else looks at it computes it after all, so the block
may do in a later call what it did not in the one that was measured.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from torchfast.memory.kept_results import Result

NORMS = (nn.LayerNorm, nn.RMSNorm)

# Of what a norm returns: more than its statistics, and it is not one operation.
_MOST_STATISTICS = 8


class Norm(NamedTuple):
    """A norm that is read by linear layers alone.

    Attributes:
        made_in: The stretch of the block in which it runs.
        readers: Those of the layers.
        result: What it would take to keep, and what it costs.
        storages: What is kept.
    """

    made_in: Any
    readers: tuple[Any, ...]
    result: Result
    storages: dict[int, int]


class _Made(NamedTuple):
    made_in: Any
    x: int
    out: Tensor
    readers: list[Any]


@final
class NormWatch:
    """Finds in a call of a block the norms that are read by linear layers alone."""

    def __init__(self) -> None:
        self._made: dict[int, _Made] = {}
        self._read_otherwise: set[int] = set()
        self._saved: dict[Any, dict[int, int]] = {}

    def returned(self, stretch: Any, module: nn.Module, args: Any, out: Any) -> None:
        """Note what a leaf has returned."""
        if type(module) in NORMS and len(args) == 1 and type(out) is Tensor and out.requires_grad:
            made = _Made(stretch, args[0].untyped_storage()._cdata, out.detach(), [])
            self._made[out.untyped_storage()._cdata] = made

    def enters(self, stretch: Any, module: nn.Module, args: Any) -> None:
        """Note that a leaf is called."""
        if type(module) is nn.Linear and len(args) == 1 and type(args[0]) is Tensor:
            made = self._made.get(args[0].untyped_storage()._cdata)
            if made is not None and made.out.shape == args[0].shape:
                made.readers.append(stretch)

    def runs(self, stretch: Any, tensors: Iterable[Tensor]) -> None:
        """Note what an operation reads."""
        if not self._made:
            return
        for tensor in tensors:
            if tensor.layout is torch.strided:
                key = tensor.untyped_storage()._cdata
                made = self._made.get(key)
                if made is not None and stretch not in made.readers:
                    self._read_otherwise.add(key)

    def saves(self, stretch: Any, storages: dict[int, int]) -> None:
        """Note what autograd saves."""
        self._saved.setdefault(stretch, {}).update(storages)

    def found(self) -> list[Norm]:
        """Return the norms, in the order of their calls."""
        norms = []
        for key, made in self._made.items():
            statistics = {
                k: size for k, size in self._saved.get(made.made_in, {}).items() if k != made.x
            }
            is_one = sum(statistics.values()) * _MOST_STATISTICS <= made.out.nbytes
            if not made.readers or key in self._read_otherwise or not is_one:
                continue
            held = self._held(key, made)
            if held is None:
                continue
            kept = statistics | {held[0]: held[1]}
            # It reads its input and writes its result; a cast reads that and writes what is held.
            moved = 2 * made.out.nbytes
            if held[0] != key:
                moved += len(made.readers) * (made.out.nbytes + held[1])
            result = Result("norm", sum(kept.values()), 0.0, moved_bytes=moved)
            norms.append(Norm(made.made_in, tuple(made.readers), result, kept))
        return norms

    def _held(self, key: int, made: _Made) -> tuple[int, int] | None:
        """Return the storage that the first reader saves of the norm's result."""
        saved = self._saved.get(made.readers[0], {})
        if key in saved:
            return key, saved[key]
        casts = [(k, size) for k, size in saved.items() if size * 2 == made.out.nbytes]
        return casts[0] if len(casts) == 1 else None
