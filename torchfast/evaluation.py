"""A model's mean loss and metrics over batches, without leaving a trace in its training.

Of many ranks each evaluates its part of the batches. What ``loss_fn`` returned for each batch is
brought together on all ranks and added up in the order of the batches, so that all have the same
mean to the bit, and decide alike by it. What they evaluate is what is saved: with the buffers of
the first rank, for training leaves others on each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from torchfast._core.arguments import check_batches, check_flag
from torchfast._core.errors import EmptyEpochError
from torchfast._core.generators import put_back
from torchfast._core.loss import LossParts, Number
from torchfast._core.modes import preserved_modes, put_into_eval
from torchfast._core.reading import Reading
from torchfast._core.rng import RNGState, get_rng_state, preserved_rng, set_rng_state
from torchfast._core.rounds import Rounds
from torchfast.data import PrefetchingLoader
from torchfast.data.own_generators import every_generator
from torchfast.data.whole_batches import DealtBatches
from torchfast.step import TrainStep

_CPU: Final = torch.device("cpu")


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

    Those of the training model too, where ``model`` is its average, and of modules that the loss
    function uses beside it.
    """
    beside = step.state.beside
    generators = beside.generators_of(model)
    with (
        preserved_modes(step.model, model, *beside.modules()),
        put_back(generators),
        preserved_rng(step.device),
    ):
        yield


def deal_out(step: TrainStep, batches: Iterable[Any]) -> Iterable[Any] | DealtBatches:
    """Return this rank's part of what all ranks evaluate, for any number of evaluations.

    A `PrefetchingLoader` is taken as it is, and so is what is divided already.

    Raises:
        TypeError: Not an iterable of batches.
        ValueError: It is divided for another number of ranks.
    """
    ranks = step.ranks
    if not ranks.are_many or isinstance(batches, PrefetchingLoader):
        return batches
    check_batches("loader", batches)
    return DealtBatches(batches, ranks.rank, ranks.world_size)


def evaluate(
    step: TrainStep,
    batches: Iterable[Any] | DealtBatches,
    should_stop: Callable[[], bool] = lambda: False,
    *,
    ema: bool = False,
) -> dict[str, float]:
    """Return mean loss and metrics over ``batches``: see ``Trainer.evaluate``.

    Raises:
        ValueError: ``ema``, and no average is kept; the ranks were given different batches.
        TypeError: ``loss_fn`` returned weights for some batches only.
        EmptyEpochError: No batch.
        EvaluationCutError: ``should_stop`` said so; half a data set is no evaluation.
        RankError: Another rank failed.
    """
    with step.sharding.heard():
        return _over_ranks(step, batches, should_stop, ema=ema)


def _over_ranks(
    step: TrainStep,
    batches: Iterable[Any] | DealtBatches,
    should_stop: Callable[[], bool],
    *,
    ema: bool,
) -> dict[str, float]:
    group = step.ranks.group
    model: nn.Module = step.model
    mine: Iterable[Any] | DealtBatches = batches

    def begin() -> RNGState | None:
        nonlocal model, mine
        model = evaluated_model(step, ema=check_flag("ema", ema))
        mine = batches if isinstance(batches, DealtBatches) else deal_out(step, batches)
        return get_rng_state(_CPU) if group.is_first and group.size > 1 else None

    # A loader draws what it draws on the first rank, so that all deal out the same order.
    drawn = group.together(begin, "evaluate, as fit and Trainer.evaluate do")[0]

    step.sharding.send_buffers(step.model, model)

    def work(rounds: Rounds | None = None) -> _Part:
        return _evaluated(step, model, mine, should_stop, drawn, rounds)

    if fails_together(step, mine):
        return _means(group.together(work))
    with Rounds(group) as rounds:
        part = work(rounds)
        rounds.end()
    return _means(group.gather(part))


def fails_together(step: TrainStep, batches: object) -> bool:
    """Whether a rank whose evaluation fails waits for the others, so that it fails on all of them.

    It cannot where they meet within: in the forward of a sharded model, or in whatever a callable
    does. There it tells them, and they hear of it if they come so far.
    """
    return not (callable(batches) or step.sharding.is_sharded)


class _Row(NamedTuple):
    """What ``loss_fn`` returned for a batch, on the host."""

    loss: float
    metrics: dict[str, float]
    weight: float | None


