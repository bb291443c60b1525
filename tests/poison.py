"""Batches that spoil a step in each way there is, and a model with every kind of buffer."""

from __future__ import annotations

import copy
import itertools

import torch
import torch.nn.functional as F
from torch import nn

from models import make_batches
from torchfast import MicroBatches, Plan, PrecisionOptions, Trainer
from torchfast._core.compare import differences

SKIP = Plan(nonfinite="skip")
POISONS = ("NaN input", "infinite loss", "NaN loss only", "NaN gradient", "infinite gradient")


class BufferNet(nn.Module):
    """BatchNorm, dropout, a counter that is not saved, a mean that each forward replaces."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.dropout = nn.Dropout(0.3)
        self.last = nn.Linear(16, 4)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("constant", torch.ones(3).expand(2, 3), persistent=False)
        self.register_buffer("nothing", None)

    def forward(self, x):
        self.seen += len(x)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().float().mean(0)
        return self.last(self.dropout(F.gelu(self.norm(self.first(x)))))


def poisoned_loss(model, batch):
    """Cross-entropy, spoilt as the batch says; the random numbers drawn are the same."""
    inputs, targets, poison = batch
    if poison == "NaN input":
        inputs = inputs * torch.nan
    loss = F.cross_entropy(model(inputs), targets)
    if poison == "infinite loss":
        return loss * torch.inf
    if poison == "NaN loss only":  # the gradients are finite
        return loss + torch.nan
    if poison in ("NaN gradient", "infinite gradient"):  # of one element; the loss is finite
        value = next(reversed(list(model.parameters()))).flatten()[0]
        zero = value - value.detach()
        # The slope of a root at 0 is infinite, and times 0 it is NaN.
        return loss + (zero.sqrt() if poison == "infinite gradient" else (zero * 0.0).sqrt())
    return loss


def batches_with(poisons, *, accumulate=1, size=6):
    """Return a batch or group for each entry, in whose middle that poison is (None: nowhere)."""
    plain = iter(make_batches(len(poisons) * accumulate, size=size))
    steps = []
    for poison in poisons:
        group = [(*batch, None) for batch in itertools.islice(plain, accumulate)]
        middle = accumulate // 2
        group[middle] = (*group[middle][:2], poison)
        steps.append(group)
    return steps


def cured(group):
    return [(*batch[:2], None) for batch in group]


def as_batch(group):
    return group[0] if len(group) == 1 else MicroBatches(group)


def trainer_of(optimizer, plan, *, net=BufferNet, loss_fn=poisoned_loss, device=None, **options):
    torch.manual_seed(0)
    model = net() if device is None else net().to(device)
    return Trainer(model, optimizer, loss_fn, plan, **options)


def draw_as(trainer, group):
    """Draw the random numbers of a step on these batches, and do nothing else."""
    model = copy.deepcopy(trainer.model)
    for inputs, targets, _ in group:
        device = trainer.device
        poisoned_loss(model, (inputs.to(device), targets.to(device), None))


def state_of(trainer):
    """Return everything that a skipped step must leave alone, copied."""
    model = trainer.model
    return copy.deepcopy(
        {
            "parameters": dict(model.named_parameters()),
            "buffers": dict(model.named_buffers()),  # those that are not saved too
            "optimizer": trainer.state_dict()["optimizer"],
        }
    )


def assert_same(expected, actual):
    found = differences(expected, actual)
    assert not found, "\n".join(map(str, found[:5]))


def fp16(nonfinite, **scaling):
    precision = PrecisionOptions(format="fp16", **{"init_scale": 256.0, **scaling})
    return Plan(precision=precision, nonfinite=nonfinite)


def run(trainer, groups):
    torch.manual_seed(1)  # the generator is shared by all trainers
    return [trainer.step(as_batch(group)) for group in groups]


def run_without(trainer, groups):
    """Train on what is not poisoned; of the rest, draw the random numbers."""
    torch.manual_seed(1)
    for group in groups:
        if group == cured(group):
            trainer.step(as_batch(group))
        else:
            draw_as(trainer, group)


def check_bad_changes_no_bit(trainer, good, bad, more):
    """Assert that a step on ``bad`` between two others leaves no trace, and that they leave one."""
    run(trainer, [good])
    before = state_of(trainer)
    run(trainer, [bad])
    assert_same(before, state_of(trainer))
    run(trainer, [more])
    assert differences(before, state_of(trainer))
    assert trainer.num_skipped == 1
