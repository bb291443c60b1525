"""Whether a compiled step computes what the eager one does: its loss, gradients and buffers.

Compiled code adds and rounds in another order, so results are close and not equal. How close they
must be depends on the least precise format that the step computes in (`tolerance_of`), which is
found by looking at what the eager forward keeps for its backward: under autocast the parameters do
not tell it. The error of the gradients is that of all of them as one vector, relative to its
length, since rounding has no respect for a single small tensor; and, ten times more generously,
that of each tensor, relative to its own length but at least a hundredth of the whole, so that one
missing or wrong gradient is found in a large model. That of a buffer is relative to its own length;
of the mean that a norm keeps to a hundredth of its deviations at least, since behind another norm
it is zero up to rounding. Where rounding alone goes farther than all that, it is measured
(`torchfast.compiler.rounding_errors`).

Compiled code also draws its random numbers in another way: after the same seed other units are
dropped, and the loss is another. That is no error. Such a step is judged twice:

- as it is, within what the eager step itself differs from draw to draw. That finds what is grossly
  wrong, at no cost.
- the winner once more with everything that is called dropout set to zero (`without_dropout`), by
  the tolerance of its format. That is compiled for the occasion, so it costs the compile again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor, nn

from torchfast._core.arguments import check_positive, explain_init_keywords

# Of one tensor, compared with the whole: how much more it may be off, and its least length.
_TENSOR_TIMES: Final = 10.0
_MOST_TENSOR_ERROR: Final = 0.5
_LEAST_SHARE: Final = 0.01
# A loss close to zero has no relative error worth the name.
_LEAST_LOSS: Final = 1e-3


@explain_init_keywords
@final
@dataclass(frozen=True, kw_only=True)
class ParityTolerance:
    """How far a result may be off the eager one, relatively.

    Args:
        loss: The loss.
        gradient: The gradients, as one vector.
    """

    loss: float
    gradient: float

    def __post_init__(self) -> None:
        check_positive("loss", self.loss)
        check_positive("gradient", self.gradient)


# From the least precise up. Each is some ten times what rounding alone does to networks of a few
# dozen layers.
_TOLERANCES: Final = (
    ("8-bit floats", 5e-2, 2e-1),
    ("bfloat16", 1e-2, 5e-2),
    ("float16", 2e-3, 2e-2),
    ("tf32", 2e-3, 1e-2),
    ("float32", 1e-4, 1e-3),
    ("float64", 1e-9, 1e-8),
)


def tolerance_of(precision: str) -> ParityTolerance:
    """Return the tolerance of a format, by the name that `Outcome.precision` has."""
    for name, loss, gradient in _TOLERANCES:
        if name == precision:
            return ParityTolerance(loss=loss, gradient=gradient)
    raise KeyError(precision)


class Errors(NamedTuple):
    """How far a result is off, relatively.

    Attributes:
        loss: The loss.
        gradient: The gradients, as one vector.
        tensors: Each gradient, by the parameter's name.
        buffers: Each buffer, by name.
        lengths: Of each gradient, with the expected ones' as the unit.
    """

    loss: float = 0.0
    gradient: float = 0.0
    tensors: Mapping[str, float] = {}
    buffers: Mapping[str, float] = {}
    lengths: Mapping[str, float] = {}

    @property
    def tensor(self) -> float:
        """The largest of a gradient of its own."""
        return max(self.tensors.values(), key=_comparable, default=0.0)

    @property
    def buffer(self) -> float:
        """The largest of a buffer."""
        return max(self.buffers.values(), key=_comparable, default=0.0)

    def beyond(self, tolerance: ParityTolerance, least: Errors | None = None) -> str | None:
        """Return in words what is off by too much; None if nothing is.

        Args:
            tolerance: What is allowed.
            least: What is allowed at least, of each by name.
        """
        least = Errors() if least is None else least
        most = max(min(_TENSOR_TIMES * tolerance.gradient, _MOST_TENSOR_ERROR), tolerance.gradient)
        loss = max(tolerance.loss, least.loss)
        gradient = max(tolerance.gradient, least.gradient)
        # Written so that a NaN is not within anything.
        if not self.loss <= loss:
            return f"its loss is off by {self.loss:.2g} of its value (tolerance {loss:.3g})"
        if not self.gradient <= gradient:
            worst = max(self.tensors, key=lambda name: _comparable(self.tensors[name]))
            return (
                f"its gradients are off by {self.gradient:.2g} of their length (tolerance "
                f"{gradient:.3g}), most of all {worst}"
            )
        for errors, allowed, of_others, called in (
            (self.tensors, most, least.tensors, "the gradient of"),
            (self.buffers, tolerance.gradient, least.buffers, "the buffer"),
        ):
            name, share = _worst(errors, allowed, of_others)
            if not share <= 1.0:
                allowed = max(allowed, of_others.get(name, 0.0))
                return f"{called} {name} is off by {errors[name]:.2g} (tolerance {allowed:.3g})"
        return None

    @staticmethod
    def of(runs: Sequence[Errors], rank: int) -> Errors:
        """Return of each the one that stands there when those of all runs are sorted."""

        def pick(values: Iterable[float]) -> float:
            return sorted(values, key=_comparable)[rank]

        def each(part: Callable[[Errors], Mapping[str, float]]) -> dict[str, float]:
            return {name: pick(part(run)[name] for run in runs) for name in part(runs[0])}

        return Errors(
            pick(run.loss for run in runs),
            pick(run.gradient for run in runs),
            each(lambda run: run.tensors),
            each(lambda run: run.buffers),
            each(lambda run: run.lengths),
        )

    def widened(self, tolerance: ParityTolerance, times: float) -> ParityTolerance:
        """Return a tolerance that so many times these errors are within."""
        gradient = max(self.gradient, self.tensor / _TENSOR_TIMES, self.buffer)
        return ParityTolerance(
            loss=max(tolerance.loss, times * self.loss),
            gradient=max(tolerance.gradient, times * gradient),
        )


@final
@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one unit of work left behind.

    Attributes:
        loss: The loss.
        gradients: By the parameter's name; None where there is none.
        buffers: By name.
        precision: The least precise format that was computed in, for `tolerance_of`.
    """

    loss: float
    gradients: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor]
    precision: str


