"""A word-level language model of LSTM layers.

Under autocast, whichever dtype it asks for, cuDNN's LSTM computes in fp16; the rest is in bf16.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from torch import Tensor, nn

from benchmarks.workloads.definition import Size, Workload
from benchmarks.workloads.tokens import language_workload


class LSTMSize(NamedTuple):
    """The shape of the model and of its batches."""

    layers: int
    width: int
    vocabulary: int
    batch: int
    context: int


SIZES: dict[Size, LSTMSize] = {
    "full": LSTMSize(layers=2, width=512, vocabulary=10_000, batch=64, context=128),
    "smoke": LSTMSize(layers=2, width=48, vocabulary=64, batch=4, context=16),
}


class LSTMLanguageModel(nn.Module):
    """An embedding, LSTM layers and an output layer."""

    def __init__(self, size: LSTMSize) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocabulary, size.width)
        self.lstm = nn.LSTM(size.width, size.width, size.layers, batch_first=True)
        self.head = nn.Linear(size.width, size.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of shape (batch, length, vocabulary)."""
        x, _ = self.lstm(self.embed(tokens))
        logits: Tensor = self.head(x)
        return logits


def workload(name: str, size: Size) -> Workload:
    """Return "lstm"."""
    at = SIZES[size]
    return language_workload(name, "LSTM", partial(LSTMLanguageModel, at), at, lr=3e-3)
