"""Buffers of a model, such as BatchNorm's statistics, made those of the first rank.

A forward writes to them, on each rank by what it was given, and nothing averages them as gradients
are. What is saved is the first rank's. So the other ranks have to have those too where it counts:
in the forwards of the training, or a run that goes on from a checkpoint would be another one, and
in an evaluation, which would be one of models that nobody saves. All of a model's go in one
collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchfast._core.phases import COMMUNICATION, phase


@final
class Buffers:
    """The buffers of models that are part of what is saved.

    What is not saved (``persistent=False``) is a table or a mask that a module has computed: it
    stays, and so do all buffers of a model that has counters and masks only.

    Args:
        models: Alike on all ranks.
        device: Where they train; others stay too.
    """

    def __init__(self, *models: nn.Module, device: torch.device) -> None:
        self._device = device
        modules = dict.fromkeys(module for model in models for module in model.modules())
        # By module: a forward may put another tensor in the place of one.
        self._holders = [m for m in modules if next(m.buffers(recurse=False), None) is not None]

    def send_from_first(self, ask: Callable[[], None] = lambda: None) -> None:
        """Make them on each rank what they are on the first, whose own are not written to.

        Args:
            ask: Called right before the ranks come together.

        Synchronizes: Never.
        """
        found = list({id(each): each for each in self._saved()}.values())
        # The widest first, so that each can be read where it comes to lie among the bytes.
        found.sort(key=lambda each: -each.dtype.itemsize)
        if not any(each.is_floating_point() or each.is_complex() for each in found):
            return
        with torch.no_grad():
            # As bytes: of several dtypes, and to the bit.
            parts = [each.contiguous().flatten().view(torch.uint8) for each in found]
            flat = torch.cat(parts)
            ask()
            with phase(COMMUNICATION):
                dist.broadcast(flat, src=0)
            if dist.get_rank() == 0:
                return
            sent = flat.split([part.numel() for part in parts])
            for each, part in zip(found, sent, strict=True):
                each.copy_(part.view(each.dtype).view(each.shape))

    def _saved(self) -> Iterator[Tensor]:
        for module in self._holders:
            passing = getattr(module, "_non_persistent_buffers_set", ())
            for name, buffer in module.named_buffers(recurse=False):
                if name not in passing and self._is_plain(buffer):
                    yield buffer

    def _is_plain(self, buffer: Tensor) -> bool:
        """Whether it can be sent as bytes; nothing writes to one that was expanded."""
        return (
            type(buffer) in (Tensor, nn.Parameter)
            and buffer.layout is torch.strided
            and buffer.device == self._device
            and buffer.numel() > 0
            and not any(
                n > 1 and s == 0 for n, s in zip(buffer.shape, buffer.stride(), strict=True)
            )
        )
