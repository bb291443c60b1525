"""What stands in a graph for a tensor that is recomputed, and those that need not be.

At the end of a block stand tensors that cost nothing to keep:

- **What the block returns**, as a ReLU saves it. The next block keeps it as its input, until its
  backward is through; and then comes the backward of this one. So it is kept from the moment on at
  which another block gets it. Where none does, it is computed again.
- **What is tiny** beside that, as the statistics of a norm, and **parameters**.

Each is computed again after all if somebody has written to it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, final

from torch import Tensor, nn, strided
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from torchfast.memory.caller_mode import is_transformed
from torchfast.memory.deferred import fail_written

# A tensor that so many of fit into what a block returns is tiny.
_TINY = 64


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
    """A tensor in the memory of what a block returned, by the count of writes at its end."""

    saved: weakref.ref[Saved]
    tensor: Tensor
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
    returned = [t for t in tree_leaves(result) if type(t) is Tensor and t.layout is strided]
    if not returned or is_transformed():
        return
    by_storage = {t.untyped_storage()._cdata: t for t in returned}
    tiny = max(t.nbytes for t in returned) // _TINY
    for packed in reversed(last):
        saved, tensor, version = packed
        if saved is not None and saved.kept is not None:
            yield packed, None
            continue
        if tensor.layout is not strided or tensor._version != version:
            return
        if isinstance(tensor, nn.Parameter) or tensor.nbytes <= tiny:
            yield packed, None
            continue
        key = by_storage.get(tensor.untyped_storage()._cdata)
        if key is None:
            return
        yield packed, key


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
            # Another object than the key, which would keep itself.
            one = _Returned(weakref.ref(saved), tensor.detach(), version)
            _returned[key] = (*_returned.get(key, ()), one)
        elif saved.kept is None:
            saved.keep(tensor, is_spare=True)
    return len(free)


def keep_returned(tensor: Tensor) -> None:
    """Let the block that returned a tensor keep it, since another block does so anyway."""
    if not len(_returned):
        return
    for reference, alias, version in _returned.get(tensor, ()):
        saved = reference()
        if saved is not None and alias._version == version:
            saved.keep(alias, is_spare=True)
