"""Caches of keys and values that a transformer's blocks are called with.

Models of transformers make one in training too unless they are told not to. A block adds the keys
and values of its tokens to it, so a second run would add them again, and what is in it is memory
that recompute is to save. As transformers does itself, a block that recomputes gets none.
"""

from __future__ import annotations

from typing import Any

from torch import nn


def has_cache(args: Any, kwargs: Any) -> bool:
    """Whether a block is called with a cache."""
    return any(_is_cache(value) for value in (*args, *kwargs.values()))


def holds_past(module: nn.Module, args: Any, kwargs: Any) -> bool:
    """Whether a cache holds earlier tokens for this block, which it then needs."""
    if getattr(module, "_can_checkpoint_with_cache", False):
        return True
    counters = (getattr(part, "layer_idx", None) for part in module.modules())
    layer = next((number for number in counters if isinstance(number, int)), 0)
    values = (*args, *kwargs.values())
    return any(int(value.get_seq_length(layer)) > 0 for value in values if _is_cache(value))


def without_cache(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the arguments of a call with None for each cache."""
    kept = {name: None if _is_cache(value) else value for name, value in kwargs.items()}
    if kept.get("use_cache"):
        kept["use_cache"] = False
    return tuple(None if _is_cache(value) else value for value in args), kept


def _is_cache(value: Any) -> bool:
    # By what it does: transformers need not be installed.
    return callable(getattr(type(value), "get_seq_length", None))