class _Part(NamedTuple):
    """What a rank has evaluated; ``told`` is that of `DealtBatches`, None if it dealt nothing."""

    rows: list[_Row]
    told: tuple[int, str] | None


def _evaluated(
    step: TrainStep,
    model: nn.Module,
    batches: Iterable[Any] | DealtBatches,
    should_stop: Callable[[], bool],
    drawn: RNGState | None,
    rounds: Rounds | None,
) -> _Part:
    """Evaluate this rank's batches, in rounds with the other ranks where there are any."""
    if isinstance(batches, PrefetchingLoader):
        loader = batches.ungrouped()  # one loss a batch, not one a group
        source: Any = batches.loader
    else:
        source = batches.loader if isinstance(batches, DealtBatches) else batches
        loader = PrefetchingLoader(
            source, step.device, reuse=True, channels_last=step.channels_last
        )
    dealt = batches if isinstance(batches, DealtBatches) and batches.is_dealt else None
    parts: list[LossParts] = []
    # Behind the loader, which draws ahead until it is closed.
    with undisturbed(step, model), put_back(every_generator(source)), torch.no_grad(), loader:
        if dealt is not None and drawn is not None:
            set_rng_state(drawn, _CPU)
        # The training model too: a loss that uses it all the same must not train its BatchNorm.
        put_into_eval(step.model, model, *step.state.beside.modules())
        for batch, counts in _each(loader, rounds):
            if should_stop():
                raise EvaluationCutError
            loss, metrics, weight = step.compute_loss(batch, model)
            if counts:
                parts.append(LossParts(loss.detach(), metrics, weight))
    if dealt is None:
        return _Part(_read(parts, step.device), None)
    if dealt.ends_with_stand_in:
        parts.pop()
    return _Part(_read(parts, step.device), dealt.told())


def _each(batches: Iterable[Any], rounds: Rounds | None) -> Iterator[tuple[Any, bool]]:
    return ((batch, True) for batch in batches) if rounds is None else rounds.even(batches)


def _read(parts: list[LossParts], device: torch.device) -> list[_Row]:
    """Bring them to the host, all at once, after the last batch is enqueued."""
    values: dict[str, Number] = {}
    for index, part in enumerate(parts):
        values[f"{index} loss"] = part.loss
        if part.weight is not None:
            values[f"{index} weight"] = part.weight
        values |= {f"{index} metric {name}": value for name, value in part.metrics.items()}
    host = Reading(values, device).read()
    return [
        _Row(
            host[f"{index} loss"],
            {name: host[f"{index} metric {name}"] for name in part.metrics},
            host.get(f"{index} weight"),
        )
        for index, part in enumerate(parts)
    ]


def _means(of_ranks: list[_Part]) -> dict[str, float]:
    """Return the means over the batches of all ranks, added up in double and in their order."""
    told = [part.told for part in of_ranks]
    if any(each != told[0] for each in told):
        counts = ", ".join("its own" if each is None else str(each[0]) for each in told)
        raise ValueError(
            f"the ranks were given different batches to evaluate (by rank: {counts}), of which "
            "each takes its part; give all ranks the same, in the same order, or say is_sharded "
            "= True on what holds a rank's own"
        )
    rounds = zip_longest(*(part.rows for part in of_ranks))
    rows = [row for each in rounds for row in each if row is not None]
    if not rows:
        raise EmptyEpochError("evaluation got no batch; its loader is empty or used up")
    if len({row.weight is None for row in rows}) > 1:
        raise TypeError(
            "loss_fn returned a weight for some batches only; return one always or never"
        )
    weights = [1.0 if row.weight is None else row.weight for row in rows]
    means: dict[str, float] = {}
    for name in dict.fromkeys(name for row in rows for name in row.metrics):
        held = [i for i, row in enumerate(rows) if name in row.metrics]
        weighted = sum(rows[i].metrics[name] * weights[i] for i in held)
        means[name] = _ratio(weighted, sum(weights[i] for i in held))
    # With weights a loss is a sum over its items already.
    means["loss"] = _ratio(sum(row.loss for row in rows), sum(weights))
    return means


def _ratio(total: float, weight: float) -> float:
    return total / weight if weight else math.nan
