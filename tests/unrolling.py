"""What the tests of several steps in one replay share: two trainers that must stay the same."""

from __future__ import annotations

from functools import partial

import torch
from torch import optim

from models import DropoutNet, mean_loss
from tape import CPU
from torchfast import MicroBatches, StepBatches, Trainer
from torchfast._core.compare import differences
from torchfast._core.rng import get_rng_state, preserved_rng, seed_everything, set_rng_state

K = 4
ADAMW = partial(optim.AdamW, lr=0.01, weight_decay=0.1, fused=True)
SGD = partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, fused=True)
ADAM = partial(optim.Adam, lr=0.01, fused=True)


class Both:
    """A trainer that takes single steps and one that takes several at once, from one seed."""

    def __init__(self, optimizer=ADAMW, loss_fn=mean_loss, *, net=DropoutNet, **options):
        self.trainers, self.rng = [], []
        for _ in range(2):
            with preserved_rng(CPU):
                seed_everything(0)
                self.trainers.append(Trainer(net(), optimizer, loss_fn, **options))
                self.rng.append(get_rng_state(CPU))
        self.single, self.several = self.trainers

    def steps(self, *batches):
        """Take steps both ways, and compare all that they leave."""
        with preserved_rng(CPU):
            set_rng_state(self.rng[0], CPU)
            losses = torch.stack([self.single.step(batch) for batch in batches])
            self.rng[0] = get_rng_state(CPU)
        with preserved_rng(CPU):
            set_rng_state(self.rng[1], CPU)
            got = self.several.steps(StepBatches(batches))
            self.rng[1] = get_rng_state(CPU)
        assert got.shape == (len(batches),)
        assert not got.requires_grad
        self.losses = losses, got
        self.check()

    def both(self, event):
        for trainer in self.trainers:
            event(trainer)

    def check(self):
        found = self.differences()
        assert not found, "\n".join(map(str, found[:5]))

    def differences(self):
        return differences(*map(self._state, range(2)))

    def _state(self, number):
        trainer = self.trainers[number]
        scheduler = trainer.lr_scheduler
        return {
            "losses": self.losses[number],
            "metrics": dict(trainer.metrics),
            "state": trainer.state_dict(),
            "buffers": dict(trainer.model.named_buffers()),
            "groups": [
                {k: v for k, v in group.items() if k != "params"}
                for group in trainer.optimizer.param_groups
            ],
            "rates": None if scheduler is None else list(scheduler.get_last_lr()),
            "generators": self.rng[number],
        }

    def run(self, batches, size=K):
        for start in range(0, len(batches), size):
            self.steps(*batches[start : start + size])

    @property
    def unrolled(self):
        return unrolled(self.several)


def unrolled(trainer):
    """Return the replays of several steps, and the steps in them."""
    found = trainer.report().to_dict()["counters"]
    return found["unrolled replays"], found["unrolled steps"]


def micro(batches, size=2):
    return [MicroBatches(batches[i : i + size]) for i in range(0, len(batches), size)]


def said(trainer):
    """Return what the report says of steps that were given together."""
    return [(d.outcome, d.detail) for d in trainer.report().decisions if d.lever == "unroll"]


def two_groups(make):
    def build(params):
        params = list(params)
        biases = [p for p in params if p.dim() < 2]
        return make(
            [{"params": [p for p in params if p.dim() > 1]}, {"params": biases, "lr": 0.003}]
        )

    return build
