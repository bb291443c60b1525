"""What a workload is: a model, its data and its loss function, at one size."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, ...]
Size = Literal["full", "smoke"]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One row of the yardstick.

    Attributes:
        name: What the command line calls it.
        title: What tables call it.
        build: Makes the model on the CPU; the caller seeds torch first.
        batches: Makes the host batches, all of the same shapes and the same in every process.
        loss_fn: Returns the scalar loss of a batch that is on the model's device.
        unit: What is counted: "tokens", "images" or "samples".
        items_per_step: How many of them a step takes.
        lr: The learning rate with which AdamW learns within 24 steps.
        regions: The repeated blocks that a person would compile one by one; none: the whole model.
        channels_last: Whether a person would put the model in that memory format.
        loader: Makes an endless loader with worker processes, where the work of loading counts; it
            takes ``pin_memory``, by keyword.
        bound: What a fast loop waits for: the device, the copy to it, or the loader.
        language: Whether batches are tokens and targets, and the model returns logits.
    """

    name: str
    title: str
    build: Callable[[], nn.Module]
    batches: Callable[[], list[Batch]]
    loss_fn: Callable[[nn.Module, Batch], Tensor]
    unit: str
    items_per_step: int
    lr: float = 1e-3
    regions: Callable[[nn.Module], list[nn.Module]] = lambda _: []
    channels_last: bool = False
    loader: Callable[..., Iterable[Batch]] | None = None
    bound: Literal["compute", "transfer", "input"] = "compute"
    language: bool = False


def num_parameters(build: Callable[[], nn.Module]) -> str:
    """Return how many parameters a model has, as "10.8M", without memory for it."""
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in build().parameters())
    return f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.3g}M"


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a model that keeps them in ``model.blocks``."""
    return list(model.get_submodule("blocks").children())
