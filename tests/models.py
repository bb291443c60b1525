"""Models, batches and loss functions that the tests share; torch alone."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Pair = namedtuple("Pair", ["inputs", "targets"])


@dataclass(frozen=True)
class Sample:
    inputs: Tensor
    targets: Tensor


class DropoutNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class BatchNormNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.conv(x.view(-1, 1, 2, 4)))).flatten(1))


class TiedNet(nn.Module):
    """The output layer is the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 4, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        ids = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()
        return self.head(torch.tanh(self.mix(self.embedding(ids) + x)))


class FrozenNet(nn.Module):
    """Its first layer does not train, and stands in no optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16).requires_grad_(False)
        self.second = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


MODELS = {
    "dropout": DropoutNet,
    "batchnorm": BatchNormNet,
    "tied": TiedNet,
    "frozen": FrozenNet,
}


def tuple_batch(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return inputs, targets


def dict_batch(inputs: Tensor, targets: Tensor) -> dict[str, object]:
    return {"inputs": inputs, "targets": targets, "names": ["a", "b"]}


BATCHES = {"tuple": tuple_batch, "dict": dict_batch, "namedtuple": Pair, "dataclass": Sample}


def split(batch: object) -> tuple[Tensor, Tensor]:
    if isinstance(batch, dict):
        return batch["inputs"], batch["targets"]
    if isinstance(batch, tuple):
        return batch[0], batch[1]
    return batch.inputs, batch.targets


def mean_loss(model: nn.Module, batch: object) -> Tensor:
    inputs, targets = split(batch)
    return F.cross_entropy(model(inputs), targets)


def loss_and_metrics(model: nn.Module, batch: object) -> tuple[Tensor, dict[str, Tensor]]:
    inputs, targets = split(batch)
    logits = model(inputs)
    return F.cross_entropy(logits, targets), {
        "accuracy": (logits.argmax(1) == targets).float().mean()
    }


def weighted_loss(model: nn.Module, batch: object) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    inputs, targets = split(batch)
    logits = model(inputs)
    weight = torch.full((), float(len(targets)), device=logits.device)
    return F.cross_entropy(logits, targets, reduction="sum"), {}, weight


def counted_loss(model: nn.Module, batch: object) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """A sum over the targets that are not masked, with their number, an integer, as weight."""
    inputs, targets = split(batch)
    masked = targets.masked_fill(targets == 3, -100)
    loss = F.cross_entropy(model(inputs), masked, reduction="sum")
    return loss, {}, (masked != -100).sum()


LOSSES = {
    "mean": mean_loss,
    "metrics": loss_and_metrics,
    "weighted": weighted_loss,
    "counted": counted_loss,
}


def make_batches(
    count: int, *, kind: str = "tuple", size: int = 6, ragged: bool = False, seed: int = 0
) -> list[object]:
    generator = torch.Generator().manual_seed(seed)
    sizes = [max(2, size - (index % 3 if ragged else 0)) for index in range(count)]
    return [
        BATCHES[kind](
            torch.randn(n, 8, generator=generator), torch.randint(4, (n,), generator=generator)
        )
        for n in sizes
    ]
