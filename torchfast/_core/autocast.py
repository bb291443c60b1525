"""How autocast is set in a thread, and to have it so again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

Autocast = tuple[tuple[tuple[str, bool, torch.dtype], ...], bool]


def autocast_state(kind: str) -> Autocast:
    """Return how autocast is set for the host and for a kind of device."""
    kinds = (
        ("cpu",) if kind == "cpu" or not torch.amp.is_autocast_available(kind) else (kind, "cpu")
    )
    states = tuple(
        (one, torch.is_autocast_enabled(one), torch.get_autocast_dtype(one)) for one in kinds
    )
    return states, torch.is_autocast_cache_enabled()


@contextmanager
def autocast_as(state: Autocast) -> Iterator[None]:
    """Let autocast be as it was; what it casts in the body is not cached beyond."""
    states, caches = state
    now = autocast_state(states[0][0])
    if now == state:
        yield
        return
    set_autocast(states, caches)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        set_autocast(*now)


def set_autocast(states: tuple[tuple[str, bool, torch.dtype], ...], caches: bool) -> None:
    """Set autocast as `autocast_state` has found it."""
    for kind, is_enabled, dtype in states:
        torch.set_autocast_enabled(kind, is_enabled)
        torch.set_autocast_dtype(kind, dtype)
    torch.set_autocast_cache_enabled(caches)