def observe(work: Callable[[], object], model: nn.Module, *, as_reference: bool = False) -> Outcome:
    """Run a unit of work and return what it left.

    Args:
        work: Forward and backward; it returns the loss.
        model: Whose gradients and buffers count.
        as_reference: Find out the precision, and copy everything to the host. Otherwise gradients
            and buffers are those that the next unit may overwrite.

    Raises:
        TypeError: It did not return its loss, a real tensor of one element.

    Synchronizes: At its end.
    """
    dtypes: set[torch.dtype] = set()

    def note(tensor: Tensor) -> Tensor:
        dtypes.add(tensor.dtype)
        return tensor

    if as_reference:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = work()
    else:
        loss = work()
    if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.is_complex():
        shape = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        raise TypeError(
            f"work() must return the loss of the step, a tensor of one element, got {shape[:80]}"
        )
    dtypes.update(p.dtype for p in model.parameters() if p.is_floating_point())
    return Outcome(
        loss=float(loss.detach()),
        gradients={
            name: None if p.grad is None else _settled(p.grad, as_reference)
            for name, p in model.named_parameters()
            if p.requires_grad
        },
        buffers={name: _settled(b, as_reference) for name, b in model.named_buffers()},
        precision=_precision(dtypes),
    )


def errors_between(
    expected: Outcome, actual: Outcome, *, least_share: float = _LEAST_SHARE
) -> Errors:
    """Return how far one outcome is off another.

    Args:
        expected: What the other is compared with.
        actual: The other.
        least_share: Of the length of all gradients, what each counts with at least.
    """
    gap = abs(actual.loss - expected.loss)
    same = actual.loss == expected.loss or (math.isnan(actual.loss) and math.isnan(expected.loss))
    loss = 0.0 if same else gap / max(abs(expected.loss), _LEAST_LOSS)
    lengths = {name: _length(g) for name, g in expected.gradients.items()}
    whole = math.hypot(*lengths.values())
    gaps = {n: _gap(g, actual.gradients.get(n)) for n, g in expected.gradients.items()}
    units = {n: max(lengths[n], least_share * whole) for n in gaps}
    return Errors(
        loss if not math.isnan(loss) else math.inf,
        _over(math.hypot(*gaps.values()), whole),
        {n: _over(gaps[n], units[n]) for n in gaps},
        {
            n: _over(
                _gap(b, actual.buffers.get(n)), max(_length(b), _least_mean(n, expected.buffers))
            )
            for n, b in expected.buffers.items()
        },
        {n: _over(_length(actual.gradients.get(n)), units[n]) for n in gaps},
    )


