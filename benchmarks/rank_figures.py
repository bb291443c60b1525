"""What an arm of several takes of a GPU's memory, and how well it hides its communication."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from torchfast import Trainer

PROFILED_STEPS = 10
GIGA = 1e9


class OwnMemory:
    """The most memory that an arm had, while others were in memory too.

    What the others hold does not change in an arm's turn, so it is what was allocated before the
    arm was made, or before its turn and is not its own.

    Args:
        is_on: Whether there is an allocator that tells.
    """

    def __init__(self, is_on: bool) -> None:
        self._is_on = is_on
        self._held = 0
        self.peak_bytes = 0

    @contextmanager
    def making(self) -> Iterator[None]:
        """Note what is allocated in the body, which makes the arm, and what is left of it."""
        if not self._is_on:
            yield
            return
        gc.collect()
        before = self._begin()
        try:
            yield
        finally:
            gc.collect()
            self._held = torch.cuda.memory_allocated() - before
            self._end(before)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Note what is allocated in the body, in which only this arm runs."""
        if not self._is_on:
            yield
            return
        before = self._begin()
        yield
        self._end(before - self._held)

    @property
    def peak_gb(self) -> float | None:
        """The most, in GB; None where nobody tells."""
        return self.peak_bytes / GIGA if self._is_on else None

    def _begin(self) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return int(torch.cuda.memory_allocated())

    def _end(self, of_others: int) -> None:
        torch.cuda.synchronize()
        own = int(torch.cuda.max_memory_allocated()) - of_others
        self.peak_bytes = max(self.peak_bytes, own)


class Own(list[Any]):
    """Batches of one rank alone, which are not to be dealt out."""

    is_sharded = True


def communication(make: Callable[[], Trainer], batch: Any, warmup: int) -> list[dict[str, float]]:
    """Return, by rank, the milliseconds of a step that collectives ran and that nothing hid.

    Of the trace of some steps; all ranks call it. On a GPU a collective that waits for a slower
    rank runs meanwhile.
    """
    trainer = make()
    try:
        with tempfile.TemporaryDirectory() as folder:
            report = trainer.profile(
                Own([batch] * (warmup + PROFILED_STEPS + 2)),
                steps=PROFILED_STEPS,
                warmup=warmup,
                folder=folder,
                lines=False,
            )
        found = report.to_dict()
    finally:
        trainer.close()
    names = ("step_ms", "communication_ms", "exposed_communication_ms")
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, {name: found[name] for name in names})
    return of_ranks
