"""A multi-layer perceptron: launch-bound with a small batch, transfer-bound with a large one."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.workloads.definition import Batch, Size, Workload


class MLPSize(NamedTuple):
    """Layer widths, samples a batch, and batches in host memory."""

    widths: tuple[int, ...]
    batch: int
    num_batches: int = 8


SIZES: dict[tuple[str, Size], MLPSize] = {
    ("mlp", "full"): MLPSize((784, 512, 512, 10), batch=256),
    ("mlp", "smoke"): MLPSize((64, 64, 64, 10), batch=64),
    # 206 MB a batch: the copy to the device outweighs the computation.
    ("mlp-transfer-bound", "full"): MLPSize((784, 512, 512, 10), batch=65_536, num_batches=4),
    ("mlp-transfer-bound", "smoke"): MLPSize((256, 64, 64, 10), batch=512, num_batches=4),
}


class MLP(nn.Module):
    """Linear layers with ReLU between them."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(nn.Linear, widths[:-1], widths[1:]))

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of each sample."""
        *hidden, last = self.layers
        for layer in hidden:
            x = F.relu(layer(x))
        logits: Tensor = last(x)
        return logits


def make_batches(size: MLPSize) -> list[Batch]:
    """Return noise around a mean for each class, and the classes."""
    generator = torch.Generator().manual_seed(0)
    num_features, num_classes = size.widths[0], size.widths[-1]
    # So far apart that classes are learned at once, and so near that the loss does not end at zero.
    means = 5 * F.normalize(torch.randn(num_classes, num_features, generator=generator))
    batches: list[Batch] = []
    for _ in range(size.num_batches):
        labels = torch.randint(num_classes, (size.batch,), generator=generator)
        features = torch.randn(size.batch, num_features, generator=generator)
        batches.append((features.add_(means[labels]), labels))
    return batches


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross-entropy."""
    features, labels = batch
    return F.cross_entropy(model(features), labels)


def workload(name: str, size: Size) -> Workload:
    """Return "mlp" or "mlp-transfer-bound"."""
    at = SIZES[name, size]
    return Workload(
        name=name,
        title=f"MLP {'-'.join(map(str, at.widths))}, batch {at.batch:,}",
        build=partial(MLP, at.widths),
        batches=partial(make_batches, at),
        loss_fn=loss_fn,
        unit="samples",
        items_per_step=at.batch,
        bound="transfer" if name == "mlp-transfer-bound" else "compute",
    )
