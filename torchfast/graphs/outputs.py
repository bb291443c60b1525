"""What a step returns: static memory of the graph, cloned once so that it is safe to keep."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

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
            (group, torch.stack(group)) for group in groups.values() if len(group) > 1
        ]
        gathered = {id(t) for group, _ in self._gathered for t in group}
        self._single = [t for t in every if id(t) not in gathered]
        self._is_one = len(every) == 1 and every[0] is outputs

    def cloned(self) -> Any:
        """Return the outputs in memory of their own, detached."""
        if self._is_one:
            return self._outputs.clone()
        copies = {id(t): t.clone() for t in self._single}
        for group, gathered in self._gathered:
            copies.update(zip(map(id, group), gathered.clone().unbind(), strict=True))
        return map_batch(self._outputs, lambda tensor: copies[id(tensor)])
