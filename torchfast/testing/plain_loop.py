"""The reference: a training step as one writes it by hand, in torch alone.

Nothing of torchfast is imported here, so a mistake in the library cannot hide in its own proof.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def plain_step(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: Callable[[Any, Any], Any],
    batches: Sequence[Any],
    *,
    max_grad_norm: float | None = None,
    lr_scheduler: Any = None,
) -> Tensor:
    """Run one update over micro-batches and return its mean loss, detached.

    Args:
        model: The model.
        optimizer: Its optimizer.
        loss_fn: Returns ``loss``, ``(loss, metrics)`` or ``(loss, metrics, weight)``; with a
            weight, the loss is a sum over that many items.
        batches: The micro-batches of this update, on the model's device.
        max_grad_norm: Clip the total gradient norm of ``model.parameters()`` at this.
        lr_scheduler: Stepped after the update.
    """
    optimizer.zero_grad(set_to_none=True)
    losses: list[Tensor] = []
    weights: list[Tensor] = []
    for batch in batches:
        result = loss_fn(model, batch)
        loss = result[0] if isinstance(result, tuple) else result
        if isinstance(result, tuple) and len(result) == 3:
            weights.append(torch.as_tensor(result[2], device=loss.device))
        elif len(batches) > 1:
            loss = loss / len(batches)
        loss.backward()
        losses.append(loss.detach())
    total_loss = losses[0]
    for loss in losses[1:]:
        total_loss = total_loss + loss
    if weights:
        total_weight = weights[0]
        for weight in weights[1:]:
            total_weight = total_weight + weight
        total_loss = total_loss / total_weight
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(total_weight)
    if max_grad_norm is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    optimizer.step()
    if lr_scheduler is not None:
        lr_scheduler.step()
    return total_loss
