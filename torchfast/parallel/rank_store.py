"""The store through which the ranks have found each other, for threads that leave word in it."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import distributed_c10d


def connection_to_store(prefix: str, timeout_s: float) -> Any:
    """Return a connection of the caller's own: one that waits holds up its users.

    Make it while all is well. With a store that is gone, a new one is tried for as long as groups
    wait, and what is asked of an old one fails at once.

    Args:
        prefix: Of the keys.
        timeout_s: How long it may wait.
    """
    store: Any = distributed_c10d._get_default_store()
    own = store
    with suppress(AttributeError, RuntimeError):  # a store written in Python may have no clone
        own = store.clone()
    if innermost(own) is not innermost(store):  # one within a process is its own clone
        own.set_timeout(timedelta(seconds=timeout_s))
    return distributed_c10d.PrefixStore(prefix, own)


def innermost(store: Any) -> Any:
    """Return what is behind the prefixes of a store."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store
