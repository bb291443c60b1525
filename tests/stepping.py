"""What the tests of the step share: optimizers, a small trainer, groups, a state from a file."""

from __future__ import annotations

import io
from functools import partial

import torch
from torch import optim

from models import DropoutNet, mean_loss
from torchfast import MicroBatches, Plan, PrecisionOptions, Trainer

ADAMW = partial(optim.AdamW, lr=0.01)
SGD = partial(optim.SGD, lr=0.1, momentum=0.9)
FP16 = Plan(precision=PrecisionOptions(format="fp16", init_scale=256.0))


def make_trainer(optimizer=ADAMW, loss_fn=mean_loss, plan="exact", *, net=DropoutNet, **options):
    torch.manual_seed(0)
    return Trainer(net(), optimizer, loss_fn, plan, **options)


def grouped(batches, size):
    return [MicroBatches(batches[i : i + size]) for i in range(0, len(batches), size)]


def roundtrip(state):
    """Through a file, as a resumed run gets it."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
