"""ResNet-50 v1.5, on images that are ready, or that the host has to decode."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.workloads.definition import Size, Workload, num_parameters
from benchmarks.workloads.images import (
    ImageSize,
    classification_loss,
    compressed_batches,
    compressed_loader,
    labelled_batches,
)


class ResNetSize(NamedTuple):
    """Bottlenecks in each stage, the width of the first, the classes, and the learning rate."""

    depths: tuple[int, ...]
    width: int
    classes: int
    lr: float


SIZES: dict[Size, ResNetSize] = {
    "full": ResNetSize((3, 4, 6, 3), width=64, classes=1000, lr=3e-4),
    "smoke": ResNetSize((1, 1), width=8, classes=20, lr=1e-3),
}
IMAGES: dict[Size, ImageSize] = {
    "full": ImageSize(batch=256, pixels=224),
    "smoke": ImageSize(batch=8, pixels=32),
}
# Half of the batch, so that a block of steps, each as long as its decoding, ends in good time.
DECODED: dict[Size, ImageSize] = {
    "full": ImageSize(batch=128, pixels=224),
    "smoke": IMAGES["smoke"],
}
# Four workers are what many people start with; they decode far less than an H200 trains on.
NUM_WORKERS: dict[Size, int] = {"full": 4, "smoke": 2}


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """Return a convolution that keeps the size up to its stride, and a batch norm."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))


class Bottleneck(nn.Module):
    """Three convolutions, added to the input; the stride is on the second, hence "v1.5"."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.reduce = convolution(inputs, width, 1)
        self.mix = convolution(width, width, 3, stride)
        self.expand = convolution(width, 4 * width, 1)
        same_shape = stride == 1 and inputs == 4 * width
        self.shortcut = nn.Identity() if same_shape else convolution(inputs, 4 * width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return features four times as wide as this block."""
        y = F.relu(self.reduce(x))
        y = F.relu(self.mix(y))
        return F.relu(self.expand(y) + self.shortcut(x))


class ResNet(nn.Module):
    """A stem, stages of bottlenecks, each stage half the size and twice the width, and a head."""

    def __init__(self, size: ResNetSize) -> None:
        super().__init__()
        self.stem = convolution(3, size.width, 7, stride=2)
        self.blocks = nn.Sequential()
        features = size.width
        for stage, depth in enumerate(size.depths):
            for index in range(depth):
                stride = 2 if stage > 0 and index == 0 else 1
                width = size.width * 2**stage
                self.blocks.append(Bottleneck(features, width, stride))
                features = 4 * width
        self.head = nn.Linear(features, size.classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of each image."""
        x = F.max_pool2d(F.relu(self.stem(images)), 3, stride=2, padding=1)
        logits: Tensor = self.head(self.blocks(x).mean((2, 3)))
        return logits


def workload(name: str, size: Size) -> Workload:
    """Return "resnet50" or "resnet50-input-bound"."""
    at = SIZES[size]
    build = partial(ResNet, at)
    input_bound = name == "resnet50-input-bound"
    images = (DECODED if input_bound else IMAGES)[size]
    workers = NUM_WORKERS[size]
    source = f", decoded by {workers} workers" if input_bound else ""
    return Workload(
        name=name,
        title=f"ResNet-{3 * sum(at.depths) + 2} {num_parameters(build)}, "
        f"{images.batch}x3x{images.pixels}x{images.pixels}{source}",
        build=build,
        batches=partial(compressed_batches if input_bound else labelled_batches, images),
        loss_fn=classification_loss,
        unit="images",
        items_per_step=images.batch,
        lr=at.lr,
        channels_last=True,
        # Blocks differ in shape, so compiled one by one they would be as many compilations.
        loader=partial(compressed_loader, images, num_workers=workers) if input_bound else None,
        bound="input" if input_bound else "compute",
    )
