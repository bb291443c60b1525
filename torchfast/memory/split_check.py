"""Whether a batch's gradient is made of those of its parts, as a step in parts takes for granted.

A mean over samples is, weighted by their shares; so is a sum with its weight. The plain sum of a
``reduction="sum"``, a mean over the tokens that are not padding, a loss that compares samples with
each other, or a batch whose first dimension is time is not, and nothing that a step in parts
computes would tell. So before it some samples, as unlike as the batch has, are run as a whole and
in parts of several sizes.

Their gradients are compared. Losses would not do: a fresh model has about the same for each token,
and whatever weights are given to equal numbers, their mean is the same. Shards alone are compared
by their losses, more closely, since a backward would have to meet those of other ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from torchfast._core.batches import count_samples
from torchfast._core.local import local
from torchfast._core.loss import LossParts, Number
from torchfast._core.modes import preserved_modes
from torchfast._core.ran_out import OtherRankRanOut
from torchfast._core.rng import get_rng_state, same_rng_state
from torchfast.memory.before_step import BeforeStep
from torchfast.memory.split_samples import SLIGHT, counts_in, samples_at, unevenness, unlike
from torchfast.memory.splitting import split_at

MOST_SAMPLES = 8
# Where the parts begin. Of one size, they would hide that samples have other numbers of tokens.
_PLACES = (1, 3)
# Other shapes may round bf16 otherwise; what is added up wrongly is off by more.
_CLOSE_LOSS: Final = 1e-2
_CLOSE_LOSS_OF_SHARDS: Final = 2e-3
_CLOSE_GRADIENT: Final = 2e-2
# The scale of a tensor in float8 is that of all its samples, so each part rounds otherwise.
_CLOSE_GRADIENT_OF_FLOAT8: Final = 0.15
# Two gradients of the model are there at once, where the step has one; so not of all of it.
_MOST_ELEMENTS: Final = 2**25
_SCALE: Final = 1024.0  # fp16 has no small gradients


class Verdict(NamedTuple):
    """What was found.

    Attributes:
        why_not: Why the parts do not make the whole; None if they do, or if nobody can tell.
        why_unknown: Why nobody can tell; None if somebody can.
        is_kept: Whether it holds for other batches whose samples are no more unlike.
        other_metrics: Metrics of which the mean over the parts is not that of the whole.
    """

    why_not: str | None = None
    why_unknown: str | None = None
    is_kept: bool = True
    other_metrics: tuple[str, ...] = ()


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
    in_float8: bool = False,
    used: Callable[[], Iterable[Any]] = tuple,
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Verdict:
    """Return whether parts of some samples of a batch make what these make together.

    Args:
        loss_of: Runs the loss function on a batch.
        batch: One that can be split.
        model: In eval mode meanwhile, for the masks of dropout differ; its buffers, and the random
            generators, are put back. Its ``.grad`` are not touched.
        device: Where it runs.
        size: How many samples to take; None takes as many as `num_tried` says, or half or a quarter
            of them, where these do not fit.
        in_float8: Whether layers of the model compute in it.
        used: Returns what the loss function uses, see `BeforeStep`.
        around: Returns the context of the forwards, of which ranks with shards run as many as each
            other; one that runs fewer has to leave it by an error.

    Synchronizes: Yes.
    """
    before = BeforeStep(model, device, used)
    num = num_tried(count_samples(batch) or 1)
    sizes = [size] if size is not None else sorted({max(2, num >> k) for k in range(3)})[::-1]
    try:
        with _evaluating(model), around():
            close = _CLOSE_GRADIENT_OF_FLOAT8 if in_float8 else _CLOSE_GRADIENT
            for tried in sizes[:-1]:
                with suppress(torch.OutOfMemoryError):  # as a step has before
                    return _checked(loss_of, batch, model, device, tried, close)
                before.put_back()
            return _checked(loss_of, batch, model, device, sizes[-1], close)
    except OtherRankRanOut:
        return Verdict(why_unknown="another rank could not run it")
    except torch.OutOfMemoryError:
        return Verdict(why_unknown=f"{sizes[-1]} samples do not fit", is_kept=False)
    except _Draws:
        return Verdict(why_unknown="it draws random numbers")
    except Exception as error:  # a model may have no loss in eval mode
        return Verdict(why_unknown=f"in eval mode it raises {type(error).__name__}")
    finally:
        before.put_back()


def _checked(
    loss_of: Callable[[Any], LossParts],
    batch: Any,
    model: nn.Module,
    device: torch.device,
    size: int,
    close_gradient: float,
) -> Verdict:
    counts = counts_in(batch, count_samples(batch) or 1)
    some = samples_at(batch, unlike(counts, size))
    trained = [p for p in model.parameters() if p.requires_grad]
    is_sharded = any(local(p) is not p for p in trained)
    tried = _Tried(loss_of, [] if is_sharded else _few(trained))

    drawn_from = get_rng_state(device)
    whole, gradient = tried.run(some)
    if not same_rng_state(drawn_from, get_rng_state(device)):
        raise _Draws
    if not math.isfinite(whole.loss) or not all(map(_is_finite, gradient)):
        return Verdict(why_unknown="some samples give a loss that is not finite", is_kept=False)
    if tried.differentiates and not any(map(_is_any, gradient)):
        # As of a loss over the pairs that are active, where none is: parts of nothing are nothing.
        return Verdict(why_unknown="some samples give no gradient at all", is_kept=False)
    split = split_at(some, [place for place in _PLACES if place < size])
    difference, scale, found = gradient, 0.0, []
    for part, share in split:
        made, of_part = tried.run(part, share=share, weight=whole.weight)
        difference = [a - b for a, b in zip(difference, of_part, strict=True)]
        scale += _norm(of_part)
        found.append(made)
    close_loss = _CLOSE_LOSS_OF_SHARDS if is_sharded else _CLOSE_LOSS
    if (why := _why_other_loss(whole, found, split.shares, close_loss)) is not None:
        return Verdict(why_not=why)
    if gradient and not (off := _norm(difference)) <= close_gradient * scale:
        again = [a - b for a, b in zip(gradient, tried.run(some)[1], strict=True)]
        if not _norm(again) <= 0.5 * off:
            return Verdict(why_unknown="its gradient is another one each time")
        apart = off / scale if scale else math.inf
        return Verdict(
            why_not=f"the gradient of some samples and that of their parts are {apart:.1%} "
            "apart; the loss function returns neither a mean over samples nor "
            "(sum, metrics, weight), or dimension 0 of the batch is not that of samples"
        )
    if is_sharded and whole.weight is None and any(share > SLIGHT for share in unevenness(counts)):
        return Verdict(
            why_unknown="gradients of shards are not compared, and the samples are not alike"
        )
    return Verdict(other_metrics=_other_metrics(whole, found, split.shares, close_loss))


class _Draws(Exception):  # noqa: N818
    """Says so to whoever is around."""


class _Made(NamedTuple):
    loss: float
    weight: float | None
    metrics: dict[str, float]


class _Tried:
    """Runs samples, and returns their loss, weight and gradient.

    Args:
        loss_of: Runs the loss function on a batch.
        parameters: Whose gradients; of none, there is no backward.
    """

    def __init__(self, loss_of: Callable[[Any], LossParts], parameters: list[nn.Parameter]) -> None:
        self._loss_of, self._parameters = loss_of, parameters
        self.differentiates = bool(parameters)

    def run(
        self, batch: Any, *, share: float = 1.0, weight: float | None = None
    ) -> tuple[_Made, list[Tensor]]:
        """Run a part of samples that have this weight together; None takes that of the part."""
        with torch.set_grad_enabled(bool(self._parameters)):
            loss, metrics, own = self._loss_of(batch)
            made = _Made(
                float(loss.detach()),
                None if own is None else _number(own),
                {name: _number(value) for name, value in metrics.items()},
            )
            if not self._parameters or not loss.requires_grad:
                return made, []
            by = share if made.weight is None else 1.0 / (weight or made.weight or 1.0)
            gradient = torch.autograd.grad(
                loss * (_SCALE * by), self._parameters, materialize_grads=True
            )
        return made, [g.to_dense() if g.layout is not torch.strided else g for g in gradient]


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode, but for recurrent layers, of which cuDNN has no backward then."""
    recurrent = [m for m in model.modules() if isinstance(m, nn.RNNBase)]
    rates = [m.dropout for m in recurrent]
    with preserved_modes(model):
        model.eval()
        try:
            for module in recurrent:
                module.training, module.dropout = True, 0.0
            yield
        finally:
            for module, rate in zip(recurrent, rates, strict=True):
                module.dropout = rate