def _least_mean(name: str, buffers: Mapping[str, Tensor]) -> float:
    """Return the least length that a buffer counts with: that of means beside variances."""
    owner, _, last = name.rpartition("running_mean")
    variance = buffers.get(f"{owner}running_var") if not last else None
    if variance is None or not variance.is_floating_point():
        return 0.0
    deviations = variance.to(_accumulated(variance)).clamp(min=0.0).sqrt()
    length = _LEAST_SHARE * _length(deviations)
    return length if math.isfinite(length) else 0.0


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[int]:
    """Set every rate that is called a dropout to zero for a while; yields how many.

    They are attributes of modules: ``p`` of a module whose class is called so, and numbers between
    0 and 1 whose own name has "drop" in it.
    """
    changed: list[tuple[dict[str, Any], str, float]] = []
    for module in model.modules():
        is_dropout = "drop" in type(module).__name__.lower()
        for name, value in vars(module).items():
            called = "drop" in name.lower() or (is_dropout and name == "p")
            if called and type(value) is float and 0.0 < value <= 1.0:
                changed.append((vars(module), name, value))
    try:
        for attributes, name, _ in changed:
            attributes[name] = 0.0
        yield len(changed)
    finally:
        for attributes, name, value in changed:
            attributes[name] = value


def _precision(dtypes: set[torch.dtype]) -> str:
    floating = {d for d in dtypes if d.is_floating_point}
    if any(d.itemsize == 1 for d in floating):
        return "8-bit floats"
    for dtype in (torch.bfloat16, torch.float16):
        if dtype in floating:
            return str(dtype).removeprefix("torch.")
    if torch.float32 in floating or not floating:
        is_rounded = torch.cuda.is_available() and torch.get_float32_matmul_precision() != "highest"
        return "tf32" if is_rounded else "float32"
    return "float64"


def _settled(tensor: Tensor, host: bool) -> Tensor:
    """Return a gradient or buffer as plain real numbers; on the host as a copy."""
    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):  # a rank's own part of a sharded one
        tensor = tensor.to_local()
    tensor = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return tensor.to("cpu", copy=True) if host else tensor


def _length(tensor: Tensor | None) -> float:
    if tensor is None or tensor.numel() == 0:
        return 0.0
    if not tensor.is_floating_point():  # a buffer that counts
        tensor = tensor.to(_accumulated(tensor))
    return float(torch.linalg.vector_norm(tensor, dtype=_accumulated(tensor)))


def _gap(expected: Tensor | None, actual: Tensor | None) -> float:
    """Return the length of the difference; a missing gradient is zero."""
    if expected is None or actual is None:
        return _length(expected if actual is None else actual)
    if expected.shape != actual.shape:
        return math.inf
    old = expected.to(actual.device, _accumulated(actual))
    new = actual.to(old.dtype)
    # What is not finite in the eager result need not be finite here either.
    finite = torch.isfinite(old)
    if not torch.equal(finite, torch.isfinite(new)):
        return math.inf
    return _length(torch.where(finite, new - old, 0.0))


def _accumulated(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.device.type == "mps" else torch.float64


def _over(gap: float, length: float) -> float:
    if gap == 0.0:
        return 0.0
    return gap / length if length > 0.0 else math.inf


def _comparable(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _worst(
    errors: Mapping[str, float], allowed: float, least: Mapping[str, float]
) -> tuple[str, float]:
    """Return which is the most times what is allowed of it, and how many times."""
    shares = {n: _comparable(e) / max(allowed, least.get(n, 0.0)) for n, e in errors.items()}
    name = max(shares, key=shares.__getitem__, default="")
    return name, shares.get(name, 0.0)
