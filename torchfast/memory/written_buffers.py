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

In its first call all buffers are kept, and their values are compared behind it: a write through
``.data``, as codebooks and averages do, is not counted. One that is written for the first time in a
later call (an observer that is switched on) is found behind that call by the count, whose second
run then starts from what the first one left. While a graph is captured nothing can be compared: in
a first call there, all buffers are taken for written, and the next call decides.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from torchfast._core.device import is_capturing


class _Kept(NamedTuple):
    owner: nn.Module
    name: str
    buffer: Tensor
    version: int
    value: Tensor | None

    @property
    def is_written(self) -> bool:
        if _is_statistic(self.owner, self.name):
            return True
        now = self.owner._buffers.get(self.name)
        return now is not self.buffer or now._version != self.version

    @property
    def copied(self) -> _Kept:
        """With what the second run starts from: what stands there now, if no more is known."""
        now = self.owner._buffers.get(self.name)
        value = now.detach().clone() if self.value is None and now is not None else self.value
        return self._replace(value=value)


Before = list[_Kept]


@final
class WrittenBuffers:
    """Knows which buffers of a block its forward writes to.

    Args:
        module: The block; it is not kept.
    """

    def __init__(self) -> None:
        self._names: set[tuple[int, str]] | None = None
        # Kept, since to walk through the modules takes longer than some blocks.
        self._places: list[tuple[weakref.ref[nn.Module], str]] = []

    def before(self, module: nn.Module) -> Before:
        """Return what to remember of the buffers, at the start of a forward."""
        if self._names is None:
            self._places = [(weakref.ref(owner), name) for owner, name in _buffers(module)]
        found = []
        for reference, name in self._places:
            owner = reference()
            buffer = None if owner is None else owner._buffers.get(name)
            if owner is None or buffer is None or buffer.is_inference():
                continue
            is_kept = (
                self._names is None
                or (id(owner), name) in self._names
                or _is_statistic(owner, name)
            )
            value = buffer.detach().clone() if is_kept else None
            found.append(_Kept(owner, name, buffer, buffer._version, value))
        return found

    def written(self, before: Before) -> Before:
        """Return the part of it that the forward, which has ended, wrote to."""
        written = [kept for kept in before if kept.is_written]
        if self._names is None:
            if is_capturing():
                return before
            written += _changed([kept for kept in before if not kept.is_written])
        names = self._names = set() if self._names is None else self._names
        names |= {(id(kept.owner), kept.name) for kept in written}
        return [kept.copied for kept in before if (id(kept.owner), kept.name) in names]

    @contextmanager
    def standing_in(self, before: Before) -> Iterator[None]:
        """Let the forward run again on stand-ins; put back what stands there now."""
        there: list[tuple[nn.Module, str, Tensor | None]] = []
        try:
            for kept in before:
                there.append((kept.owner, kept.name, kept.owner._buffers.get(kept.name)))
                value = kept.value
                kept.owner._buffers[kept.name] = None if value is None else value.clone()
            yield
        finally:
            for owner, name, own in there:
                owner._buffers[name] = own


def _changed(kept: list[_Kept]) -> list[_Kept]:
    """Return those whose buffer is not what is kept of it any more; reads the values once."""
    changed, pairs = [], []
    for one in kept:
        if one.value is None:
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
    is_plain = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_nested
    if not is_plain or tensor.is_quantized or tensor.device.type == "meta":
        return None
    # What has a byte for a value may have no comparison of its own, as float8 has not.
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor


def _buffers(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and not buffer.is_inference():
                yield owner, name


def _is_statistic(owner: nn.Module, name: str) -> bool:
    """Whether it is what a norm that trains keeps of its batches."""
    return (
        isinstance(owner, _NormBase)
        and owner.training
        and name in ("running_mean", "running_var", "num_batches_tracked")
    )
