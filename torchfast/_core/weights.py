"""Weighted micro-batches: losses that are sums over items, divided by how many items there were."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchfast._core.building import optimized
from torchfast._core.local import local
from torchfast._core.loss import LossParts, Number, Shares, mean_metrics, total


def combine(
    parts: list[LossParts],
    model: nn.Module,
    optimizer: Optimizer,
    device: torch.device,
    max_grad_norm: float | None,
    mean: Callable[[Tensor], Tensor] = torch.Tensor.detach,
) -> tuple[Tensor, dict[str, Number]]:
    """Bring a group to one loss and one dict of metrics; divide weighted gradients.

    ``mean`` is that over the ranks. Their gradients were averaged, so what divides is the average
    of their weights; and the average of the losses that ranks return is the loss of all items.

    Raises:
        TypeError: Some micro-batches have a weight and some have none.
        ValueError: A metric has the name of the gradient norm, which is reported too.
    """
    shares = weigh(parts, device)
    loss = total([part.loss for part in parts])
    if shares is not None:
        divisor = mean(shares.total)
        divide_gradients(model, optimizer, divisor)
        loss = loss / divisor.to(loss.device)
    metrics = mean_metrics([part.metrics for part in parts], shares)
    if max_grad_norm is not None and "grad_norm" in metrics:
        raise ValueError(
            "loss_fn returned a metric named 'grad_norm', which is the name of the gradient norm "
            "that clipping reports; rename it"
        )
    return loss, metrics


def weigh(parts: list[LossParts], device: torch.device) -> Shares | None:
    """Return the group's weights on the device, or None where there are none.

    Raises:
        TypeError: Some micro-batches have a weight and some have none.
    """
    weights = [part.weight for part in parts if part.weight is not None]
    if not weights:
        return None
    if len(weights) != len(parts):
        raise TypeError(
            f"loss_fn returned a weight for {len(weights)} of {len(parts)} micro-batches; "
            "return one always or never"
        )
    on_device = [_as_tensor(weight, device) for weight in weights]
    return Shares(on_device, total(on_device))


def divide_gradients(model: nn.Module, optimizer: Optimizer, weight: Tensor) -> None:
    """Divide every gradient by the sum of the weights, in place."""
    gradients = {
        id(p): local(p.grad)
        for p in (*model.parameters(), *optimized(optimizer))
        if p.grad is not None
    }
    dense = [g for g in gradients.values() if not g.is_sparse and g.device == weight.device]
    if dense:
        torch._foreach_div_(dense, weight)
    for gradient in gradients.values():
        if gradient.is_sparse or gradient.device != weight.device:
            gradient.div_(weight.to(gradient.device))


def _as_tensor(weight: Number, device: torch.device) -> Tensor:
    if isinstance(weight, Tensor) and weight.device.type != "cpu":
        # Summed over micro-batches and ranks, which is too much for 16 bits.
        dtype = torch.promote_types(weight.dtype, torch.float32)
        return weight.to(device, dtype, non_blocking=True)
    if isinstance(weight, Tensor) and device.type == "cpu":
        return weight.float()
    # full() fills on the device; tensor() would copy from pageable memory and wait.
    return torch.full((), float(weight), dtype=torch.float32, device=device)
