"""What an arm takes of a GPU's memory, whether a graph changes its bits, what it hides."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

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


def exactness(
    makes: Sequence[Callable[[], Trainer]],
    batches: Sequence[Any],
    steps: int,
    *,
    needs_graph: bool,
) -> dict[str, Any]:
    """Train twice, and return whether the bits are the same on all ranks; all of them call it.

    Args:
        makes: Of a trainer whose steps run as they are, and of one that captures them.
        batches: Of this rank, over and over.
        steps: How many.
        needs_graph: Whether a training without a replay is a failure.

    Raises:
        RuntimeError: Nothing was replayed.
    """
    torch.use_deterministic_algorithms(True)
    try:
        (plain, _), (graphed, replays) = (_trained(make, batches, steps) for make in makes)
    finally:
        torch.use_deterministic_algorithms(False)
    if needs_graph and not replays:
        raise RuntimeError("nothing was replayed, so there is nothing to compare")
    differs = [name for name, value in plain.items() if not torch.equal(value, graphed[name])]
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, differs)
    told = [f"rank {rank}: {name}" for rank, names in enumerate(of_ranks) for name in names]
    return {
        "steps": steps,
        "replays": replays,
        "tensors": len(plain),
        "same_bits": not told,
        "differs": told[:5],
    }


def _trained(
    make: Callable[[], Trainer], batches: Sequence[Any], steps: int
) -> tuple[dict[str, Tensor], float]:
    """Return what a training leaves on this rank, on the host, and how often it was replayed."""
    trainer = make()
    try:
        losses = [trainer.step(batches[number % len(batches)]) for number in range(steps)]
        found = {f"loss {number}": _kept(loss) for number, loss in enumerate(losses)}
        named = dict(trainer.model.named_parameters())
        for name, parameter in named.items():
            found[name] = _kept(parameter)
            state = trainer.optimizer.state[parameter]
            found |= {
                f"{key} of {name}": _kept(value)
                for key, value in state.items()
                if isinstance(value, Tensor)
            }
        found |= {name: _kept(buffer) for name, buffer in trainer.model.named_buffers()}
        return found, trainer.report().counters.get("replays", 0)
    finally:
        trainer.close()


def _kept(tensor: Tensor) -> Tensor:
    held = tensor.detach()
    own: Tensor = held.to_local() if isinstance(held, DTensor) else held
    return own.cpu().clone()


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
