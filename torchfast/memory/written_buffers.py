"""Buffers in a second run of a block: what the first one found, and no trace left behind.

BatchNorm updates its running statistics in each forward in training mode, and a forward that runs
again in the backward would update them twice, silently. Spectral norm is worse: its power iteration
starts from what the last one left in a buffer, so a second run would compute another weight.

So the second run works on stand-ins. Which buffers a forward writes to is seen by the count of
writes that torch keeps, or by another tensor standing there; of those the value at the start of
each forward is kept, and the second run gets a copy of it. What torch's kernels write to the
statistics of a norm is not counted, so these are taken for written in each forward in training
mode. They are copied like the rest, though few forwards read them: a batch renorm computes with
them, and so does a convolution that torch folds into its norm to train for quantization.

The same holds for buffers that are None until a forward fills them, for those that it registers in
its first call, and for parameters that are frozen in that call: some modules keep averages there.
Of a parameter that is replaced nothing is thought: sharding and offload do so.

In its first call all of these are kept, and their values are compared behind it: a write through
``.data``, as codebooks and averages do, is not counted. One that is written for the first time in a
later call (an observer that is switched on) is found behind that call by the count. So small ones
are kept in every call; of a large one the second run of that call starts from what the first one
left, which is warned of. While a graph is captured nothing can be compared: in a first call there,
all buffers are taken for written, of the frozen parameters those whose count says so, and the next
call decides.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from torchfast._core.device import is_capturing

logger = logging.getLogger(__name__)

_Table = Literal["_buffers", "_parameters"]

# Bytes of a buffer that is kept though nobody has written to it yet: averages and what observers
# keep, and few tables of numbers that stay.
_SMALL = 2**16

# What norms and averages are of; torch has no launch for many tensors of each of its dtypes.
_TOGETHER = (torch.float32, torch.int64, torch.bfloat16, torch.float16, torch.float64)


class _Place(NamedTuple):
    owner: weakref.ref[nn.Module]
    table: _Table
    name: str


class _Kept(NamedTuple):
    owner: nn.Module
    table: _Table
    name: str
    buffer: Tensor | None
    version: int
    value: Tensor | None
    is_new: bool = False

    @property
    def key(self) -> tuple[int, str]:
        return id(self.owner), self.name

    @property
    def is_known(self) -> bool:
        """Whether what stood there is known: a value, or nothing."""
        return self.value is not None or self.buffer is None

    @property
    def now(self) -> Tensor | None:
        there: dict[str, Tensor | None] = getattr(self.owner, self.table)
        if self.name not in there:  # that of TorchScript has no get()
            return None
        return there[self.name]

    @property
    def is_written(self) -> bool:
        if _is_statistic(self.owner, self.name):
            return True
        now = self.now
        if now is not self.buffer:
            # Sharding and offload put other parameters there, with the same values.
            return self.table == "_buffers"
        return now is not None and now._version != self.version

    @property
    def copied(self) -> _Kept:
        """With what the second run starts from: what stands there now, if no more is known."""
        there = self.buffer if self.is_replaced else self.now
        if self.is_known or there is None:
            return self
        return self._replace(value=there.detach().clone())

    @property
    def is_replaced(self) -> bool:
        """Whether another tensor stands there now, and the one that stood there is what it was."""
        buffer, now = self.buffer, self.now
        if buffer is None or now is buffer or buffer._version != self.version:
            return False
        if now is None or not (_is_plain(now) and _is_plain(buffer)):
            return True
        # ``self.buffer = self.buffer.data`` is the same memory with a count of its own.
        return now.untyped_storage().data_ptr() != buffer.untyped_storage().data_ptr()

    def stand_in(self, value: Tensor | None) -> None:
        """Put a copy there of what stood there."""
        there = getattr(self.owner, self.table)
        if self.is_new:
            there.pop(self.name, None)  # the forward may ask whether it is there
            return
        if value is not None and self.table == "_parameters":
            value = nn.Parameter(value, requires_grad=False)
        there[self.name] = value


Before = list[_Kept]


@final
class WrittenBuffers:
    """Knows which buffers of a block its forward writes to, and which frozen parameters."""

    def __init__(self) -> None:
        self._names: set[tuple[int, str]] | None = None
        # Kept, since to walk through the modules takes longer than some blocks.
        self._places: list[_Place] = []

    def before(self, module: nn.Module) -> Before:
        """Return what to remember of the buffers, at the start of a forward."""
        names = self._names
        if names is None:
            self._places = list(_places(module))
        found = []
        for reference, table, name in self._places:
            owner = reference()
            if owner is None or name not in getattr(owner, table):
                continue
            buffer = getattr(owner, table)[name]
            if buffer is None:
                found.append(_Kept(owner, table, name, None, 0, None))
                continue
            if buffer.is_inference() or (table == "_parameters" and not _is_frozen(buffer)):
                continue
            is_kept = (
                names is None
                or (id(owner), name) in names
                or (table == "_buffers" and _is_small(buffer))
                or _is_statistic(owner, name)
            )
            value = buffer.detach() if is_kept else None
            found.append(_Kept(owner, table, name, buffer, buffer._version, value))
        copies = _copies([kept.value for kept in found])
        return [kept._replace(value=copy) for kept, copy in zip(found, copies, strict=True)]

    def written(self, module: nn.Module, before: Before) -> Before:
        """Return the part of it that the forward, which has ended, wrote to."""
        written = [kept for kept in before if kept.is_written]
        if self._names is None:
            new = self._new(module)
            if is_capturing():
                others = [k for k in before if not k.is_written and k.table == "_buffers"]
                return [*written, *others, *new]
            written += _changed([kept for kept in before if not kept.is_written])
            written += new
            before = [*before, *new]
        for kept in written:
            if not (kept.is_known or kept.is_replaced):
                _warn(module, kept)
        names = self._names = set() if self._names is None else self._names
        names |= {kept.key for kept in written}
        return [kept.copied for kept in before if kept.key in names]

    def _new(self, module: nn.Module) -> Before:
        """Return what the first forward has registered, which counts from here on."""
        known = {(id(place.owner()), place.name) for place in self._places}
        found = []
        for place in _places(module):
            owner = place.owner()
            if owner is not None and (id(owner), place.name) not in known:
                self._places.append(place)
                found.append(_Kept(owner, place.table, place.name, None, 0, None, is_new=True))
        return found

    @contextmanager
    def standing_in(self, before: Before) -> Iterator[None]:
        """Let the forward run again on stand-ins; put back what stands there now."""
        there = [(kept, kept.now) for kept in before]
        try:
            for kept, copy in zip(before, _copies([k.value for k in before]), strict=True):
                kept.stand_in(copy)
            yield
        finally:
            for kept, own in there:
                getattr(kept.owner, kept.table)[kept.name] = own


def _warn(block: nn.Module, kept: _Kept) -> None:
    path = next((path for path, m in block.named_modules() if m is kept.owner), "")
    logger.warning(
        "%s of %s, a block that is recomputed, was written to for the first time in a later call: "
        "in the backward of that call the block reads what it wrote, so this one gradient may be "
        "off; write to it in the first call as well, or leave the block out of recompute",
        f"{path}.{kept.name}" if path else kept.name,
        type(block).__name__,
    )


def _copies(tensors: list[Tensor | None]) -> list[Tensor | None]:
    """Copy them, those of a dtype and device in one launch.

    A batch norm has three buffers of a few kilobytes. Copied one by one, at the start of both runs,
    they were 300 launches of a step of ResNet-50.
    """
    copies: list[Tensor | None] = []
    groups: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], list[Tensor]]] = {}
    for tensor in tensors:
        if tensor is None:
            copies.append(None)
        elif tensor.dtype not in _TOGETHER or not _is_plain(tensor) or tensor.is_neg():
            copies.append(tensor.clone())
        else:
            copy = torch.empty_like(tensor)
            copies.append(copy)
            own, theirs = groups.setdefault((tensor.dtype, tensor.device), ([], []))
            own.append(copy)
            theirs.append(tensor)
    for own, theirs in groups.values():
        torch._foreach_copy_(own, theirs)
    return copies


def _changed(kept: list[_Kept]) -> list[_Kept]:
    """Return those whose buffer is not what is kept of it any more; reads the values once."""
    changed, pairs = [], []
    for one in kept:
        if one.buffer is None or one.value is None:
            continue
        if _form(one.buffer) != _form(one.value):
            changed.append(one)  # as observers do, which learn the number of channels in a call
            continue
        now, then = _bits(one.buffer), _bits(one.value)
        if now is not None and then is not None:
            pairs.append((one, (now != then).any()))
    if pairs:
        where = pairs[0][1].device
        flags = torch.stack([differs.to(where) for _, differs in pairs]).tolist()
        changed += [one for (one, _), differs in zip(pairs, flags, strict=True) if differs]
    return changed


def _form(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def _bits(tensor: Tensor) -> Tensor | None:
    """Return what can be compared of a tensor; None of one that is not in plain memory."""
    if not _is_plain(tensor) or tensor.device.type == "meta":
        return None
    # What has a byte for a value may have no comparison of its own, as float8 has not.
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor


def _is_plain(tensor: Tensor) -> bool:
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_quantized
    )


def _places(module: nn.Module) -> Iterator[_Place]:
    for owner in module.modules():
        reference = weakref.ref(owner)
        for name, buffer in owner._buffers.items():
            if buffer is None or not buffer.is_inference():
                yield _Place(reference, "_buffers", name)
        for name, parameter in owner._parameters.items():
            if parameter is not None and _is_frozen(parameter):
                yield _Place(reference, "_parameters", name)


def _is_small(buffer: Tensor) -> bool:
    """Whether it is kept in every call."""
    return _is_plain(buffer) and buffer.nbytes <= _SMALL


def _is_frozen(parameter: Tensor) -> bool:
    """Whether a parameter may be state of its module: no optimizer changes it."""
    # Those of other classes, quantized or sharded, may not be copied like tensors.
    return type(parameter) is nn.Parameter and not parameter.requires_grad


def _is_statistic(owner: nn.Module, name: str) -> bool:
    """Whether it is what a norm that trains keeps of its batches."""
    return (
        isinstance(owner, _NormBase)
        and owner.training
        and name in ("running_mean", "running_var", "num_batches_tracked")
    )
