"""Made-up text for the language models, and their loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.workloads.definition import Batch


def token_batches(
    *, vocabulary: int, batch: int, context: int, num_batches: int = 8
) -> list[Batch]:
    """Return batches of tokens and of targets, which are the tokens one further on.

    Frequencies follow Zipf's law, which a model learns within a few steps; half of the tokens
    follow from the token before them, which takes longer.
    """
    generator = torch.Generator().manual_seed(0)
    frequencies = 1 / torch.arange(1, vocabulary + 1, dtype=torch.float64)

    def draw(count: int) -> Tensor:
        return torch.multinomial(frequencies, count, replacement=True, generator=generator)

    successor = draw(vocabulary)
    shape = (context + 1, num_batches * batch)
    text = draw(shape[0] * shape[1]).view(shape)
    follows = torch.rand(shape, generator=generator) < 0.5
    for now in range(1, len(text)):
        text[now] = torch.where(follows[now], successor[text[now - 1]], text[now])
    return [(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in text.t().split(batch)]


def next_token_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross-entropy of the next token."""
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
