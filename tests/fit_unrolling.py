"""Runs of fit with several steps in a replay, and all that they tell, to be compared."""

from __future__ import annotations

from functools import partial

import torch
from torch.optim import lr_scheduler as schedulers

from fitting import fit
from models import DropoutNet, loss_and_metrics, make_batches
from tape import CPU
from torchfast import Plan, Trainer
from torchfast._core.compare import differences
from torchfast._core.rng import get_rng_state, preserved_rng, seed_everything
from unrolling import ADAMW, two_groups

BATCHES = make_batches(23)
LAMBDAS = partial(schedulers.LambdaLR, lr_lambda=[lambda s: 1 / (1 + s), lambda s: 0.5 ** (s / 9)])


class Loader(list):
    """Batches with memory of their own in each epoch, as from a loader and not from a list."""

    def __iter__(self):
        return (tuple(t.clone() for t in batch) for batch in super().__iter__())


def trainer_of(optimizer=None, loss_fn=loss_and_metrics, *, net=DropoutNet, **options):
    seed_everything(0)
    options = {"lr_scheduler": LAMBDAS, "max_grad_norm": 0.5, **options}
    return Trainer(net(), optimizer or two_groups(ADAMW), loss_fn, **options)


class Run:
    """A run of fit, and all that it told."""

    def __init__(self, unroll=None, *, loader=None, trainer=None, make=None, **options):
        self.trainer = trainer or trainer_of(**(make or {}))
        self.steps, self.kinds = {}, []
        given = {"epochs": 2, "log_every": 3, "callbacks": [], **options}
        given["callbacks"] = [self.note, *given["callbacks"]]
        with preserved_rng(CPU):
            seed_everything(1)
            batches = Loader(BATCHES) if loader is None else loader(self.trainer)
            self.result = fit(batches, trainer=self.trainer, unroll=unroll, **given)
            self.rng = get_rng_state(CPU)

    def note(self, event):
        self.kinds.append((event.kind, event.num_steps, event.epoch))
        if event.kind == "step":
            self.steps[event.num_steps] = event.loss.clone(), dict(event.metrics)

    def told(self):
        """Return the records without what depends on time, as lines: a NaN is like another."""
        timed = ("seconds", "step_ms", "phases", "items_per_s", "eta_s")
        records = [{k: v for k, v in r.items() if k not in timed} for r in self.result.history]
        return list(map(str, records))

    def state(self):
        trainer = self.trainer
        return {
            "state": {k: v for k, v in trainer.state_dict().items() if k != "rng"},
            "rates": trainer.lr_scheduler and trainer.lr_scheduler.get_last_lr(),
            "rng": self.rng,
        }


def differ(one, other):
    """Return what differs between two runs, which came as far."""
    return [
        *differences(one.state(), other.state()),
        *differences(one.steps, other.steps),
        *differences(dict(one.trainer.metrics), dict(other.trainer.metrics)),
        *([] if one.told() == other.told() else [(one.told(), other.told())]),
        *([] if one.kinds == other.kinds else [(one.kinds, other.kinds)]),
    ]


def assert_same(one, other):
    found = differ(one, other)
    assert not found, "\n".join(map(str, found[:5]))


SKIP = Plan(nonfinite="skip", cuda_graph=True)


def poisoned():
    """Return batches of which some are NaN."""
    bad = (9, 10, 16)
    return Loader((x * torch.nan if place in bad else x, y) for place, (x, y) in enumerate(BATCHES))
