"""A training beside the plain loop in which a value on the host changes at one step."""

from __future__ import annotations

from functools import partial

from torch import optim

from models import make_batches

ADAMW = partial(optim.AdamW, lr=0.01, fused=True)
CHANGED_AT = 7


def train(twins, event=None, steps=18):
    """Train; return the first step that differs from the plain loop's, None if none does."""
    for number, batch in enumerate(make_batches(1) * steps):
        if number == CHANGED_AT and event is not None:
            event(twins)
        twins.step(batch)
        if twins.differences(gradients=False):
            return number
    return None
