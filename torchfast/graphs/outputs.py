"""What a step returns: static memory of the graph, cloned once so that it is safe to keep."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from torchfast._core.batches import map_batch, tensors
from torchfast._core.loss import detached

_FEW = 64  # numbers: more are not copied once more inside the graph


def safe_to_keep(outputs: Any) -> Any:
    """Return what a step returned when it ran eagerly, detached; copied if it may be state."""
    return map_batch(outputs, detached)


@final
class StaticOutputs:
    """The outputs of a captured step.

    Scalars of one type, and those of several steps that stand in one tensor, are gathered into one
    inside the graph, so that cloning all of them is one launch.

    Args:
        outputs: What the step returned during capture.

    Numerics: Bitwise.
    Synchronizes: Never.
    """

    def __init__(self, outputs: Any) -> None:
        # Attached, they would keep what the backward needs.
        self._outputs = outputs = map_batch(outputs, Tensor.detach)
        every = list({id(t): t for t in tensors(outputs)}.values())
        groups: dict[tuple[Any, ...], list[Tensor]] = {}
        for tensor in every:
            is_small = tensor.dim() < 2 and tensor.numel() <= _FEW
            if type(tensor) is Tensor and is_small and tensor.layout is torch.strided:
                key = tensor.device, tensor.dtype, tensor.shape
                groups.setdefault(key, []).append(tensor)
        self._gathered = [torch.stack(group) for group in groups.values() if len(group) > 1]
        # In the order in which `cloned` makes copies.
        order = [t for group in groups.values() if len(group) > 1 for t in group]
        gathered = {*map(id, order)}
        self._single = [t for t in every if id(t) not in gathered]
        places = {id(t): place for place, t in enumerate([*order, *self._single])}
        self._is_one = len(every) == 1 and every[0] is outputs
        self._rebuild = (
            _builder(outputs, places)
            if _is_simple(outputs)
            else lambda copies: map_batch(outputs, lambda tensor: copies[places[id(tensor)]])
        )

    def cloned(self) -> Any:
        """Return the outputs in memory of their own, detached."""
        if self._is_one:
            return self._outputs.clone()
        copies: list[Tensor] = []
        for gathered in self._gathered:
            copies += gathered.clone().unbind()
        for tensor in self._single:
            copies.append(tensor.clone())
        return self._rebuild(copies)


def _is_simple(value: Any) -> bool:
    """Whether `_builder` knows all containers in it: those that steps return mostly."""
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


def _builder(value: Any, places: dict[int, int]) -> Callable[[list[Tensor]], Any]:
    """Return what builds a simple value anew out of copies of its tensors, each in its place."""
    kind = type(value)
    if kind is Tensor:
        return operator.itemgetter(places[id(value)])
    if kind is dict:
        items = [(key, _builder(item, places)) for key, item in value.items()]
        return lambda copies: {key: build(copies) for key, build in items}
    if kind is list or isinstance(value, tuple):
        builders = [_builder(item, places) for item in value]
        make = kind._make if _is_named_tuple(value) else kind
        return lambda copies: make([build(copies) for build in builders])
    return lambda _: value
