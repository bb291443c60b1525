"""The models that recompute is measured on, each at a size whose steps fit into a device eagerly.

A GPT and a stack of bottlenecks are built here; the Llama, the ViT and the ResNet-50 are those of
the yardstick, smaller, for three ways of recompute take turns and are in memory together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.workloads import llama, resnet, vit
from benchmarks.workloads.definition import Batch, Size
from benchmarks.workloads.images import ImageSize, classification_loss, labelled_batches
from benchmarks.workloads.tokens import next_token_loss, token_batches
from benchmarks.workloads.transformer import Block

VOCABULARY = 512


class Case(NamedTuple):
    """A model, a batch on the host, and its loss function."""

    title: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    loss_fn: Callable[[nn.Module, Batch], Tensor]
    # What can be recomputed in place of the blocks, by name: paths, of what holds several as well.
    groups: Mapping[str, tuple[str, ...]] = MappingProxyType({})


class Bottleneck(nn.Module):
    """A bottleneck of a ResNet that keeps its shape."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = width // 4
        self.convs = nn.ModuleList(
            nn.Conv2d(a, b, k, padding=k // 2, bias=False)
            for a, b, k in ((width, inner, 1), (inner, inner, 3), (inner, width, 1))
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in (inner, inner, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor shaped as ``x``."""
        y = x
        for number, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            y = norm(conv(y))
            y = F.relu(y, inplace=True) if number < 2 else F.relu(y + x)
        return y


class Stack(nn.Module):
    """Equal blocks between an embedding and a head."""

    def __init__(self, embed: nn.Module, blocks: list[nn.Module], width: int) -> None:
        super().__init__()
        self.embed, self.blocks = embed, nn.ModuleList(blocks)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x if x.dim() == 3 else x.mean((2, 3)))
        return logits


def _gpt(layers: int, width: int, batch: int, length: int) -> Case:
    def build() -> nn.Module:
        heads = max(1, width // 64)
        blocks = [Block(width, heads, causal=True, bias=True) for _ in range(layers)]
        return Stack(nn.Embedding(VOCABULARY, width), [*blocks], width)

    return Case(
        f"{layers} blocks of width {width}, {batch} x {length} tokens",
        build,
        partial(_tokens, VOCABULARY, batch, length),
        next_token_loss,
    )


def _bottlenecks(layers: int, width: int, batch: int, pixels: int) -> Case:
    def build() -> nn.Module:
        blocks = [Bottleneck(width) for _ in range(layers)]
        return Stack(nn.Conv2d(3, width, 1), [*blocks], width)

    images = ImageSize(batch, pixels, num_batches=1)
    title = f"{layers} bottlenecks of width {width}, {batch} x {pixels} x {pixels}"
    return Case(title, build, partial(_images, images), classification_loss)


def _llama(size: llama.LlamaSize) -> Case:
    return Case(
        f"{size.layers} blocks of width {size.width}, {size.batch} x {size.context} tokens",
        partial(llama.Llama, size),
        partial(_tokens, size.vocabulary, size.batch, size.context),
        next_token_loss,
    )


def _vit(size: vit.ViTSize) -> Case:
    images = size.images._replace(num_batches=1)
    title = f"{size.layers} blocks of width {size.width}, {images.batch} x {images.pixels} pixels"
    return Case(title, partial(vit.ViT, size), partial(_images, images), classification_loss)


def _resnet(size: resnet.ResNetSize, batch: int, pixels: int) -> Case:
    def build() -> nn.Module:
        """Return the yardstick's, with its bottlenecks in stages, as in most other ResNets."""
        net = resnet.ResNet(size)
        blocks = iter(net.blocks)
        stages = (nn.Sequential(*islice(blocks, depth)) for depth in size.depths)
        net.blocks = nn.Sequential(*stages)
        return net

    images = ImageSize(batch, pixels, num_batches=1)
    title = f"{sum(size.depths)} bottlenecks of four widths, {batch} x {pixels} x {pixels}"
    early, num_stages = len(size.depths) // 2, len(size.depths)
    groups = {
        "stages": ("blocks.*",),
        "early stages": (
            *(f"blocks.{stage}" for stage in range(early)),
            *(f"blocks.{stage}.*" for stage in range(early, num_stages)),
        ),
    }
    return Case(title, build, partial(_images, images), classification_loss, groups)


def _tokens(vocabulary: int, batch: int, length: int) -> Batch:
    made = token_batches(vocabulary=vocabulary, batch=batch, context=length, num_batches=1)
    return made[0]


def _images(size: ImageSize) -> Batch:
    return labelled_batches(size)[0]


CASES: dict[Size, dict[str, Case]] = {
    "full": {
        "GPT-2 small": _gpt(12, 768, 16, 1024),
        "GPT-2 medium": _gpt(24, 1024, 8, 1024),
        "Llama": _llama(
            llama.SIZES["full"]._replace(layers=12, width=1024, hidden=4096, context=2048)
        ),
        "ViT": _vit(vit.SIZES["full"]._replace(images=ImageSize(batch=64, pixels=224))),
        "bottlenecks": _bottlenecks(16, 256, 64, 56),
        "ResNet-50": _resnet(resnet.SIZES["full"], 64, 224),
    },
    "smoke": {
        "GPT-2 small": _gpt(2, 32, 2, 16),
        "GPT-2 medium": _gpt(3, 32, 2, 16),
        "Llama": _llama(llama.SIZES["smoke"]),
        "ViT": _vit(vit.SIZES["smoke"]),
        "bottlenecks": _bottlenecks(2, 16, 2, 8),
        "ResNet-50": _resnet(resnet.SIZES["smoke"]._replace(depths=(2, 2)), 2, 32),
    },
}


def device_batch(case: Case, device: str) -> Batch:
    """Return the batch of a case on a device."""
    return tuple(tensor.to(torch.device(device)) for tensor in case.batch())
