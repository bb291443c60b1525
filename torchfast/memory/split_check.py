"""Whether the loss of a batch is made of those of its parts, as a step in parts takes for granted.

A mean over samples is, weighted by their shares; so is a sum with its weight. The plain sum of a
``reduction="sum"``, a mean over the tokens that are not padding, or a loss that compares samples
with each other is not, and nothing that a step in parts computes would tell. So before the first
one some samples are run as a whole and in parts of several sizes, without gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from torchfast._core.batches import count_samples
from torchfast._core.loss import LossParts
from torchfast._core.modes import preserved_modes
from torchfast._core.ran_out import OtherRankRanOut
from torchfast._core.rng import get_rng_state, same_rng_state
from torchfast.memory.before_step import BeforeStep
from torchfast.memory.splitting import samples_of, split_at

MOST_SAMPLES = 8
# Where the parts begin. Of one size, they would hide that samples have other numbers of tokens.
_PLACES = (1, 3)
# Other shapes may round bf16 otherwise; what is added up wrongly is off by more.
_CLOSE = 1e-2


class Verdict(NamedTuple):
    """What was found.

    Attributes:
        why_not: Why the parts do not make the whole; None if they do, or if nobody can tell.
        why_unknown: Why nobody can tell; None if somebody can.
    """

    why_not: str | None = None
    why_unknown: str | None = None


def num_tried(num: int) -> int:
    """Return how many samples are taken of a batch of so many."""
    return min(MOST_SAMPLES, max(2, (num + 1) // 2))


def check_split(
    loss_of: Callable[[Any], LossParts],
    batch: Any,
    model: nn.Module,
    device: torch.device,
    *,
    size: int | None = None,
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Verdict:
    """Return whether parts of the first samples of a batch make what these make together.

    Args:
        loss_of: Runs the loss function on a batch.
        batch: One that can be split.
        model: In eval mode meanwhile, for the masks of dropout differ; its buffers, and the random
            generators, are put back.
        device: Where it runs.
        size: How many samples to take; None takes as many as `num_tried` says.
        around: Returns the context of the forwards, of which ranks run as many as each other; one
            that runs fewer has to leave it by an error.

    Synchronizes: Yes.
    """
    if size is None:
        size = num_tried(count_samples(batch) or 1)
    some = samples_of(batch, 0, size)
    before = BeforeStep(model, device)
    drawn_from = get_rng_state(device)
    try:
        with torch.no_grad(), preserved_modes(model), around():
            model.eval()
            whole = loss_of(some)
            if not same_rng_state(drawn_from, get_rng_state(device)):
                raise _Draws
            parts = split_at(some, [place for place in _PLACES if place < size])
            together = parts.merge([_shared(loss_of(part), share) for part, share in parts])
        return _compared(whole, together)
    except _Draws:
        return Verdict(why_unknown="it draws random numbers")
    except OtherRankRanOut:
        return Verdict(why_unknown="another rank could not run it")
    except Exception as error:  # a model may have no loss in eval mode, or still not fit
        return Verdict(why_unknown=f"in eval mode it raises {type(error).__name__}")
    finally:
        before.put_back()


class _Draws(Exception):  # noqa: N818
    """Says so to whoever is around."""


def _shared(parts: LossParts, share: float) -> LossParts:
    return parts if parts.weight is not None else parts._replace(loss=parts.loss * share)


def _compared(whole: LossParts, together: LossParts) -> Verdict:
    for name, a, b in (
        ("loss", whole.loss, together.loss),
        ("weight", whole.weight, together.weight),
    ):
        if a is None or b is None:
            continue
        a, b = float(a), float(b)
        if not abs(a - b) <= _CLOSE * max(abs(a), abs(b)):
            return Verdict(
                why_not=f"the {name} of some samples is {a:.6g}, and their parts make {b:.6g}; "
                "the loss function returns neither a mean over samples nor (sum, metrics, weight)"
            )
    return Verdict()
