"""Weak proxies whose object is gone: whatever is asked of one raises, even what it is."""

from __future__ import annotations

import weakref
from typing import Any


def is_dead(value: Any) -> bool:
    """Whether it is a ``weakref.proxy`` of an object that is gone."""
    if type(value) not in weakref.ProxyTypes:
        return False
    try:
        value.__class__  # noqa: B018  # which is that of the object
    except ReferenceError:
        return True
    return False
