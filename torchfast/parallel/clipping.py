"""Clipping by the norm of all gradients, where some or all of them are sharded."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from torchfast._core.local import whole
from torchfast._core.phases import COMMUNICATION, phase
from torchfast.parallel.ranks import mean_over_ranks


def clip_sharded(parameters: Iterable[nn.Parameter], limit: float) -> Tensor:
    """Clip as ``clip_grad_norm_`` does, and return the norm as a plain tensor.

    Gradients that are sharded otherwise, or not at all, have norms of their own, which are joined.
    Those of parameters that are left alone may differ between ranks: their mean square counts, for
    every rank must clip its shards alike.

    Numerics: That of ``clip_grad_norm_``, whose sums are in another order.
    Synchronizes: Never.
    """
    groups, total = _groups_and_norm(parameters)
    for group in groups:
        clip_grads_with_norm_(group, limit, total)
    return total


def sharded_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the norm that `clip_sharded` would clip by.

    Synchronizes: Never.
    """
    return _groups_and_norm(parameters)[1]


def _groups_and_norm(
    parameters: Iterable[nn.Parameter],
) -> tuple[list[list[nn.Parameter]], Tensor]:
    """Return the parameters that have gradients, those sharded alike together, and the norm."""
    given = list(parameters)
    plain = [p for p in given if not isinstance(p, DTensor)]
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in given:
        if parameter.grad is not None:
            groups.setdefault(_layout(parameter.grad), []).append(parameter)
    norms = [_norm(group) for layout, group in groups.items() if layout is not None]
    if plain:  # on this rank and on all others, whether or not it has gradients now
        square = _norm(groups[None]).square() if None in groups else plain[0].new_zeros(())
        norms.append(mean_over_ranks(square.float()).sqrt())
    if not norms:
        return [], torch.zeros(())
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    return list(groups.values()), total


def _norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not isinstance(gradients[0], DTensor):
        return get_total_norm(gradients)
    with phase(COMMUNICATION):  # with this rank's share of the sums, which torch does not part
        return whole(get_total_norm(gradients))


def _layout(gradient: Tensor) -> object:
    if isinstance(gradient, DTensor):
        return gradient.device_mesh, gradient.placements
    return None
