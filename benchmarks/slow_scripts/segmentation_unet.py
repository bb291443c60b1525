"""Trains a U-Net to segment aerial pictures that fit into the host's memory."""

import argparse
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn


def double_conv(inputs, outputs):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


class UNet(nn.Module):
    def __init__(self, width, depth, classes):
        super().__init__()
        widths = [width << i for i in range(depth + 1)]
        self.enter = double_conv(8, width)
        self.down = nn.ModuleList(double_conv(a, b) for a, b in pairwise(widths))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in pairwise(widths))
        self.merge = nn.ModuleList(double_conv(2 * a, a) for a in widths[:-1])
        self.leave = nn.Conv2d(width, classes, 1)

    def forward(self, x):
        x = self.enter(x)
        skipped = []
        for down in self.down:
            skipped.append(x)
            x = down(F.max_pool2d(x, 2))
        for i in reversed(range(len(self.up))):
            x = self.merge[i](torch.cat([skipped[i], self.up[i](x)], 1))
        return self.leave(x)


class Tiles:
    """Pictures of eight spectral bands with a class for each pixel, a few batches of them."""

    def __init__(self, num_batches, batch, size, classes):
        self.images = torch.rand(num_batches, batch, 8, size, size)
        self.masks = torch.randint(classes, (num_batches, batch, size, size))

    def batches(self, steps):
        for step in range(steps):
            i = step % len(self.images)
            yield self.images[i], self.masks[i]


def train(model, tiles, steps, device):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for images, masks in tiles.batches(steps):
        images = images.to(device, non_blocking=True)  # <- here
        masks = masks.to(device, non_blocking=True)  # <- here
        images = images.contiguous(memory_format=torch.channels_last)
        with torch.autocast(device.type, torch.bfloat16):
            loss = F.cross_entropy(model(images), masks)
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
    batch, size, width = (2, 32, 8) if args.small else (32, 512, 16)
    model = UNet(width, depth=3, classes=6).to(device, memory_format=torch.channels_last)
    loss = train(model, Tiles(4, batch, size, classes=6), args.steps, device)
    print(f"loss {loss.item():.3f} after {args.steps} steps")


if __name__ == "__main__":
    main()
