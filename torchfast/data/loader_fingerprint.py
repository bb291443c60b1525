"""By what a loader is known to yield the same batches as the one whose position was saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

import torch

from torchfast._core.errors import StateMismatchError
from torchfast.data.samplers import UNSIZED, samplers_of
from torchfast.data.sharded import ShardedSampler

# What must be as it was for a count of batches to mean the same batches.
_SAME: Final = {
    "batch_size": ("batch_size",),
    "drop_last": ("drop_last",),
    "num_workers": ("num_workers",),
    "num_replicas": (
        "sampler.num_replicas",
        "batch_sampler.num_replicas",
        "batch_sampler.sampler.num_replicas",
        "sampler.sampler.num_replicas",
        "num_replicas",
    ),
    "dealt_to": ("sampler.dealt_to",),
}
_SAMPLERS: Final = ("batch_sampler", "sampler")


def fingerprint(loader: Any) -> dict[str, Any]:
    """Return what a loader's position has to be saved with, as a file can have it."""
    found = {
        name: next((v for v in (look_up(loader, path) for path in paths) if v is not None), None)
        for name, paths in _SAME.items()
    }
    # What samples a position means, though no other number of ranks can be told from it.
    found["sampler_batch_size"] = None
    if found["batch_size"] is None:
        of_samplers = (look_up(loader, f"{each}.batch_size") for each in _SAMPLERS)
        found["sampler_batch_size"] = next((v for v in of_samplers if v is not None), None)
    samplers = list(_samplers_as_given(loader))
    found["samplers"] = ", ".join(type(each).__name__ for each in samplers) or None
    for name in ("seed", "shuffle"):
        of_each = (getattr(each, name, None) for each in samplers)
        found[f"sampler_{name}"] = next((v for v in of_each if isinstance(v, int)), None)
    try:
        found["num_samples"] = len(getattr(loader, "dataset", None))  # type: ignore[arg-type]
    except UNSIZED:
        found["num_samples"] = None
    # Without a data set, the loader's own length is all there is to tell.
    found["num_batches"] = None
    if getattr(loader, "dataset", None) is None:
        with suppress(*UNSIZED):
            found["num_batches"] = len(loader)
    return found


def _samplers_as_given(loader: Any) -> Iterator[Any]:
    """Yield the samplers, each once, without what deals them out: a position outlives that."""
    seen = set()
    for sampler in samplers_of(loader).values():
        given = sampler.given if isinstance(sampler, ShardedSampler) else sampler
        if id(given) not in seen:
            seen.add(id(given))
            yield given


def check_same(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise StateMismatchError unless a fingerprint is as the saved one, as far as that goes."""
    for name, value in saved.items():
        if own.get(name) != value:
            raise StateMismatchError(
                f"the position was saved with {name} {value}, and this loader has "
                f"{own.get(name)}; its batches would be others: build the loader as it was "
                "built before, or start the epoch anew"
            )


def look_up(loader: Any, path: str) -> Any:
    """Return the number or the generator at the end of a path of attributes; None if there is none.

    Other values are None too: a class may answer for every name.
    """
    value = loader
    for name in path.split("."):
        value = getattr(value, name, None)
    return value if isinstance(value, int | torch.Generator) else None
