"""Values that a step reads on the host though they never change, known there without waiting.

A model of transformers makes positions on the device, ``torch.arange(length, device=...)``, and
asks whether they are those of one sequence: ``if (torch.diff(positions) == 1).all()``. The host
waits for the answer, which no capture allows, and it is always the same: nothing but the length
goes into it, which is frozen in a graph as all shapes and numbers of Python are.

So where a capture has failed for that, and the step would have to be told of the next one, that one
keeps a shadow on the host of each such tensor: of what ``torch.arange`` returns, and
of integers and truth values computed from these and from plain numbers alone. Whoever reads such a
tensor gets what its shadow holds.

Only ``torch.arange`` begins a shadow, and only functions that compute the same everywhere go on
with one: a tensor of zeros may be what a kernel of somebody else's counts in, which no function of
torch's shows. What is written to has another count of versions, and no shadow then; and where
memory that has a shadow goes to a function that is not known to leave it alone, all shadows go.

Only what passes through torch's Python functions is seen, and compiled code would be compiled again
under a mode: there nothing is shadowed.
"""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import Any, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from typing_extensions import override

from torchfast._core.batches import tensors

# Whose results are the same on every device, for integers.
_COMPUTE = frozenset(
    getattr(holder, name)
    for holder, names in {
        Tensor: "add sub mul neg abs remainder floor_divide eq ne lt le gt ge logical_and "
        "logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not all any sum cumsum "
        "diff max min amax amin clamp clone contiguous unsqueeze squeeze view reshape flatten "
        "expand expand_as repeat transpose permute t roll flip long int bool select narrow detach "
        "__getitem__ __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __eq__ __ne__ __lt__ "
        "__le__ __gt__ __ge__ __and__ __or__ __xor__ __invert__ __neg__ __mod__ __floordiv__",
        torch: "add sub rsub mul neg abs remainder floor_divide eq ne lt le gt ge logical_and "
        "logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not all any sum cumsum "
        "diff max min amax amin clamp clone unsqueeze squeeze reshape flatten transpose permute t "
        "roll flip cat stack select narrow",
    }.items()
    for name in names.split()
)
_READ = frozenset(
    getattr(holder, name)
    for holder, names in {
        Tensor: "item tolist equal __bool__ __int__ __float__ __index__",
        torch: "equal",
    }.items()
    for name in names.split()
)
# What neither writes to its arguments nor gives their memory away. Whatever else gets memory that
# has a shadow may write there without being counted: a view of it, ``.data``, a collective, the
# address that a kernel of somebody else's is given.
_HARMLESS: frozenset[Any] = frozenset(
    (
        Tensor.to,
        Tensor.float,
        Tensor.size,
        Tensor.dim,
        Tensor.__len__,
        torch.where,
        torch.embedding,
        F.embedding,
    )
) | {
    getattr(Tensor, name).__get__
    for name in (
        "shape",
        "dtype",
        "device",
        "ndim",
        "is_cuda",
        "layout",
        "requires_grad",
        "_version",
    )
}
_EXACT = frozenset((torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))
_RANGE = frozenset(("start", "end", "step"))
# Elements of a tensor that is worth a shadow: a mask of a thousand tokens by a thousand.
_MOST = 2**20


class _Shadow(NamedTuple):
    """What a tensor on the device holds, on the host, while it has that count of versions."""

    of: weakref.ref[Tensor]
    version: int
    value: Tensor


@final
class HostShadows(TorchFunctionMode):
    """Answers on the host what is computed from ranges and plain numbers.

    Args:
        device: Whose tensors it follows.

    Attributes:
        num_reads: Reads that were answered.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._shadows: dict[int, _Shadow] = {}
        self.num_reads = 0

    @override
    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._shadows = {}

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.arange:
            result = func(*args, **kwargs)
            sizes = {key: value for key, value in kwargs.items() if key in _RANGE}
            if "out" not in kwargs and all(type(n) is int for n in (*args, *sizes.values())):
                self._follow(result, func, args, {**sizes, "dtype": result.dtype, "device": "cpu"})
            return result
        read = [*tensors((args, kwargs))]
        is_known = bool(read) and "out" not in kwargs and all(map(self._is_known, read))
        if func in _READ and is_known:
            answer = on_host(func, *self._on_host((args, kwargs)))
            self.num_reads += 1
            return answer
        if func not in _COMPUTE and func not in _HARMLESS and self._has_memory_of(read):
            self._shadows = {}
        result = func(*args, **kwargs)
        if func in _COMPUTE and is_known:
            # Of another tensor, within a slice; or what the host refuses, as a division by 0.
            with suppress(KeyError, RuntimeError):
                self._follow(result, func, *self._on_host((args, kwargs)))
        return result

    def _follow(self, result: Any, func: Any, args: Any, kwargs: Any) -> None:
        if type(result) is not Tensor or result.device.type != self._device.type:
            return
        if result.dtype in _EXACT and result.numel() <= _MOST and not result.is_inference():
            value = on_host(func, args, kwargs)
            if value.dtype == result.dtype and value.shape == result.shape:
                key, shadows = id(result), self._shadows

                def forget(gone: weakref.ref[Tensor]) -> None:
                    if key in shadows and shadows[key].of is gone:
                        del shadows[key]

                shadow = _Shadow(weakref.ref(result, forget), result._version, value)
                shadows[key] = shadow

    def _is_known(self, tensor: Tensor) -> bool:
        known = self._shadows.get(id(tensor))
        return known is not None and known.of() is tensor and known.version == tensor._version

    def _has_memory_of(self, some: list[Tensor]) -> bool:
        """Whether any of these may share memory with what has a shadow."""
        if not self._shadows or not some:
            return False
        live = [tensor for s in self._shadows.values() if (tensor := s.of()) is not None]
        known = {tensor.untyped_storage()._cdata for tensor in live}
        return any(_storage(tensor) in known for tensor in some)

    def _on_host(self, nested: Any) -> Any:
        """Return arguments with shadows in place of tensors."""
        if isinstance(nested, Tensor):
            if not self._is_known(nested):
                raise KeyError
            return self._shadows[id(nested)].value
        if type(nested) in (list, tuple):
            return type(nested)(map(self._on_host, nested))
        if type(nested) is dict:
            return {key: self._on_host(value) for key, value in nested.items()}
        if type(nested) is slice:
            return slice(*map(self._on_host, (nested.start, nested.stop, nested.step)))
        return nested


def on_host(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute something of shadows, unseen by what watches the operations of the step."""
    with _disable_current_modes():
        return func(*args, **kwargs)


def _storage(tensor: Tensor) -> int | None:
    """Return what stands for a tensor's memory; None for one that has none of its own."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return None
    storage: int = tensor.untyped_storage()._cdata
    return storage
