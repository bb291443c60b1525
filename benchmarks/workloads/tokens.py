"""What the language models share: made-up text, their loss, and the rest of a workload."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.workloads.definition import Batch, Workload, num_parameters


class LanguageSize(Protocol):
    """What the sizes of all language models have."""

    layers: int
    width: int
    vocabulary: int
    batch: int
    context: int


def language_workload(
    name: str,
    kind: str,
    build: Callable[[], nn.Module],
    at: LanguageSize,
    *,
    details: str = "",
    num_batches: int = 8,
    **others: Any,
) -> Workload:
    """Return the workload of a model that predicts the next token; others are its fields."""
    return Workload(
        name=name,
        title=f"{kind} {num_parameters(build)} ({at.layers} layers, d {at.width}{details}), "
        f"{at.batch}x{at.context} tokens",
        build=build,
        batches=partial(
            token_batches,
            vocabulary=at.vocabulary,
            batch=at.batch,
            context=at.context,
            num_batches=num_batches,
        ),
        loss_fn=next_token_loss,
        unit="tokens",
        items_per_step=at.batch * at.context,
        language=True,
        **others,
    )


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
