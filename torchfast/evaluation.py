"""A model's mean loss and metrics over batches, without leaving a trace in its training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from torchfast._core.errors import EmptyEpochError
from torchfast._core.loss import LossParts, Number
from torchfast._core.reading import Reading
from torchfast._core.rng import preserved_rng
from torchfast.data import PrefetchingLoader
from torchfast.step import TrainStep


class EvaluationCutError(Exception):
    """An evaluation was told to stop before its end."""


@contextmanager
def undisturbed(step: TrainStep) -> Iterator[None]:
    """Put every module's mode and every random generator back, whatever the body does."""
    modes = [(module, module.training) for module in step.model.modules()]
    try:
        with preserved_rng(step.device):
            yield
    finally:
        for module, training in modes:
            module.training = training


def evaluate(
    step: TrainStep, batches: Iterable[Any], should_stop: Callable[[], bool] = lambda: False
) -> dict[str, float]:
    """Return mean loss and metrics over ``batches``: see ``Trainer.evaluate``.

    Raises:
        EmptyEpochError: No batch.
        EvaluationCutError: ``should_stop`` said so; half a data set is no evaluation.
    """
    if isinstance(batches, PrefetchingLoader):
        loader = batches.ungrouped()  # one loss a batch, not one a group
    else:
        loader = PrefetchingLoader(
            batches, step.device, reuse=True, channels_last=step.channels_last
        )
    parts: list[LossParts] = []
    with undisturbed(step), torch.no_grad(), loader:
        step.model.eval()
        for batch in loader:
            if should_stop():
                raise EvaluationCutError
            loss, metrics, weight = step.compute_loss(batch)
            parts.append(LossParts(loss.detach(), metrics, weight))
    if len({part.weight is None for part in parts}) > 1:
        raise TypeError(
            "loss_fn returned a weight for some batches only; return one always or never"
        )
    if not parts:
        raise EmptyEpochError("evaluation got no batch; its loader is empty or used up")
    return _means(parts, step.device)


def _means(parts: list[LossParts], device: torch.device) -> dict[str, float]:
    """Average on the host, in double: read all at once, after the last batch is enqueued."""
    values: dict[str, Number] = {}
    for index, part in enumerate(parts):
        values[f"{index} loss"] = part.loss
        values[f"{index} weight"] = 1.0 if part.weight is None else part.weight
        values |= {f"{index} metric {name}": value for name, value in part.metrics.items()}
    host = Reading(values, device).read()
    weights = [host[f"{index} weight"] for index in range(len(parts))]
    total = sum(weights)
    means: dict[str, float] = {}
    for name in dict.fromkeys(name for part in parts for name in part.metrics):
        held = [i for i in range(len(parts)) if f"{i} metric {name}" in host]
        weight = sum(weights[i] for i in held)
        weighted = sum(host[f"{i} metric {name}"] * weights[i] for i in held)
        means[name] = weighted / weight if weight else math.nan
    losses = sum(host[f"{index} loss"] for index in range(len(parts)))
    return {**means, "loss": losses / total if total else math.nan}
