"""The samplers of a loader, and those that they take their samples from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

_NAMES: Final = ("sampler", "batch_sampler")
_DEPTH: Final = 4  # a class that answers for every name has samplers without end


# What len() raises where nobody knows: the last, of what asks one that a wrapper does not have.
UNSIZED: Final = (TypeError, NotImplementedError, AttributeError)


def samplers_of(loader: Any) -> dict[str, Any]:
    """Return them by their names as seen from the loader, each once, the outer ones first."""
    seen: set[int] = set()
    found: dict[str, Any] = {}
    for name, sampler in _below(loader, "", _DEPTH):
        if id(sampler) not in seen:
            seen.add(id(sampler))
            found[name] = sampler
    return dict(sorted(found.items(), key=lambda item: item[0].count(".")))


def _below(holder: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    for name in _NAMES if depth else ():
        sampler = getattr(holder, name, None)
        if sampler is not None:
            yield path + name, sampler
            yield from _below(sampler, f"{path}{name}.", depth - 1)
