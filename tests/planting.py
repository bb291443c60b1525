"""Steps that run out of memory where a test wants them to: torch's own error, raised by hand."""

from __future__ import annotations

import torch
from torch import nn, optim

from models import mean_loss
from torchfast import Plan, Trainer
from torchfast._core.rng import seed_everything

GIB = 2**30
TEXT = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 80.00 GiB"


class Planted:
    """Raises for batches of more than ``fits`` samples; counts what it saw in training."""

    def __init__(self, fits, where="forward"):
        self.fits = fits
        self.where = where
        self.sizes = []

    def check(self, size, where):
        trains = where == "backward" or torch.is_grad_enabled()
        if where == self.where and trains:
            self.sizes.append(size)
            if size > self.fits:
                raise torch.OutOfMemoryError(TEXT)


class BackwardPlant(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, plant, trains=True):
        ctx.plant, ctx.trains = plant, trains
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.trains:
            ctx.plant.check(len(gradient), "backward")
        return gradient, None, None


class PlantedNet(nn.Module):
    """A network in which a plant sits behind everything that changes state.

    In training only: the few samples that tell whether a loss can be split fit always.
    """

    def __init__(self, net, plant):
        super().__init__()
        self.net = net
        self.plant = plant

    def forward(self, x):
        plant = self.plant, self.training
        out = self.net(BackwardPlant.apply(x, *plant) if x.requires_grad else x)
        out = BackwardPlant.apply(out, *plant)
        if self.training:
            self.plant.check(len(x), "forward")
        return out


class PlantedSGD(optim.SGD):
    """Fails in its ``failing``-th update, once the first parameter is changed."""

    def __init__(self, parameters, failing=1):
        super().__init__(parameters, lr=0.1)
        self.left = failing

    def step(self, closure=None):
        self.left -= 1
        if self.left == 0:
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1.0)
            raise torch.OutOfMemoryError(TEXT)
        return super().step(closure)


SPLIT = Plan(out_of_memory="split")


def plain_net():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def make(plant, *, net=plain_net, loss_fn=mean_loss, plan="eager", optimizer=None, **options):
    seed_everything(0)
    model = PlantedNet(net(), plant)
    optimizer = optimizer or (lambda p: optim.SGD(p, lr=0.1, momentum=0.9))
    return Trainer(model, optimizer, loss_fn, plan, **options)


def batch_of(size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 8, generator=generator)
    return inputs, torch.randint(4, (size,), generator=generator)


def weights(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def assert_close(a, b):
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-5, atol=1e-6, msg=name)