def _few(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    """Return the smallest ones, which are all over a model, as far as there is room."""
    chosen: list[nn.Parameter] = []
    left = _MOST_ELEMENTS
    for parameter in sorted(parameters, key=Tensor.numel):
        left -= parameter.numel()
        if left < 0 and chosen:
            break
        chosen.append(parameter)
    return chosen


def _why_other_loss(
    whole: _Made, parts: Sequence[_Made], shares: Sequence[float], close: float
) -> str | None:
    losses = [
        part.loss if part.weight is not None else part.loss * share
        for part, share in zip(parts, shares, strict=True)
    ]
    pairs = [("loss", whole.loss, losses)]
    if whole.weight is not None:
        pairs.append(("weight", whole.weight, [part.weight or 0.0 for part in parts]))
    for name, of_whole, of_parts in pairs:
        together = sum(of_parts)
        # Losses of both signs may cancel, and what is left is rounding.
        if not abs(of_whole - together) <= close * max(abs(of_whole), sum(map(abs, of_parts))):
            return (
                f"the {name} of some samples is {of_whole:.6g}, and their parts make "
                f"{together:.6g}; the loss function returns neither a mean over samples nor "
                "(sum, metrics, weight)"
            )
    return None


def _other_metrics(
    whole: _Made, parts: Sequence[_Made], shares: Sequence[float], close: float
) -> tuple[str, ...]:
    """Return those that a step in parts, which averages them, gives another value."""
    weights = [s if p.weight is None else p.weight for p, s in zip(parts, shares, strict=True)]
    other = []
    for name, value in whole.metrics.items():
        pairs = [
            (p.metrics[name], w) for p, w in zip(parts, weights, strict=True) if name in p.metrics
        ]
        weight = sum(w for _, w in pairs)
        mean = sum(v * w for v, w in pairs) / weight if weight else math.nan
        most = max((abs(v) for v in (value, *(v for v, _ in pairs))), default=0.0)
        if math.isfinite(value) and not abs(value - mean) <= close * most:
            other.append(name)
    return tuple(other)


def _number(value: Number) -> float:
    return float(value.detach() if isinstance(value, Tensor) else value)


def _is_finite(tensor: Tensor) -> bool:
    return math.isfinite(float(torch.linalg.vector_norm(tensor)))


def _is_any(tensor: Tensor) -> bool:
    return bool(tensor.any())


def _norm(tensors: Sequence[Tensor]) -> float:
    return math.hypot(*(float(torch.linalg.vector_norm(tensor)) for tensor in tensors))
