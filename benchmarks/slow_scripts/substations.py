"""Trains one load forecaster for each substation of a power grid, all as one batched model."""

import argparse
import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn


class Lion(torch.optim.Optimizer):
    """Sign of an interpolated momentum, with decoupled weight decay."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for p in group["params"]:  # <- here
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                momentum = state["momentum"]
                p.mul_(1.0 - lr * group["weight_decay"])  # <- here
                update = momentum.mul(beta1).add_(p.grad, alpha=1.0 - beta1)  # <- here
                p.add_(update.sign_(), alpha=-lr)  # <- here
                momentum.mul_(beta2).add_(p.grad, alpha=1.0 - beta2)  # <- here


class Forecaster(nn.Module):
    """The weights of one substation, as they are saved and shipped to it."""

    def __init__(self, window, width, horizon, device):
        super().__init__()
        widths = [window, width, width, width, horizon]
        self.weights = nn.ParameterList()
        self.biases = nn.ParameterList()
        for fan_in, fan_out in pairwise(widths):
            weight = torch.randn(fan_in, fan_out, device=device) / math.sqrt(fan_in)
            self.weights.append(nn.Parameter(weight))
            self.biases.append(nn.Parameter(torch.zeros(1, fan_out, device=device)))


class Grid(nn.Module):
    def __init__(self, sites, window, width, horizon, device):
        super().__init__()
        self.sites = nn.ModuleList(Forecaster(window, width, horizon, device) for _ in range(sites))
        weights = zip(*[list(site.weights) for site in self.sites], strict=True)
        biases = zip(*[list(site.biases) for site in self.sites], strict=True)
        self.layers = list(zip(weights, biases, strict=True))

    def forward(self, x):
        for index, (weights, biases) in enumerate(self.layers):
            x = torch.baddbmm(torch.stack(biases), x, torch.stack(weights))
            if index + 1 < len(self.layers):
                x = F.gelu(x, approximate="tanh")
        return x


def make_loads(sites, hours, device):
    """Daily and weekly cycles with a random phase per site, and noise."""
    time = torch.arange(hours, device=device)
    phase = 2 * math.pi * torch.rand(sites, 1, device=device)
    daily = torch.sin(2 * math.pi * time / 24 + phase)
    weekly = torch.cos(2 * math.pi * time / 168 + phase)
    noise = 0.2 * torch.randn(sites, hours, device=device)
    return (daily + 0.5 * weekly + noise).to(torch.bfloat16)


def windows(loads, window, horizon, batch, steps):
    views = loads.unfold(1, window + horizon, 1)
    for _ in range(steps):
        starts = torch.randint(views.shape[1], (batch,), device=loads.device)
        yield views.index_select(1, starts).split([window, horizon], dim=-1)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="a size for a CPU")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)

    sites, batch, window, width, horizon = 64, 40960, 336, 512, 96
    if options.small:
        sites, batch, window, width, horizon = 16, 32, 48, 32, 24
    device = torch.device(options.device)
    loads = make_loads(sites, hours=26280, device=device)
    grid = Grid(sites, window, width, horizon, device)
    optimizer = Lion(grid.parameters(), lr=1e-4, weight_decay=0.1)

    for past, future in windows(loads, window, horizon, batch, options.steps):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            forecast = grid(past)
            loss = F.mse_loss(forecast, future)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    print(f"loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
