"""What a loss function may return, brought to one form."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from types import FunctionType, MethodType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from torchfast._core.arguments import check_callable
from torchfast._core.errors import LossError

Number = Tensor | float | int


def check_loss_fn(loss_fn: object) -> None:
    """Raise unless it can be called with a model and a batch.

    Raises:
        TypeError: It is no function, or one of torch's, which take outputs and targets.
    """
    check_callable("loss_fn", loss_fn, "loss_fn(model, batch)")
    of = type(loss_fn) if isinstance(loss_fn, nn.Module) else loss_fn
    module = str(getattr(of, "__module__", ""))
    if module in ("torch.nn.modules.loss", "torch.nn.functional"):
        name = getattr(of, "__name__", "it")
        raise TypeError(
            f"loss_fn is called as loss_fn(model, batch), and torch's {name} takes outputs and "
            "targets; write a function that calls the model too, such as "
            "lambda model, batch: criterion(model(batch[0]), batch[1])"
        )
    if not isinstance(loss_fn, FunctionType | MethodType | functools.partial):
        return  # what else is called says no more than that it takes anything, or something untrue
    try:
        # Not of what a decorator wraps, which may unpack the batch for it.
        signature = inspect.signature(cast(Callable[..., Any], loss_fn), follow_wrapped=False)
    except (TypeError, ValueError):  # of a partial of what is not written in Python
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
        raise TypeError(
            f"loss_fn is called as loss_fn(model, batch), and {name}{signature} cannot be "
            f"({error}); let it take the model and the whole batch, and give the rest by "
            "functools.partial"
        ) from None


class LossParts(NamedTuple):
    """One micro-batch's loss, metrics and weight.

    Attributes:
        loss: Shape ``()``, attached to the graph.
        metrics: Detached scalars by name.
        weight: How many items ``loss`` sums over, or None where it is a mean already.
    """

    loss: Tensor
    metrics: dict[str, Number]
    weight: Number | None


class StepOutput(NamedTuple):
    """What a step leaves on the device.

    Attributes:
        loss: The mean over the group, shape ``()``, detached.
        metrics: Scalars by name.
        skipped: 1.0 where the update was skipped, else 0.0; None where it cannot be.
    """

    loss: Tensor
    metrics: dict[str, Number]
    skipped: Tensor | None


class SeveralOutput(NamedTuple):
    """What several steps leave on the device.

    Attributes:
        losses: One for each, shape ``(n,)``, detached.
        metrics: Of all, by name: one for each in a tensor of shape ``(n,)``, or one by one where
            they make none, with None for a step that has none of this name.
        skipped: 1.0 for each whose update was skipped, else 0.0, shape ``(n,)``; None where none
            can be.
    """

    losses: Tensor
    metrics: dict[str, Tensor | tuple[Number | None, ...]]
    skipped: Tensor | None

    @classmethod
    def of(cls, outputs: Sequence[StepOutput]) -> SeveralOutput:
        """Return what steps leave together."""
        flags = [output.skipped for output in outputs if output.skipped is not None]
        return cls(
            losses=torch.stack([output.loss for output in outputs]),
            metrics={
                name: _together([output.metrics.get(name) for output in outputs])
                for name in dict.fromkeys(name for output in outputs for name in output.metrics)
            },
            skipped=torch.stack(flags) if flags else None,
        )

    def metrics_of(self, place: int) -> dict[str, Number]:
        """Return the metrics of the step in this place."""
        found: dict[str, Number] = {}
        for name, values in self.metrics.items():
            value = values.select(0, place) if isinstance(values, Tensor) else values[place]
            if value is not None:
                found[name] = value
        return found

    def flags(self) -> list[Tensor | None]:
        """Return for each step whether its update was skipped."""
        return [None] * len(self.losses) if self.skipped is None else [*self.skipped.unbind()]


def _together(values: list[Number | None]) -> Tensor | tuple[Number | None, ...]:
    """Return one tensor of the values of several steps, if they are of one type and device."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    kinds = {(tensor.dtype, tensor.device) for tensor in tensors}
    return torch.stack(tensors) if len(tensors) == len(values) and len(kinds) == 1 else (*values,)


