"""Trains by fit with checkpoints, slowly; prints what it ended with.

Usage: fit_job.py FOLDER [OUTPUT]
"""

from __future__ import annotations

import logging
import signal
import sys
import time

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

from torchfast import Trainer
from torchfast._core.rng import seed_everything

STEPS = 40


def job():
    """Return a trainer, its loader and the options of its fit."""
    seed_everything(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 1))
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    data = TensorDataset(torch.randn(44, 8), torch.randn(44, 1))

    def loss_fn(model, batch):
        inputs, targets = batch
        return (model(inputs) - targets).square().mean()

    trainer = Trainer(model, optimizer, loss_fn, accumulate=2, lr_scheduler=scheduler)
    return trainer, DataLoader(data, 4, shuffle=True), {"steps": STEPS, "progress": False}


def main(folder, output=None):
    trainer, loader, options = job()

    def slowly(event):
        if event.kind == "step":
            sys.stdout.write(f"step {event.num_steps}\n")
            sys.stdout.flush()
            time.sleep(0.01)

    result = trainer.fit(
        loader, checkpoint=folder, checkpoint_every=3, callbacks=[slowly], **options
    )
    if output:
        torch.save(trainer.state_dict(), output)
    return result.exit_code


if __name__ == "__main__":
    # A job that was started in the background may have been told to ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    logging.basicConfig(level=logging.INFO)
    sys.exit(main(*sys.argv[1:]))
