"""Entries of Python's warning filters, put in and taken out one by one.

`warnings.catch_warnings` would take back what other threads set meanwhile, and, where one is in its
own, leave everything ignored for ever.
"""

from __future__ import annotations

import warnings
from typing import Any

# Action, message, category, module and line, as `warnings.filters` holds them.
Entry = tuple[str, Any, type[Warning], Any, int]


def is_first(entry: Entry) -> bool:
    """Whether it is the one that is asked first."""
    filters = _filters()
    return bool(filters) and filters[0] is entry


def put_first(entry: Entry) -> None:
    """Let it be asked before all others."""
    _filters().insert(0, entry)
    _changed()


def take_out(entry: Entry) -> None:
    """Take it out, if it is there."""
    filters = _filters()
    if entry in filters:
        filters.remove(entry)
        _changed()


def _filters() -> list[Any]:
    filters: list[Any] = warnings.filters  # type: ignore[assignment]
    return filters


def _changed() -> None:
    warnings._filters_mutated()  # type: ignore[attr-defined]