class Shares(NamedTuple):
    """The weights of a group's micro-batches, shape ``()`` each, and their sum."""

    weights: list[Tensor]
    total: Tensor


def unpack_loss(result: object) -> LossParts:
    """Return the parts of what ``loss_fn(model, batch)`` returned.

    Raises:
        TypeError: Not a tensor, ``(loss, metrics)`` or ``(loss, metrics, weight)``.
        ValueError: The loss, a metric or the weight is not a scalar.
    """
    if isinstance(result, Tensor):
        return LossParts(_scalar_loss(result), {}, None)
    if isinstance(result, tuple) and len(result) in (2, 3) and isinstance(result[0], Tensor):
        loss, metrics, *rest = result
        weight = rest[0] if rest else None
        return LossParts(_scalar_loss(loss), _metrics(metrics), _weight(weight))
    raise TypeError(
        "loss_fn must return a loss tensor, (loss, metrics) or (loss, metrics, weight), got "
        f"{_shape_of(result)}; if the model returns an object, return its .loss"
    )


def detached(value: Tensor) -> Tensor:
    """Return ``value`` without its graph, safe to keep.

    What is a parameter or buffer, or a view of one, is cloned: it would change after it was told.
    So is what was written to in place, as a sum is that a module goes on with.
    """
    # Leaves first: an inference tensor is one, and has no count of writes.
    if value.is_leaf or value._is_view() or value._version:
        return value.detach().clone()
    return value.detach()


def check_differentiable(loss: Tensor) -> None:
    """Raise LossError unless ``loss`` can start a backward pass."""
    if not loss.requires_grad:
        raise LossError(
            "loss_fn returned a loss without a graph (requires_grad=False), so backward() can "
            "reach no parameter; check for no_grad(), .detach(), .item() or a model whose "
            "parameters are all frozen"
        )


def total(values: list[Tensor]) -> Tensor:
    """Return the sum, in order, without the leading zero of ``sum``, which costs a kernel."""
    result = values[0]
    for value in values[1:]:
        result = result + value
    return result


def mean_metrics(metrics: list[dict[str, Number]], shares: Shares | None) -> dict[str, Number]:
    """Average each metric over the group, by weight where there are weights."""
    if len(metrics) == 1:
        return metrics[0]
    means: dict[str, Number] = {}
    for name in dict.fromkeys(name for held in metrics for name in held):
        indices = [i for i, held in enumerate(metrics) if name in held]
        values = [metrics[i][name] for i in indices]
        if shares is None:
            means[name] = sum(values) / len(values)
        else:
            weights = [shares.weights[i] for i in indices]
            weighted = [v * w for v, w in zip(values, weights, strict=True)]
            means[name] = sum(weighted) / total(weights)
    return means


def with_norm(metrics: dict[str, Number], norm: Tensor | None) -> dict[str, Number]:
    """Return the metrics with the gradient norm among them, where there is one."""
    return metrics if norm is None else {**metrics, "grad_norm": norm}


def _scalar_loss(loss: Tensor) -> Tensor:
    if loss.numel() != 1:
        raise ValueError(
            f"loss_fn must return a scalar loss, got shape {tuple(loss.shape)}; reduce it with "
            ".mean(), or return (loss.sum(), metrics, weight) with the number of items as weight"
        )
    return loss if loss.dim() == 0 else loss.reshape(())


def _metrics(metrics: object) -> dict[str, Number]:
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise TypeError(
            "loss_fn's second return value must be a mapping of metric names to scalars, got "
            f"{_shape_of(metrics)}"
        )
    return {str(name): _scalar(f"metric {name!r}", value) for name, value in metrics.items()}


def _weight(weight: object) -> Number | None:
    return None if weight is None else _scalar("weight", weight)


def _scalar(name: str, value: object) -> Number:
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{name} must be a scalar, got shape {tuple(value.shape)}")
        return detached(value).reshape(())
    if isinstance(value, Real):
        return float(value)
    raise TypeError(f"{name} must be a scalar tensor or a number, got {_shape_of(value)}")


def _shape_of(value: object) -> str:
    if isinstance(value, tuple):
        return f"a tuple of ({', '.join(type(v).__name__ for v in value)})"
    return f"{type(value).__name__} {str(value)[:60]!r}"
