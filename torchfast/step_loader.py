"""What a trainer makes of a loader: what comes out of it is what a step takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torchfast.data import PrefetchingLoader, shard_loader
from torchfast.step import TrainStep


def step_loader(step: TrainStep, loader: Iterable[Any], **options: Any) -> PrefetchingLoader:
    """Return a loader that yields what a step takes, on its device; of many ranks each its part.

    Args:
        step: Whose batches they are.
        loader: Any iterable of batches.
        **options: Of `PrefetchingLoader`, but for those that the step decides on.
    """
    ranks = step.ranks
    if isinstance(loader, PrefetchingLoader):
        check_serves(loader, step, fully=False)
    else:
        loader = shard_loader(loader, rank=ranks.rank, world_size=ranks.world_size)
    prefetching = PrefetchingLoader(
        loader,
        step.device,
        accumulate=step.accumulate,
        channels_last=step.channels_last,
        ranks=ranks.group,
        **options,
    )
    step.memory.note_loader(prefetching)
    return prefetching


@contextmanager
def fit_loader(
    step: TrainStep, loader: Iterable[Any], unroll: int | None
) -> Iterator[PrefetchingLoader]:
    """Give what fit loops over: a PrefetchingLoader as it is, or one that is made for the loop.

    Args:
        step: Whose batches they are.
        loader: Any iterable of batches.
        unroll: Most steps in a replay; None where several were not asked for.
    """
    if isinstance(loader, PrefetchingLoader):
        check_serves(loader, step)
        if unroll is not None and loader.unroll != unroll:
            raise ValueError(
                f"fit was given unroll={unroll} and a PrefetchingLoader with "
                f"unroll={loader.unroll}, which decides how many batches it can hold; make it with "
                f"trainer.prefetch(loader, unroll={unroll})"
            )
        yield loader
        return
    if step.unrolled.why_never is not None:
        unroll = None  # no slots for batches that nobody would wait for
    # The loop holds no batch longer than its step.
    with step_loader(step, loader, reuse=True, unroll=unroll) as prefetching:
        yield prefetching


def check_serves(loader: PrefetchingLoader, step: TrainStep, *, fully: bool = True) -> None:
    """Raise ValueError unless what comes out is what the step takes, and of ranks each its part."""
    for name in ("device", "accumulate", "ranks") if fully else ("ranks",):
        own, needed = getattr(loader, name), getattr(step, name)
        if name == "ranks":
            own, needed = own.size, needed.world_size
        if own != needed:
            raise ValueError(
                f"the PrefetchingLoader has {name}={str(own)!r} and the trainer "
                f"{name}={str(needed)!r}; make it with trainer.prefetch(loader)"
            )
