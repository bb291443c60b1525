"""Tensors that are copied just before something writes to them.

For what runs every so often beside a training and seldom writes: a copy of all parameters each
time would take the memory and the time of a step, for the few that are written to, if any. The
count of writes that torch keeps would come too late, and knows nothing of ``tensor.data.mul_()``.

Not seen is what writes past torch's operators (a kernel that does not declare what it changes), nor
what a compiled function does: within the context things run eagerly.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from torchfast._core.storages import plain_parts


@final
class KeptWrites(TorchDispatchMode):
    """Within ``with``, copies what is written to; with no tensors, does nothing.

    Args:
        tensors: Which. They keep their memory in the context.

    Synchronizes: Never.
    """

    supports_higher_order_operators = True

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._in_memory: dict[int, list[Tensor]] = {}
        self._kept: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for tensor in tensors:
            for part in plain_parts(tensor):
                if place := _place(part):
                    self._in_memory.setdefault(place, []).append(part.detach())

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Be no reason for what is compiled to step aside: other code decides that."""
        return True

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for position, name in _written_by(func):
            value = args[position] if position < len(args) else kwargs.get(name)
            for tensor in tree_leaves(value):
                if isinstance(tensor, Tensor):
                    self._keep(tensor)
        return func(*args, **kwargs)

    def put_back(self) -> None:
        """Give what was written to its values again."""
        with torch.no_grad():
            for copies in self._kept.values():
                for tensor, copy in copies:
                    tensor.copy_(copy)
        self._kept = {}

    def _keep(self, written: Tensor) -> None:
        for part in plain_parts(written):
            place = _place(part)
            if place in self._in_memory and place not in self._kept:
                self._kept[place] = [(t, t.clone()) for t in self._in_memory[place]]


@cache
def _written_by(func: Any) -> tuple[tuple[int, str], ...]:
    """Return position and name of the arguments that an operator writes to."""
    schema = getattr(func, "_schema", None)  # an operator that calls functions has none
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(() if schema is None else schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _place(tensor: Tensor) -> int:
    """Return where the memory begins that a tensor shares with its views; 0 if it has none."""
    try:
        return 0 if tensor.is_nested else tensor.untyped_storage().data_ptr()
    except RuntimeError:  # such as a fake one
        return 0
