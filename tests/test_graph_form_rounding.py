"""A form that rounds otherwise only in some later update is not taken for exact."""

from __future__ import annotations

import sys

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


def test_what_grows_beyond_all_numbers_in_both_forms_does_not_differ():
    optimizer = optim.SGD([nn.Parameter(torch.ones(3))], lr=50.0, weight_decay=1.0)
    form, _ = graph_form(optimizer, "exact")
    assert form is not None


def test_groups_of_one_kind_are_tried_once(monkeypatch):
    tried, module = [], sys.modules[graph_form.__module__]
    run = module._run
    note = lambda optimizer, group, *rest: tried.append(group["lr"]) or run(optimizer, group, *rest)  # noqa: E731
    monkeypatch.setattr(module, "_run", note)
    groups = [{"params": [nn.Parameter(torch.ones(3))], "lr": lr} for lr in (0.5, 0.25) * 20]
    graph_form(optim.SGD(groups, lr=0.1), "exact")
    assert sorted(set(tried)) == [0.25, 0.5]
    assert len(tried) == 2 * 2 * 2  # groups, trials, forms
