"""What the tests of fit share: a small trainer, a short call of fit, and what a result holds."""

from __future__ import annotations

import signal
from functools import partial

from torch import optim

from models import BatchNormNet, DropoutNet, make_batches, mean_loss
from torchfast import Trainer
from torchfast._core.rng import seed_everything

SGD = partial(optim.SGD, lr=0.1, momentum=0.9)
BATCHES = make_batches(4)


def make_trainer(loss_fn=mean_loss, *, net=DropoutNet, optimizer=SGD, plan="exact", **options):
    seed_everything(0)
    return Trainer(net(), optimizer, loss_fn, plan, **options)


def fit(loader=BATCHES, *, trainer=None, **options):
    options = {"progress": "off", "log_every": 1, **options}
    return (trainer or make_trainer()).fit(loader, **options)


def training(result):
    return [record for record in result.history if "loss" in record]


def evaluations(result):
    return [record for record in result.history if "evaluation" in record]


class Watched:
    """A loader that notes what happens to it."""

    def __init__(self, batches=BATCHES):
        self.batches = batches
        self.epochs = []
        self.fetched = 0

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __iter__(self):
        for batch in self.batches:
            self.fetched += 1
            yield batch

    def __len__(self):
        return len(self.batches)


class EmptyFrom:
    """Yields nothing from an epoch on."""

    def __init__(self, epoch):
        self.left = epoch

    def __iter__(self):
        self.left -= 1
        return iter(BATCHES if self.left >= 0 else [])


def frozen_norm():
    model = BatchNormNet()
    model.norm.eval()
    return model


def list_loss(model, batch):
    """A DataLoader's batches of a TensorDataset are lists."""
    return mean_loss(model, tuple(batch))


def handlers():
    return signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
