"""A DLRM: a table for each category, and products of all pairs of what they look up."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.workloads.definition import Batch, Size, Workload, num_parameters
from benchmarks.workloads.perceptron import MLP


class DLRMSize(NamedTuple):
    """Tables, layer widths, samples a batch, and the learning rate."""

    tables: int
    rows: int
    width: int
    dense_features: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]
    batch: int
    lr: float


SIZES: dict[Size, DLRMSize] = {
    "full": DLRMSize(
        26, 100_000, 64, 13, bottom=(512, 256), top=(1024, 512, 256), batch=8192, lr=1e-3
    ),
    "smoke": DLRMSize(6, 100, 8, 13, bottom=(64, 32), top=(128, 64), batch=64, lr=1e-2),
}


class DLRM(nn.Module):
    """Embeddings and a bottom network, pairwise dot products, a top network."""

    pairs: Tensor

    def __init__(self, size: DLRMSize) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size.rows, size.width) for _ in range(size.tables))
        for parameter in self.tables.parameters():  # a product of two is then about one
            nn.init.normal_(parameter, std=size.width**-0.25)
        self.bottom = MLP((size.dense_features, *size.bottom, size.width))
        vectors = size.tables + 1
        rows, columns = torch.triu_indices(vectors, vectors, offset=1)
        self.register_buffer("pairs", rows * vectors + columns, persistent=False)
        self.top = MLP((size.width + len(rows), *size.top, 1))

    def forward(self, dense: Tensor, categories: Tensor) -> Tensor:
        """Return the logit of each sample."""
        bottom = self.bottom(dense)
        looked_up = [
            table(rows) for table, rows in zip(self.tables, categories.unbind(1), strict=True)
        ]
        vectors = torch.stack([bottom, *looked_up], dim=1)
        products = (vectors @ vectors.transpose(1, 2)).flatten(1).index_select(1, self.pairs)
        logits: Tensor = self.top(torch.cat([bottom, products], dim=1))
        return logits.squeeze(1)


def make_batches(size: DLRMSize) -> list[Batch]:
    """Return clicks that depend on the dense features and, by a table's first bit, on categories.

    Rows are drawn with a skew, as in real logs: a quarter of the lookups go to a sixteenth of a
    table.
    """
    generator = torch.Generator().manual_seed(0)
    taste = torch.randn(size.dense_features, generator=generator)
    batches: list[Batch] = []
    for _ in range(8):
        dense = torch.randn(size.batch, size.dense_features, generator=generator)
        uniform = torch.rand(size.batch, size.tables, generator=generator)
        categories = (uniform.square() * size.rows).long()
        chance = torch.sigmoid(dense @ taste + (categories % 2).sum(1) - size.tables / 2)
        batches.append((dense, categories, torch.bernoulli(chance, generator=generator)))
    return batches


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean binary cross-entropy."""
    dense, categories, clicked = batch
    return F.binary_cross_entropy_with_logits(model(dense, categories), clicked)


def workload(name: str, size: Size) -> Workload:
    """Return "dlrm"."""
    at = SIZES[size]
    build = partial(DLRM, at)
    return Workload(
        name=name,
        title=f"DLRM {num_parameters(build)} ({at.tables} tables of {at.rows:,} rows), "
        f"batch {at.batch:,}",
        build=build,
        batches=partial(make_batches, at),
        loss_fn=loss_fn,
        unit="samples",
        items_per_step=at.batch,
        lr=at.lr,
    )
