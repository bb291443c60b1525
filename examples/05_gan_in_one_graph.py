"""Train a GAN, two models and two optimizers, with the whole step in one CUDA graph.

    python examples/05_gan_in_one_graph.py [--steps N] [--device cpu|cuda]

The data are points near eight spots on a circle. A step updates the discriminator and then the
generator, and draws its noise on the device. On a GPU a CUDAGraphStep replays both updates with one
launch; on a CPU, which has no graphs, the function runs as it is:

    no graphs on a CPU: the step runs as it is
    step 1000  discriminator 1.032  generator 1.200
    step 2000  discriminator 1.089  generator 1.447
    step 3000  discriminator 1.258  generator 1.097
    8 of 8 spots are hit; 79% of the points are near one
    2.50 ms a step
"""

import argparse
import math
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchfast import CUDAGraphStep

BATCH, NOISE, SPOTS = 256, 8, 8
Losses = dict[str, Tensor]


def network(num_inputs: int, num_outputs: int) -> nn.Sequential:
    first, second = nn.Linear(num_inputs, 128), nn.Linear(128, 128)
    return nn.Sequential(
        first, nn.LeakyReLU(0.2), second, nn.LeakyReLU(0.2), nn.Linear(128, num_outputs)
    )


def spots(device: str) -> Tensor:
    angles = torch.arange(SPOTS, device=device) * (2 * math.pi / SPOTS)
    return torch.stack([angles.cos(), angles.sin()], dim=1)


@torch.no_grad()
def judge(generator: nn.Module, centres: Tensor) -> tuple[int, float]:
    """Return how many spots the generator hits, and which part of its points is near one."""
    noise = torch.randn(4096, NOISE, device=centres.device)
    distances, nearest = torch.cdist(generator(noise), centres).min(1)
    near = distances < 0.15
    counts = torch.bincount(nearest[near], minlength=SPOTS)
    return int((counts > 4096 / SPOTS / 10).sum()), near.float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a GAN in one CUDA graph.")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(0)

    generator = network(NOISE, 2).to(args.device)
    discriminator = network(2, 1).to(args.device)
    # fused=True: the updates can be in a graph without a change of one bit.
    optimizer_g = torch.optim.Adam(generator.parameters(), 5e-4, betas=(0.5, 0.99), fused=True)
    optimizer_d = torch.optim.Adam(discriminator.parameters(), 1e-3, betas=(0.5, 0.99), fused=True)

    def train_step(real: Tensor) -> Losses:
        """Update the discriminator, then the generator; read nothing on the host."""
        fake = generator(torch.randn(len(real), NOISE, device=real.device))

        optimizer_d.zero_grad(set_to_none=True)
        logits = discriminator(torch.cat([real, fake.detach()]))[:, 0]
        loss_d = F.softplus(-logits[: len(real)]).mean() + F.softplus(logits[len(real) :]).mean()
        loss_d.backward()
        optimizer_d.step()

        optimizer_g.zero_grad(set_to_none=True)
        loss_g = F.softplus(-discriminator(fake)).mean()
        loss_g.backward()  # leaves gradients in the discriminator too, which zeroes them first
        optimizer_g.step()
        return {"discriminator": loss_d.detach(), "generator": loss_g.detach()}

    step: Callable[[Tensor], Losses] = train_step
    if torch.device(args.device).type == "cuda":
        state = [generator, discriminator, optimizer_g, optimizer_d]
        step = CUDAGraphStep(train_step, state=state)
    else:
        print("no graphs on a CPU: the step runs as it is")

    centres = spots(args.device)
    started = time.perf_counter()
    for number in range(1, args.steps + 1):
        chosen = torch.randint(SPOTS, (BATCH,), device=args.device)
        losses = step(centres[chosen] + 0.03 * torch.randn(BATCH, 2, device=args.device))
        if number % max(1, args.steps // 3) == 0:
            parts = [f"{name} {loss.item():.3f}" for name, loss in losses.items()]
            print(f"step {number}  {'  '.join(parts)}")
    step_ms = (time.perf_counter() - started) / args.steps * 1e3

    if isinstance(step, CUDAGraphStep):
        print(step.report())
        step.close()
    num_hit, part = judge(generator, centres)
    print(f"{num_hit} of {SPOTS} spots are hit; {part:.0%} of the points are near one")
    print(f"{step_ms:.2f} ms a step")


if __name__ == "__main__":
    main()
