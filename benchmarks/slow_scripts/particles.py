"""Trains a drag model for inertial particles in a box, through six sub-steps of a rollout."""

import argparse

import torch
from torch import nn

MAX_SPEED = 1.2
RESTITUTION = 0.8


class DragModel(nn.Module):
    """Acceleration of each particle from its state, its traits and the fluid around it."""

    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, width),
            nn.SiLU(),
            nn.Linear(width, width),
            nn.SiLU(),
            nn.Linear(width, width),
            nn.SiLU(),
            nn.Linear(width, width),
            nn.SiLU(),
            nn.Linear(width, 8),
        )

    def forward(self, position, velocity, fluid, traits):
        state = torch.cat([position, velocity, fluid - velocity, traits], dim=-1)
        return self.layers(state)[..., :3]


def limit_speed(velocity):
    speed = velocity.square().sum(dim=-1, keepdim=True).add(1e-8).sqrt()
    fast = speed.squeeze(-1) > MAX_SPEED
    limited = velocity.clone()
    limited[fast] = velocity[fast] * (MAX_SPEED / speed[fast])  # <- here
    return limited


def reflect(position, velocity):
    """Mirror what left the unit box and damp the velocity component that hit the wall."""
    below, above = position < 0.0, position > 1.0
    hit = below | above
    position, velocity = position.clone(), velocity.clone()
    position[below] = -position[below]  # <- here
    position[above] = 2.0 - position[above]  # <- here
    velocity[hit] = -RESTITUTION * velocity[hit]  # <- here
    return position, velocity


def rollout(model, episode, dt):
    position, velocity = episode["position"], episode["velocity"]
    for fluid in episode["fluid"].unbind(0):
        acceleration = model(position, velocity, fluid, episode["traits"]).float()
        velocity = limit_speed(velocity + dt * acceleration)
        position, velocity = reflect(position + dt * velocity, velocity)
    return position, velocity


def make_episode(particles, substeps, device):
    uniform = torch.rand(particles, 3, device=device)
    fluid = 0.7 * torch.randn(substeps, particles, 3, device=device)
    velocity = 0.6 * torch.randn(particles, 3, device=device)
    drift = uniform + 0.08 * substeps * (0.5 * velocity + 0.5 * fluid.mean(dim=0))
    return {
        "position": uniform,
        "velocity": velocity,
        "fluid": fluid,
        "traits": torch.rand(particles, 7, device=device),
        "target": 1.0 - (drift.remainder(2.0) - 1.0).abs(),
        "tracked": torch.rand(particles, device=device) < 0.7,
    }


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="a size for a CPU")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)

    particles, width, substeps = (512, 64, 4) if options.small else (131072, 1280, 6)
    device = torch.device(options.device)
    episodes = [make_episode(particles, substeps, device) for _ in range(4)]
    model = DragModel(width).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, weight_decay=0.01, fused=True)

    for step in range(options.steps):
        episode = episodes[step % len(episodes)]
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            position, _ = rollout(model, episode, dt=0.08)
        error = (position - episode["target"]).square().sum(dim=-1)
        loss = error[episode["tracked"]].mean()  # <- here
        loss.backward()
        optimizer.step()

    print(f"loss {loss.item():.5f}")


if __name__ == "__main__":
    main()
