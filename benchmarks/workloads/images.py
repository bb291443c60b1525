"""Made-up images: ready batches, and a loader that decodes and augments them on the host.

Images are uint8 until they are on the device, as they are stored; there they become float32, in
the memory format that convolutions are fastest in.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.workloads.definition import Batch

NUM_LABELS = 10  # of the classes that a model tells apart, so few occur that it learns at once


class ImageSize(NamedTuple):
    """The shape of a batch, and the number of batches in host memory."""

    batch: int
    pixels: int
    num_batches: int = 4


def pictures(labels: Tensor, pixels: int, generator: torch.Generator) -> Tensor:
    """Return uint8 images of coloured noise; each label has a colour."""
    colours = torch.randint(192, (NUM_LABELS, 3, 1, 1), dtype=torch.uint8, generator=generator)
    shape = (len(labels), 3, pixels, pixels)
    noise = torch.randint(64, shape, dtype=torch.uint8, generator=generator)
    return noise.add_(colours[labels])


def labelled_batches(size: ImageSize) -> list[Batch]:
    """Return batches of images and labels."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(NUM_LABELS, (size.num_batches * size.batch,), generator=generator)
    images = pictures(labels, size.pixels, generator)
    return list(zip(images.split(size.batch), labels.split(size.batch), strict=True))


def normalized(images: Tensor) -> Tensor:
    """Return uint8 images as floats around zero, channels last."""
    return (images.to(torch.float32, memory_format=torch.channels_last) - 128) / 64


def classification_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross-entropy of the images' labels."""
    images, labels = batch
    return F.cross_entropy(model(normalized(images)), labels)


class CompressedImages(Dataset[tuple[Tensor, Tensor]]):
    """Images that are decompressed, cropped, resized and flipped when they are read.

    What an index yields depends on the index alone. There are as many as anyone will ask for.
    """

    def __init__(self, pixels: int, num_stored: int = 256) -> None:
        generator = torch.Generator().manual_seed(0)
        self.pixels = pixels
        self.stored_pixels = pixels + pixels // 4
        self.labels = torch.randint(NUM_LABELS, (num_stored,), generator=generator)
        images = pictures(self.labels, self.stored_pixels, generator)
        self.compressed = [zlib.compress(image.numpy().tobytes(), level=1) for image in images]

    def __len__(self) -> int:
        return 2**40

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        stored = index % len(self.compressed)
        pixels = bytearray(zlib.decompress(self.compressed[stored]))
        image = torch.frombuffer(pixels, dtype=torch.uint8)
        image = image.view(3, self.stored_pixels, self.stored_pixels)
        return self.augment(image, torch.Generator().manual_seed(index)), self.labels[stored]

    def augment(self, image: Tensor, generator: torch.Generator) -> Tensor:
        """Return a random part of an image at the size of the model, half of the time mirrored."""
        scale, top, left, flip = torch.rand(4, generator=generator).tolist()
        side = int(self.stored_pixels * (0.5 + 0.5 * scale))
        top, left = (int(place * (self.stored_pixels - side)) for place in (top, left))
        part = image[None, :, top : top + side, left : left + side]
        resized = F.interpolate(part, self.pixels, mode="bilinear", antialias=True)[0]
        return resized.flip(-1) if flip < 0.5 else resized


def compressed_loader(
    size: ImageSize, *, num_workers: int, pin_memory: bool = False
) -> DataLoader[tuple[Tensor, Tensor]]:
    """Return an endless loader of augmented images, the same in every process."""
    return DataLoader(
        CompressedImages(size.pixels),
        size.batch,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        pin_memory=pin_memory,
    )


def compressed_batches(size: ImageSize) -> list[Batch]:
    """Return the first batches of the loader, read without workers."""
    loader = iter(compressed_loader(size, num_workers=0))
    return [tuple(next(loader)) for _ in range(size.num_batches)]
