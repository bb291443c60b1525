"""What the tests of captured steps on a device train, and how two runs are compared."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.utils._pytree import tree_map_only

from test_parity import OPTIMIZERS
from torchfast import (
    Plan,
    Trainer,
)
from torchfast._core.compare import differences

GRAPH = Plan(cuda_graph=True)


class Net(nn.Module):
    """Dropout, BatchNorm, tied weights, a buffer that each forward replaces."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.dropout = nn.Dropout(0.2)
        self.second = nn.Linear(16, 16)
        self.tied = nn.Linear(16, 16)
        self.tied.weight = self.second.weight
        self.last = nn.Linear(16, 4)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        x = self.dropout(F.gelu(self.norm(self.first(x))))
        return self.last(self.tied(torch.tanh(self.second(x))))


def loss_fn(model, batch):
    inputs, targets = batch
    logits = model(inputs)
    return F.cross_entropy(logits, targets), {"logit": logits.detach().max()}


def two_groups(make, model):
    matrices = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    return make([{"params": matrices}, {"params": rest, "lr": 0.003}])


def lambdas(optimizer):
    return schedulers.LambdaLR(optimizer, [lambda s: 1 / (1 + s), lambda s: 0.99**s])


def one_cycle(optimizer):
    return schedulers.OneCycleLR(optimizer, 0.02, total_steps=400, cycle_momentum=False)


def on_gpu(batches):
    return [tuple(t.cuda() for t in batch) for batch in batches]


def build(name, plan, *, net=Net, loss=loss_fn, scheduler=None, **options):
    torch.manual_seed(0)
    model = net().cuda()
    optimizer = two_groups(OPTIMIZERS[name], model)
    return Trainer(model, optimizer, loss, plan, lr_scheduler=scheduler, **options)


def run(trainer, steps):
    torch.manual_seed(1)
    return [trainer.step(step).clone() for step in steps]


def run_in_halves(trainer, steps):
    """Run steps as `run` does, by their halves, which are eager."""
    torch.manual_seed(1)
    losses = []
    for step in steps:
        losses.append(trainer.forward_backward(step).clone())
        trainer.update()
    return losses


def state(trainer):
    return {key: value for key, value in trainer.state_dict().items() if key != "plan"}


def assert_same_training(plain, captured, steps):
    losses, ours = run(plain, steps), run(captured, steps)
    assert not differences(losses, ours)
    assert not differences(state(plain), state(captured))
    assert not differences(dict(plain.metrics), dict(captured.metrics))


def copied(state):
    return tree_map_only(torch.Tensor, torch.clone, state)


def counters(trainer):
    return trainer.report().counters
