"""What `fully_shard` has made of a model: the pieces that are gathered and reduced together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn


def pieces_of(model: nn.Module) -> Iterator[Any]:
    """Yield the parameter groups of a sharded model, as torch has them, in its order."""
    for module in model.modules():
        yield from own_pieces(module)


def own_pieces(module: nn.Module) -> list[Any]:
    """Return those of one module: what no module within it holds."""
    state = getattr(module, "_get_fsdp_state", lambda: None)()
    if state is None:
        return []
    groups = getattr(state, "_fsdp_param_groups", None)  # one before torch 2.13
    return [g for g in ([state._fsdp_param_group] if groups is None else groups) if g]
