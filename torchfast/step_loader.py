"""What a trainer makes of a loader: what comes out of it is what a step takes."""

from __future__ import annotations

from collections.abc import Iterable
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
    if fully and loader.unroll is not None:
        raise ValueError(
            f"the PrefetchingLoader has unroll={loader.unroll} and yields the batches of several "
            "steps, of which fit takes one at a time; leave unroll out, or call trainer.steps() in "
            "a loop of your own"
        )
