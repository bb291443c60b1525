"""Trains a residual convolution network to double the resolution of pictures, in bf16."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x):
        y = F.relu(self.conv1(x))  # <- here
        return x + 0.1 * self.conv2(y)  # <- here


class Upscaler(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.Sequential(*(Residual(width) for _ in range(depth)))
        self.fuse = nn.Conv2d(width, width, 3, padding=1)
        self.leave = nn.Conv2d(width, 12, 3, padding=1)

    def forward(self, images):
        x = self.enter(images)
        x = x + self.fuse(self.blocks(x))
        return F.pixel_shuffle(self.leave(x), 2)


def make_patches(count, batch, size, device):
    """Return sharp patches and their halves."""
    sharp = torch.rand(count * batch, 3, 2 * size, 2 * size, device=device)
    blurred = F.avg_pool2d(sharp, 2)
    return sharp.view(count, batch, *sharp.shape[1:]), blurred.view(count, batch, 3, size, size)


def train(model, sharp, blurred, steps):
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-4, fused=True)
    for step in range(steps):
        i = step % len(sharp)
        with torch.autocast(sharp.device.type, torch.bfloat16):
            output = model(blurred[i])
            loss = F.l1_loss(output, sharp[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="a size for a CPU")
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    device = torch.device(args.device)
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = True
    width, depth, batch, size = (8, 2, 2, 16) if args.small else (128, 12, 32, 96)
    model = Upscaler(width, depth).to(device)  # <- here
    sharp, blurred = make_patches(4, batch, size, device)
    loss = train(model, sharp, blurred, args.steps)
    print(f"loss {loss.item():.3f} after {args.steps} steps")


if __name__ == "__main__":
    main()
