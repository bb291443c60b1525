"""A form that rounds otherwise only in some later update is not taken for exact."""

from __future__ import annotations

import pytest
import torch
from torch import nn, optim

from torchfast.graphs.graph_form import graph_form
from torchfast.graphs.learning_rates import LearningRates


def updated(kind, lr, rate_dtype):
    """Return a parameter as each of many updates leaves it."""
    generator = torch.Generator().manual_seed(0)
    parameter = nn.Parameter(torch.randn(64, generator=generator))
    optimizer = kind([parameter], lr=lr, fused=True, capturable=rate_dtype is not None)
    optimizer._warned_capturable_if_run_uncaptured = True
    rates = None if rate_dtype is None else LearningRates(optimizer, rate_dtype)
    found = []
    for _ in range(150):
        parameter.grad = torch.randn(64, generator=generator)
        if rates is None:
            optimizer.step()
        else:
            with rates.on_device():
                optimizer.step()
        found.append(parameter.detach().clone())
    return torch.stack(found)


@pytest.mark.parametrize("lr", [0.05, 0.1, 1e-3])
@pytest.mark.parametrize("kind", [optim.Adam, optim.AdamW])
def test_what_is_taken_for_exact_is_so_after_many_updates(kind, lr):
    form, _ = graph_form(kind([nn.Parameter(torch.ones(3))], lr=lr, fused=True), "exact")
    assert form is not None
    assert torch.equal(updated(kind, lr, None), updated(kind, lr, form.rate_dtype))
