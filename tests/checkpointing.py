"""A trainer to save, and a strict comparison of what was loaded with what was saved."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import optim

from models import DropoutNet, mean_loss
from torchfast import Trainer


def trainer(seed=0, model=DropoutNet, **options):
    torch.manual_seed(seed)
    optimizer = partial(optim.AdamW, lr=1e-2)
    scheduler = partial(optim.lr_scheduler.StepLR, step_size=2)
    return Trainer(model(), optimizer, mean_loss, lr_scheduler=scheduler, **options)


def assert_same(found, expected):
    """Equal, with the same types and order, to the bit."""
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
        return
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_same(found[key], value)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for ours, theirs in zip(found, expected, strict=True):
            assert_same(ours, theirs)
    elif isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype
        assert np.array_equal(found, expected)
    else:
        assert found == expected
