"""A device on the CPU with little memory: what has room there and what has not, without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class SimulatedMemory(TorchDispatchMode):
    """Counts the storages that operators make, and is out of memory above a limit.

    Args:
        limit_bytes: How much there is.
    """

    def __init__(self, limit_bytes: int) -> None:
        super().__init__()
        self.limit_bytes, self.peak_bytes = limit_bytes, 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operator, and note what it made."""
        out = func(*args, **(kwargs or {}))
        is_larger = False
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and type(tensor) in (Tensor, torch.nn.Parameter):
                storage = tensor.untyped_storage()
                key = storage._cdata
                is_larger |= key not in self._made or self._made[key][0].expired()
                self._made[key] = StorageWeakRef(storage), storage.nbytes()
        if is_larger:
            self._check()
        return out

    def _check(self) -> None:
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        held = sum(size for _, size in self._made.values())
        if held > self.limit_bytes:
            raise torch.OutOfMemoryError(
                f"out of memory: {held:,} bytes in tensors, and the limit is {self.limit_bytes:,}"
            )
        self.peak_bytes = max(self.peak_bytes, held)
