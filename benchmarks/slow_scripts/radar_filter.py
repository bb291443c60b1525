"""Trains a radar front end whose measurements feed a differentiable Kalman filter of tracks."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, width, bias=False)
        self.outer = nn.Linear(width, width, bias=False)

    def forward(self, x):
        return x + self.outer(F.gelu(self.inner(self.norm(x)), approximate="tanh"))


class FrontEnd(nn.Module):
    """Turns every raw range profile into a measurement and its noise variance."""

    def __init__(self, bins, width, depth, states):
        super().__init__()
        self.enter = nn.Linear(bins, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.leave = nn.Linear(width, 2 * states)

    def forward(self, profiles):
        x = self.leave(self.blocks(self.enter(profiles)))
        measured, noise = x.float().chunk(2, dim=-1)
        return measured, F.softplus(noise) + 1e-3


class DiagonalKalman(nn.Module):
    def __init__(self, states):
        super().__init__()
        self.decay = 0.97
        self.process = nn.Parameter(torch.full((states,), -2.0))

    def forward(self, measured, noise):
        mean, variance = torch.zeros_like(measured[:, 0]), torch.ones_like(measured[:, 0])
        process = F.softplus(self.process).expand_as(variance)
        means, innovations, totals, inflation, diary = [], [], [], 1.0, []
        for z, r in zip(measured.unbind(1), noise.unbind(1), strict=True):
            mean = mean * self.decay
            variance = variance * (inflation * self.decay**2) + process
            innovation, total = z - mean, variance + r
            gain = variance / total
            mean = mean + gain * innovation
            variance = gain * r
            means.append(mean)
            innovations.append(innovation)
            totals.append(total)
            consistency = (innovation.detach().square() / total.detach()).mean().item()  # <- here
            trust = gain.detach().mean().item()  # <- here
            spread = float(variance.detach().amax())  # <- here
            inflation = min(max(consistency, 1.0), 1.5)
            diary.append((consistency, trust, spread))
        innovation, total = torch.stack(innovations, 1), torch.stack(totals, 1)
        surprise = (innovation.square() / total + total.log()).mean()
        return torch.stack(means, 1), surprise, diary


class Tracker(nn.Module):
    def __init__(self, bins, width, depth, states):
        super().__init__()
        self.front = FrontEnd(bins, width, depth, states)
        self.kalman = DiagonalKalman(states)

    def forward(self, profiles, tracks):
        with torch.autocast(profiles.device.type, torch.bfloat16):
            measured, noise = self.front(profiles)
        means, surprise, diary = self.kalman(measured, noise)
        return F.mse_loss(means, tracks) + 0.05 * surprise, diary


def simulate(groups, batch, times, bins, states, device):
    """Random walks seen through one fixed random aperture, kept on the device."""
    aperture = torch.randn(states, bins, device=device) / states**0.5
    for _ in range(groups):
        tracks = 0.4 * torch.randn(batch, times, states, device=device).cumsum(1)
        profiles = torch.sin(tracks @ aperture)
        profiles += 0.3 * torch.randn_like(profiles)
        yield profiles.bfloat16(), tracks


def main(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="a size for a CPU")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    device = torch.device(options.device)
    batch, times, bins, width, depth = (32, 6, 64, 64, 2) if options.small else BIG

    model = Tracker(bins, width, depth, states=16).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=3e-4, total_steps=options.steps + 1, pct_start=0.2
    )
    groups = list(simulate(8, batch, times, bins, 16, device))
    for step in range(options.steps):
        profiles, tracks = groups[step % len(groups)]
        loss, diary = model(profiles, tracks)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
    consistency, trust, spread = diary[-1]
    print(f"filter: consistency {consistency:.3f}, gain {trust:.3f}, variance {spread:.3f}")
    print(f"loss {loss.item():.4f}")


BIG = (4096, 10, 1024, 2048, 6)

if __name__ == "__main__":
    main()
