"""A word-level language model of LSTM layers.

Under autocast, whichever dtype it asks for, cuDNN's LSTM computes in fp16; the rest is in bf16.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from torch import Tensor, nn

from benchmarks.workloads.definition import Size, Workload, num_parameters
from benchmarks.workloads.tokens import next_token_loss, token_batches


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
    build = partial(LSTMLanguageModel, at)
    return Workload(
        name=name,
        title=f"LSTM {num_parameters(build)} ({at.layers} layers, d {at.width}), "
        f"{at.batch}x{at.context} tokens",
        build=build,
        batches=partial(
            token_batches, vocabulary=at.vocabulary, batch=at.batch, context=at.context
        ),
        loss_fn=next_token_loss,
        unit="tokens",
        items_per_step=at.batch * at.context,
        lr=3e-3,
        language=True,
    )
