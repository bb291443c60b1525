"""What stands in a graph for a tensor that is recomputed, and those that need not be.

At the end of a block stand tensors that cost nothing to keep:

- **What the block returns**, as a ReLU saves it. The next block keeps it as its input, until its
  backward is through; and then comes the backward of this one. So it is kept from the moment on at
  which another block gets it. Where none does, it is computed again.
- **What is tiny** beside that, as the statistics of a norm, and **parameters**. Several ranks have
  to end alike, for a block may hold collectives, and sizes of data differ from rank to rank: among
  them only that is tiny which has the shape of a parameter, as the statistics of a batch norm.

Each is computed again after all if somebody has written to it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from torchfast.memory.caller_mode import is_transformed
from torchfast.memory.deferred import fail_written

# A tensor that so many of fit into what a block returns is tiny, with all that it is a view of; and
# so many times all of those together do.
_TINY = 64
_TINY_TOGETHER = 16


@final
class Saved:
    """Stands in a graph for a tensor that will be computed again.

    Attributes:
        value: Computed by a second run, for one use.
        kept: Kept since the first run, for every use.
    """

    __slots__ = (
        "__weakref__", "_is_spare", "_version", "device", "dtype", "kept", "shape", "value",
    )  # fmt: skip

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.value: Tensor | None = None
        self.kept: Tensor | None = None
        self._version, self._is_spare = 0, False

    def keep(self, tensor: Tensor, *, is_spare: bool = False) -> None:
        """Keep a tensor for every use, outside of the graph.

        Args:
            tensor: What is kept.
            is_spare: Whether it is computed again if it was written to, and no error.
        """
        # A parameter itself, as autograd would: others may give it other memory meanwhile.
        self.kept = tensor if isinstance(tensor, nn.Parameter) else tensor.detach()
        self._version, self._is_spare = tensor._version, is_spare

    def there(self) -> Tensor | None:
        """Return what is kept; None if it has to be computed again.

        Raises:
            RuntimeError: What is kept was written to, and cannot be computed again.
        """
        if self.kept is not None and self.kept._version != self._version:
            if not self._is_spare:
                fail_written("what a block keeps", self.kept, self._version)
            self.kept = None
        return self.kept


class Packed(NamedTuple):
    """What autograd has saved, and how often it had been written by then."""

    saved: Saved | None  # None: it is looked at and not kept
    tensor: Tensor
    version: int


class _Returned(NamedTuple):
    """A tensor in the memory of what a block returned, and that memory's count of writes."""

    saved: weakref.ref[Saved]
    storage: int
    layout: tuple[torch.Size, tuple[int, ...], int]
    version: int


# By what a block returned.
_returned: Any = WeakIdKeyDictionary()


def free_at_end(last: Sequence[Packed], result: Any) -> Iterator[tuple[Packed, Tensor | None]]:
    """Yield the last of the tensors that a block saved, from the end, while each costs nothing.

    Args:
        last: The latest ones.
        result: What the block returned.

    Yields:
        Each, and the returned tensor in whose memory it lies, if it does.
    """
    returned = [t for t in tree_leaves(result) if type(t) is Tensor and t.layout is torch.strided]
    if not returned or is_transformed():
        return
    by_storage = {t.untyped_storage()._cdata: t for t in returned}
    is_tiny = _Tiny(max(min(t.nbytes, t.untyped_storage().nbytes()) for t in returned), last)
    for packed in reversed(last):
        saved, tensor, version = packed
        if saved is not None and saved.kept is not None:
            yield packed, None
            continue
        if tensor.layout is not torch.strided or tensor._version != version:
            return
        if isinstance(tensor, nn.Parameter) or is_tiny(tensor):
            yield packed, None
            continue
        key = by_storage.get(tensor.untyped_storage()._cdata)
        if key is None or key.dtype is not tensor.dtype or tensor.dtype.is_complex:
            return
        yield packed, key


@final
class _Tiny:
    """Tells which tensors are tiny.

    Args:
        num_bytes: Of what the block returned.
        last: What it saved.
    """

    def __init__(self, num_bytes: int, last: Sequence[Packed]) -> None:
        self._most, self._left = num_bytes // _TINY, num_bytes // _TINY_TOGETHER
        self._counted: set[int] = set()
        self._shapes: set[torch.Size] | None = None
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self._shapes = {t.shape for _, t, _ in last if isinstance(t, nn.Parameter)}

    def __call__(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()
        if storage.nbytes() > self._most or not self._is_alike_on_ranks(tensor):
            return False
        if storage._cdata not in self._counted:
            self._counted.add(storage._cdata)
            self._left -= storage.nbytes()
        return self._left >= 0

    def _is_alike_on_ranks(self, tensor: Tensor) -> bool:
        if self._shapes is None or tensor.shape in self._shapes:
            return True
        # What cuDNN reserves for the backward of a batch norm.
        return tensor.dtype is torch.uint8 and tensor.dim() == 1


def keep_end(last: Sequence[Packed], result: Any) -> int:
    """Keep the last of the tensors that a block saved, as far as that costs nothing.

    Args:
        last: The latest ones.
        result: What the block returned.

    Returns:
        How many they are.
    """
    free = list(free_at_end(last, result))
    for (saved, tensor, version), key in free:
        assert saved is not None
        if key is not None:
            # Nothing that holds the memory: its owner may free it while the key still lives.
            layout = tensor.shape, tensor.stride(), int(tensor.storage_offset())
            storage = tensor.untyped_storage()._cdata
            one = _Returned(weakref.ref(saved), storage, layout, version)
            _returned[key] = (*_returned.get(key, ()), one)
        elif saved.kept is None:
            saved.keep(tensor, is_spare=True)
    return len(free)


def keep_returned(tensor: Tensor) -> None:
    """Let the block that returned a tensor keep it, since another block does so anyway."""
    if not len(_returned):
        return
    for reference, storage, layout, version in _returned.get(tensor, ()):
        saved = reference()
        is_same = tensor._version == version and tensor.untyped_storage()._cdata == storage
        if saved is not None and is_same:
            saved.keep(tensor.detach().as_strided(*layout), is_spare=True)
