"""A model's mean loss and metrics over batches, without leaving a trace in its training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from torchfast._core.arguments import check_flag
from torchfast._core.errors import EmptyEpochError
from torchfast._core.loss import LossParts, Number
from torchfast._core.reading import Reading
from torchfast._core.rng import preserved_rng
from torchfast.data import PrefetchingLoader
from torchfast.step import TrainStep


class EvaluationCutError(Exception):
    """An evaluation was told to stop before its end."""


def evaluated_model(step: TrainStep, *, ema: bool) -> nn.Module:
    """Return the model whose weights are evaluated.

    Raises:
        ValueError: The average of the weights, and there is none.
    """
    if not ema:
        return step.model
    averaged = step.ema_model
    if averaged is None:
        raise ValueError(
            "ema=True (in fit evaluate_ema=True) evaluates averaged weights, and this trainer "
            "averages none; build it with Trainer(..., ema=0.999), or leave it out"
        )
    return averaged


@contextmanager
def undisturbed(step: TrainStep, model: nn.Module) -> Iterator[None]:
    """Put every module's mode and every random generator back, whatever the body does.

    Those of the training model too, where ``model`` is its average.
    """
    models = (step.model, model)
    modes = [(module, module.training) for root in models for module in root.modules()]
    try:
        with preserved_rng(step.device):
            yield
    finally:
        for module, training in modes:
            module.training = training


def evaluate(
    step: TrainStep,
    batches: Iterable[Any],
    should_stop: Callable[[], bool] = lambda: False,
    *,
    ema: bool = False,
) -> dict[str, float]:
    """Return mean loss and metrics over ``batches``: see ``Trainer.evaluate``.

    Raises:
        ValueError: ``ema``, and no average is kept.
        EmptyEpochError: No batch.
        EvaluationCutError: ``should_stop`` said so; half a data set is no evaluation.
    """
    model = evaluated_model(step, ema=check_flag("ema", ema))
    if isinstance(batches, PrefetchingLoader):
        loader = batches.ungrouped()  # one loss a batch, not one a group
    else:
        loader = PrefetchingLoader(
            batches, step.device, reuse=True, channels_last=step.channels_last
        )

    def work() -> Sums:
        return _sums(_parts(step, model, loader, should_stop), step.device)

    group = step.ranks.group
    return _means(group.together(work) if fails_together(step, batches) else group.gather(work()))


def fails_together(step: TrainStep, batches: object) -> bool:
    """Whether a rank whose evaluation fails tells the others, so that it fails on all of them.

    It cannot where they meet within: in the forward of a sharded model, in a loader of all ranks,
    or in whatever a callable does.
    """
    return not (callable(batches) or step.is_sharded or isinstance(batches, PrefetchingLoader))


def _parts(
    step: TrainStep,
    model: nn.Module,
    loader: PrefetchingLoader,
    should_stop: Callable[[], bool],
) -> list[LossParts]:
    """Return what ``loss_fn`` returns for each batch."""
    parts: list[LossParts] = []
    with undisturbed(step, model), torch.no_grad(), loader:
        step.model.eval()  # a loss that uses it all the same must not train its BatchNorm
        model.eval()
        for batch in loader:
            if should_stop():
                raise EvaluationCutError
            loss, metrics, weight = step.compute_loss(batch, model)
            parts.append(LossParts(loss.detach(), metrics, weight))
    if len({part.weight is None for part in parts}) > 1:
        raise TypeError(
            "loss_fn returned a weight for some batches only; return one always or never"
        )
    if not parts:
        raise EmptyEpochError("evaluation got no batch; its loader is empty or used up")
    return parts


# The sum of a quantity over batches, each times its weight, and the sum of the weights.
Sums = dict[str, tuple[float, float]]


def _sums(parts: list[LossParts], device: torch.device) -> Sums:
    """Add up on the host, in double: read all at once, after the last batch is enqueued."""
    values: dict[str, Number] = {}
    for index, part in enumerate(parts):
        values[f"{index} loss"] = part.loss
        values[f"{index} weight"] = 1.0 if part.weight is None else part.weight
        values |= {f"{index} metric {name}": value for name, value in part.metrics.items()}
    host = Reading(values, device).read()
    weights = [host[f"{index} weight"] for index in range(len(parts))]
    sums: Sums = {}
    for name in dict.fromkeys(name for part in parts for name in part.metrics):
        held = [i for i in range(len(parts)) if f"{i} metric {name}" in host]
        weighted = sum(host[f"{i} metric {name}"] * weights[i] for i in held)
        sums[f"metric {name}"] = weighted, sum(weights[i] for i in held)
    # With weights a loss is a sum over its items already.
    losses = sum(host[f"{index} loss"] for index in range(len(parts)))
    return {**sums, "loss": (losses, sum(weights))}


def _means(of_ranks: list[Sums]) -> dict[str, float]:
    """Divide what all ranks have added up."""
    means: dict[str, float] = {}
    for name in dict.fromkeys(name for sums in of_ranks for name in sums):
        found = [sums[name] for sums in of_ranks if name in sums]
        weight = sum(weight for _, weight in found)
        total = sum(total for total, _ in found)
        means[name.removeprefix("metric ")] = total / weight if weight else math.nan
    return means
