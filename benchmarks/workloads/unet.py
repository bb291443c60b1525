"""A 2d UNet, which gives a class to each pixel."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.workloads.definition import Batch, Size, Workload, num_parameters
from benchmarks.workloads.images import NUM_LABELS, ImageSize, normalized


class UNetSize(NamedTuple):
    """Features at each resolution, and the shape of the images."""

    widths: tuple[int, ...]
    images: ImageSize


SIZES: dict[Size, UNetSize] = {
    "full": UNetSize((64, 128, 256, 512, 1024), ImageSize(batch=16, pixels=256, num_batches=8)),
    "smoke": UNetSize((8, 16, 32), ImageSize(batch=2, pixels=32, num_batches=8)),
}


def double_convolution(inputs: int, outputs: int) -> nn.Sequential:
    """Return two convolutions, each with batch norm and ReLU."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


class UNet(nn.Module):
    """Down to a coarse image and up again, with the features of the way down beside it."""

    def __init__(self, widths: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(map(double_convolution, (3, *widths[:-1]), widths))
        upwards = widths[::-1]
        self.double_size = nn.ModuleList(
            nn.ConvTranspose2d(wide, narrow, 2, stride=2) for wide, narrow in pairwise(upwards)
        )
        self.up = nn.ModuleList(map(double_convolution, upwards[:-1], upwards[1:]))
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of each pixel, of shape (batch, classes, height, width)."""
        x, passed = self.down[0](images), []
        for layer in self.down[1:]:
            passed.append(x)
            x = layer(F.max_pool2d(x, 2))
        for double_size, layer in zip(self.double_size, self.up, strict=True):
            x = layer(torch.cat([passed.pop(), double_size(x)], dim=1))
        logits: Tensor = self.head(x)
        return logits


def make_batches(size: ImageSize) -> list[Batch]:
    """Return noisy images of coloured squares, and the class of each pixel as uint8."""
    generator = torch.Generator().manual_seed(0)
    colours = torch.randint(192, (NUM_LABELS, 3), dtype=torch.uint8, generator=generator)
    side = size.pixels // 8
    batches: list[Batch] = []
    for _ in range(size.num_batches):
        squares = torch.randint(NUM_LABELS, (size.batch, 8, 8), generator=generator)
        masks = squares.repeat_interleave(side, dim=1).repeat_interleave(side, dim=2)
        shape = (size.batch, 3, size.pixels, size.pixels)
        noise = torch.randint(64, shape, dtype=torch.uint8, generator=generator)
        batches.append((noise.add_(colours[masks].permute(0, 3, 1, 2)), masks.byte()))
    return batches


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross-entropy of all pixels."""
    images, masks = batch
    logits = model(normalized(images)).permute(0, 2, 3, 1)
    return F.cross_entropy(logits.flatten(0, 2), masks.long().flatten())


def workload(name: str, size: Size) -> Workload:
    """Return "unet"."""
    at = SIZES[size]
    build = partial(UNet, at.widths, NUM_LABELS)
    return Workload(
        name=name,
        title=f"UNet {num_parameters(build)}, "
        f"{at.images.batch}x3x{at.images.pixels}x{at.images.pixels}",
        build=build,
        batches=partial(make_batches, at.images),
        loss_fn=loss_fn,
        unit="images",
        items_per_step=at.images.batch,
        channels_last=True,
    )
