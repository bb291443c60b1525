"""Backwards that are differentiated again, within a forward of a sharded model: refused.

A gradient penalty asks for a gradient in the loss, with ``create_graph=True``, and the backward of
the step goes through the graph of that gradient. A block that is sharded is taken apart behind the
first of the two, and nothing gathers it for the second: the process dies there, of memory that is
not its own any more. A gradient in the loss that is only a value is fine, but for the account that
torch keeps of the blocks that have run: it begins anew behind each backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

from torchfast._core.errors import PlanError


@final
class InnerBackwards:
    """Sees such backwards go through blocks.

    Args:
        blocks: Sharded, each by itself.

    Attributes:
        any_ran: Whether one has, be it for a value only, since a forward began.
    """

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        self.any_ran = self._is_twice = self._is_inside = False
        for block in blocks:
            state: Any = block._get_fsdp_state()  # type: ignore[operator]
            state._pre_backward = self._noting(state._pre_backward)

    @contextmanager
    def seen(self) -> Iterator[None]:
        """Enter it around a forward.

        Raises:
            PlanError: There was one in it.
        """
        self.any_ran = self._is_twice = False
        self._is_inside = True
        try:
            yield
        finally:
            self._is_inside = False
        if self._is_twice:
            raise PlanError(
                "loss_fn takes a gradient through a sharded block with create_graph=True, as a "
                "gradient penalty does, and a block cannot be differentiated twice once its shards "
                "are taken apart; give ShardOptions(blocks=()), which keeps the model in one "
                "piece, or take shard='ddp'"
            )

    def _noting(self, begin: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def noted(gradient: Tensor) -> Tensor:
            self.any_ran |= self._is_inside
            # As the engine sets it: a backward that makes a graph of itself.
            self._is_twice |= torch.is_grad_enabled()
            return begin(gradient)

        return noted
