"""ViT-B/16: the transformer block on patches of an image."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.workloads.definition import Size, Workload, blocks, num_parameters
from benchmarks.workloads.images import ImageSize, classification_loss, labelled_batches
from benchmarks.workloads.transformer import Block, initialize


class ViTSize(NamedTuple):
    """The shape of the model and of its images, and the learning rate."""

    layers: int
    width: int
    heads: int
    patch: int
    classes: int
    images: ImageSize
    lr: float


SIZES: dict[Size, ViTSize] = {
    "full": ViTSize(12, 768, 12, 16, 1000, ImageSize(batch=128, pixels=224), lr=1e-4),
    "smoke": ViTSize(2, 32, 2, 8, 20, ImageSize(batch=8, pixels=32), lr=1e-3),
}


class ViT(nn.Module):
    """A transformer over patches; a token beside them holds the class."""

    def __init__(self, size: ViTSize) -> None:
        super().__init__()
        num_patches = (size.images.pixels // size.patch) ** 2
        self.embed = nn.Conv2d(3, size.width, size.patch, stride=size.patch)
        self.class_token = nn.Parameter(torch.empty(1, 1, size.width))
        self.position = nn.Parameter(torch.empty(1, num_patches + 1, size.width))
        self.blocks = nn.ModuleList(
            Block(size.width, size.heads, causal=False, bias=True) for _ in range(size.layers)
        )
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.classes)
        initialize(self, size.layers)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of each image."""
        patches = self.embed(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(images), -1, -1), patches], dim=1)
        x = x + self.position
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x[:, 0]))
        return logits


def workload(name: str, size: Size) -> Workload:
    """Return "vit"."""
    at = SIZES[size]
    build = partial(ViT, at)
    return Workload(
        name=name,
        title=f"ViT {num_parameters(build)} ({at.layers} layers, d {at.width}, patch {at.patch}), "
        f"{at.images.batch}x3x{at.images.pixels}x{at.images.pixels}",
        build=build,
        batches=partial(labelled_batches, at.images),
        loss_fn=classification_loss,
        unit="images",
        items_per_step=at.images.batch,
        lr=at.lr,
        regions=blocks,
    )
