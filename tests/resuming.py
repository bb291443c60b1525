"""Runs of fit that are cut short and go on, and the loaders and trainers for them."""

from __future__ import annotations

import os
import signal
from functools import partial

import torch
from torch import optim
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from fitting import fit, make_trainer
from models import BatchNormNet, make_batches
from torchfast import Plan
from torchfast._core.compare import differences

BATCHES = make_batches(6)
# One that ends within the run, and one that ends with it.
EPOCHS = 2
DATA = TensorDataset(*(torch.cat(parts) for parts in zip(*make_batches(11), strict=True)))


def shuffled(**options):
    return DataLoader(DATA, batch_size=8, shuffle=True, collate_fn=pairs, **options)


def pairs(samples):
    return tuple(torch.stack(parts) for parts in zip(*samples, strict=True))


KINDS = {
    "plain": {},
    "accumulated": {"accumulate": 2},
    "clipped, with a schedule": {
        "max_grad_norm": 0.1,
        "lr_scheduler": partial(lr_scheduler.StepLR, step_size=3, gamma=0.5),
    },
    "AdamW and BatchNorm": {"net": BatchNormNet, "optimizer": partial(optim.AdamW, lr=0.01)},
    "fp16": {"plan": Plan(precision="fp16")},
}


def trainer_of(kind):
    return make_trainer(**KINDS[kind])


def state(trainer):
    return {k: v for k, v in trainer.state_dict().items() if k != "rng"}


def run(kind="plain", loader=shuffled, stop_at=None, **options):
    """Run a fit of two epochs; ``stop_at`` ends it behind that step, as a signal would."""
    trainer = trainer_of(kind)
    losses = {}

    def note(event):
        if event.kind == "step":
            losses[event.num_steps] = event.loss.clone()
            if event.num_steps == stop_at:
                os.kill(os.getpid(), signal.SIGTERM)

    result = fit(loader(), trainer=trainer, **{"epochs": EPOCHS, "callbacks": [note], **options})
    return trainer, losses, result


def check_same(first, second, losses, resumed_losses):
    assert differences(state(first), state(second)) == []
    assert all(torch.equal(losses[step], loss) for step, loss in resumed_losses.items())
