"""Caches of keys and values that a transformer's blocks are called with.

Models of transformers make one in training too unless they are told not to. A block adds the keys
and values of its tokens to it, so a second run would add them again, and what is in it is memory
that recompute is to save. As transformers does itself, a block that recomputes gets none.

The model returns such a cache nevertheless, empty. Mostly nobody looks at it. Whoever calls the
model with it again, to go on with the next tokens of a sequence, would train without the earlier
ones: `LeftOut` knows it.
"""

from __future__ import annotations

from typing import Any, NoReturn, final

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary


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
    return any(_holds(value, layer) for value in values if _is_cache(value))


def _holds(cache: Any, layer: int) -> bool:
    """Whether a cache has earlier tokens of a layer: their keys, or the state that they left."""
    try:
        return int(cache.get_seq_length(layer)) > 0
    except ValueError:  # a layer without keys and values, as in hybrids of Mamba and attention
        has_state = getattr(cache, "has_previous_state", None)
        # Whoever does not tell may have some: such a block runs as it is.
        return True if has_state is None else bool(has_state(layer))


def without_cache(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the arguments of a call with None for each cache."""
    kept = {name: None if _is_cache(value) else value for name, value in kwargs.items()}
    if kept.get("use_cache"):
        kept["use_cache"] = False
    return tuple(None if _is_cache(value) else value for value in args), kept


@final
class LeftOut:
    """The caches that blocks were called without, as long as they live."""

    def __init__(self) -> None:
        self._places: Any = WeakIdKeyDictionary()

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._places)

    def add(self, path: str, args: Any, kwargs: Any) -> None:
        """Note the caches of a call that is made without them."""
        values = (*args, *kwargs.values())
        for cache in filter(_is_cache, values):
            self._places.setdefault(cache, set()).add(_place(path, values))

    def check(self, path: str, args: Any, kwargs: Any) -> None:
        """Look at the caches of a call.

        Raises:
            RuntimeError: The block needs what an earlier call has not put there.
        """
        values = (*args, *kwargs.values())
        for cache in filter(_is_cache, values):
            if _place(path, values) in self._places.get(cache, ()):
                _fail(f"block {path}" if path else "the model")


def _place(path: str, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return where a block looks in a cache; which of several depths it is, a number tells it."""
    return path, *(value for value in values if type(value) is int)


def _fail(who: str) -> NoReturn:
    raise RuntimeError(
        f"{who} was called with a cache of keys and values that an earlier call left empty: a "
        "block that recomputes puts nothing there, so the earlier tokens are missing; call the "
        "model with all tokens at once and use_cache=False, or leave recompute out"
    )


def _is_cache(value: Any) -> bool:
    # By what it does: transformers need not be installed.
    return callable(getattr(type(value), "get_seq_length", None))
