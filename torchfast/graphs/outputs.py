"""What a step returns: static memory of the graph, cloned once so that it is safe to keep."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from torchfast._core.batches import map_batch, tensors


@final
class StaticOutputs:
    """The outputs of a captured step.

    Scalars of one type are gathered into one tensor inside the graph, so that cloning all of them
    is one launch.

    Args:
        outputs: What the step returned during capture.

    Numerics: Bitwise.
    Synchronizes: Never.
    """

    def __init__(self, outputs: Any) -> None:
        # Attached, they would keep what the backward needs.
        self._outputs = outputs = map_batch(outputs, Tensor.detach)
        every = list({id(t): t for t in tensors(outputs)}.values())
        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for tensor in every:
            if type(tensor) is Tensor and tensor.dim() == 0 and tensor.layout is torch.strided:
                groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
        self._gathered = [
            ([*map(id, group)], torch.stack(group)) for group in groups.values() if len(group) > 1
        ]
        gathered = {number for numbers, _ in self._gathered for number in numbers}
        self._single = [t for t in every if id(t) not in gathered]
        self._is_one = len(every) == 1 and every[0] is outputs
        self._rebuild = _rebuilt if _is_simple(outputs) else _rebuilt_in_any_form

    def cloned(self) -> Any:
        """Return the outputs in memory of their own, detached."""
        if self._is_one:
            return self._outputs.clone()
        copies = {id(t): t.clone() for t in self._single}
        for numbers, gathered in self._gathered:
            copies.update(zip(numbers, gathered.clone().unbind(), strict=True))
        return self._rebuild(self._outputs, copies)


def _is_simple(value: Any) -> bool:
    """Whether `_rebuilt` knows all containers in it: those that steps return mostly."""
    kind = type(value)
    if kind is dict:
        return all(map(_is_simple, value.values()))
    if kind is tuple or kind is list or _is_named_tuple(value):
        return all(map(_is_simple, value))
    return kind is Tensor or value is None or kind in (bool, int, float, str)


def _is_named_tuple(value: Any) -> bool:
    # A PackedSequence is one too, whose batch_sizes stay on the host.
    is_packed = isinstance(value, PackedSequence)
    return isinstance(value, tuple) and hasattr(value, "_make") and not is_packed


def _rebuilt(value: Any, copies: dict[int, Tensor]) -> Any:
    kind = type(value)
    if kind is Tensor:
        return copies[id(value)]
    if kind is dict:
        return {key: _rebuilt(item, copies) for key, item in value.items()}
    if kind is list:
        return [_rebuilt(item, copies) for item in value]
    if kind is tuple:
        return tuple([_rebuilt(item, copies) for item in value])
    if isinstance(value, tuple):
        return kind._make([_rebuilt(item, copies) for item in value])
    return value


def _rebuilt_in_any_form(value: Any, copies: dict[int, Tensor]) -> Any:
    return map_batch(value, lambda tensor: copies[id(tensor)])
