"""The collectives of shards, with a question to the other ranks before each of them.

As for a timer of steps (see `observed_shards`), each piece is given calls that do what they did,
for as long as a step is a shared try.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, final

from torch import nn

from torchfast._core.errors import PlanError
from torchfast._core.fsdp_pieces import pieces_of

_GATHER: Final = "_all_gather_comm"
_REDUCE: Final = "_reduce_scatter_comm"


@contextmanager
def asked_before(model: nn.Module, ask: Callable[[], None]) -> Iterator[None]:
    """Call ``ask`` before each collective of a sharded model in the body.

    Raises:
        PlanError: This torch does not let its collectives be replaced.
    """
    pieces = list(pieces_of(model))
    if not all(hasattr(piece, name) for piece in pieces for name in (_GATHER, _REDUCE)):
        raise PlanError(
            "out_of_memory='split' cannot tell the other ranks with this torch, whose shards have "
            "no collectives that can be replaced; take shard='ddp', or a newer torch"
        )
    held = [(piece, getattr(piece, _GATHER), getattr(piece, _REDUCE)) for piece in pieces]
    try:
        for piece, gather, reduce in held:
            setattr(piece, _GATHER, _AskedGather(gather, ask))
            setattr(piece, _REDUCE, _AskedReduce(reduce, ask))
        yield
    finally:
        for piece, gather, reduce in held:
            setattr(piece, _GATHER, gather)
            setattr(piece, _REDUCE, reduce)


@final
class _AskedGather:
    """Gathers a piece, once all ranks have said that they can."""

    def __init__(self, inner: Any, ask: Callable[[], None]) -> None:
        self._inner, self._ask = inner, ask

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self._ask()
        return self._inner(*arguments, **named)

    def allocate(self, *arguments: Any, **named: Any) -> Any:
        return self._inner.allocate(*arguments, **named)


@final
class _AskedReduce:
    """Reduces a piece, likewise.

    It is asked behind the second allocation, that of the result: then nothing is allocated any more
    before the gradients are reduced, and over replicas. Where one rank has the whole piece, that
    reduction over replicas is all there is.
    """

    def __init__(self, inner: Any, ask: Callable[[], None]) -> None:
        self._inner, self._ask = inner, ask
        self._num_allocated = 0

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if self._num_allocated != 2:  # a torch that allocates otherwise
            self._ask()
        self._num_allocated = 0
        return self._inner(*arguments, **named)

    def allocate(self, *arguments: Any, **named: Any) -> Any:
        result = self._inner.allocate(*arguments, **named)
        self._num_allocated = self._num_allocated % 2 + 1
        if self._num_allocated == 2:
            self._ask()
        return result
