"""A context that does nothing, and costs a step next to nothing.

``contextlib.nullcontext`` is three functions of Python, which a replayed step would feel.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Final, cast, final


@final
class _NoContext:
    """Does nothing, as often as one likes, also one within another."""

    __slots__ = ()
    # A function of C that takes anything and returns what is false.
    __enter__ = "".format
    __exit__ = "".format


NO_CONTEXT: Final = cast("AbstractContextManager[Any]", _NoContext())
