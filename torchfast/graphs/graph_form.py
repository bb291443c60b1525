"""In which form an optimizer's update can be part of a graph, and whether that changes a bit.

A graph needs step counters and learning rates on the device, which torch's optimizers have in
their fused or capturable implementations. Whether one of these computes the bits of the one that
the user chose is known by trying: both update the same random parameters, with the user's own
hyperparameters and a learning rate that changes, and every bit is compared.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchfast._core.building import optimized
from torchfast._core.decisions import Decision
from torchfast.graphs.learning_rates import LearningRates
from torchfast.graphs.optimizer_form import FORMS, Form
from torchfast.graphs.options import graph_decision

Numerics = Literal["exact", "close", "compiled"]

# Shapes of the parameters of a trial: vectorized, ragged, one element. Where a weight is much
# larger than its update, as most are, a difference in rounding is lost in most additions: many
# weights, and of magnitudes from far below an update to far above it, leave none unseen.
_SHAPES = ((512, 64), (1023,), (1,))
_LOWEST_EXPONENT = -9
_RATES = (1.0, 0.9, 0.7 * 0.9, 1 / 3, 0.123456789, 1.1e-3)
# What is computed once an update, such as the rate over a correction of bias, rounds one way or the
# other by the rate and the number of the update alone: so a few weights are updated often, too, in
# all groups together about as often.
_FEW = ((64,),)
_OFTEN, _OFTEN_ENOUGH = 192, 32


class GraphForm(NamedTuple):
    """How an update joins a graph.

    Attributes:
        form: The form it takes.
        rate_dtype: Of the learning rates on the device.
    """

    form: Form
    rate_dtype: torch.dtype


def graph_form(optimizer: Optimizer, numerics: Numerics) -> tuple[GraphForm | None, Decision]:
    """Return the form in which an update can be captured, and why; None if there is none.

    Args:
        optimizer: Left as it is.
        numerics: ``"exact"`` takes a form only if it keeps every bit. ``"compiled"`` is close too,
            and takes another form than a fused one where there is one, as there is nothing to
            compile of that.

    Synchronizes: Yes.
    """
    name = type(optimizer).__name__
    if getattr(type(optimizer), "is_capturable", False):
        detail = f"the update of {name} can be in the graph as it is"
        return GraphForm("as_given", torch.float32), graph_decision("applied", detail)
    refusal, rounds = f"torch.optim has no {name} that a graph can hold", False
    for form in _candidates(optimizer, numerics):
        for dtype in (torch.float32, torch.float64):
            try:
                difference = _trial(optimizer, form, dtype, is_exact=numerics == "exact")
            except (RuntimeError, ValueError, TypeError, AssertionError) as error:
                if not rounds:
                    said = str(error).partition("\n")[0]
                    refusal = f"torch refused {name} as {form.replace('_', ' ')}: {said}"
                continue
            if numerics != "exact" or not difference:
                detail = f"the update of {name} can be in the graph, as {form.replace('_', ' ')}"
                return GraphForm(form, dtype), graph_decision("applied", detail)
            rounds = True
            refusal = f"{name} as given and {form.replace('_', ' ')} differ by rounding"
    others = ["AdamW with fused=True", *(["SGD"] if name != "SGD" else [])]
    remedy = f"{' and '.join(others)} can be in a graph"
    if rounds:
        remedy = f"plan='fast' (numerics='close') allows that; {remedy} as it is"
    detail = f"the update of {name} is not in the graph: {refusal}; {remedy}"
    return None, graph_decision("stepped aside", detail)


def _candidates(optimizer: Optimizer, numerics: Numerics) -> list[Form]:
    if not type(optimizer).__module__.startswith("torch.optim"):
        return []
    groups = optimizer.param_groups
    forms: list[Form] = []
    if all("capturable" in group for group in groups) and not any(g.get("fused") for g in groups):
        forms.append("capturable")
    if all("fused" in group for group in groups):
        forms.append("fused_capturable")
    return forms[::-1] if numerics == "close" else forms


def _trial(optimizer: Optimizer, form: Form, rate_dtype: torch.dtype, *, is_exact: bool) -> bool:
    """Return whether any bit differs between the form as given and another.

    Args:
        optimizer: As the user built it.
        form: The other one.
        rate_dtype: Of the learning rates on the device.
        is_exact: Whether a difference that shows in few updates counts.

    Raises:
        Exception: What torch raises where it has no such form.
    """
    groups = {_settings_of(group): group for group in optimizer.param_groups}.values()
    half = max(_OFTEN_ENOUGH, _OFTEN // len(groups)) // 2
    often = (*(1.0,) * half, *(0.99**k for k in range(half)))  # at one rate, and along a schedule
    for group in groups:
        flags = {flag: on for flag, on in FORMS[form].items() if flag in group}
        for device, dtype in dict.fromkeys((p.device, p.dtype) for p in group["params"]):
            for trial in ((_SHAPES, _RATES), (_FEW, often))[: 1 + is_exact]:
                given = _run(optimizer, group, device, dtype, {}, None, *trial)
                other = _run(optimizer, group, device, dtype, flags, rate_dtype, *trial)
                if not all(map(_is_same, given, other)):
                    return True
    return False


def _is_same(given: Tensor, other: Tensor) -> bool:
    """Whether every bit is; what has grown beyond all numbers, in both, is."""
    return torch.allclose(given, other.to(given), rtol=0.0, atol=0.0, equal_nan=True)


def _settings_of(group: dict[str, Any]) -> tuple[object, ...]:
    """Return what tells a group from one in which the same would be tried."""
    settings = {name: value for name, value in group.items() if name != "params"}
    told = (v.tolist() if isinstance(v, Tensor) else repr(v) for v in settings.values())
    kinds = frozenset((p.device, p.dtype) for p in group["params"])
    return (*zip(settings, map(str, told), strict=True), kinds)


def _run(
    optimizer: Optimizer,
    group: dict[str, Any],
    device: torch.device,
    dtype: torch.dtype,
    flags: dict[str, bool],
    rate_dtype: torch.dtype | None,
    shapes: tuple[tuple[int, ...], ...],
    factors: tuple[float, ...],
) -> list[Tensor]:
    """Return parameters and state after some updates with the group's hyperparameters."""
    accepted = inspect.signature(type(optimizer)).parameters
    values = {k: v for k, v in group.items() if k in accepted and k != "params"} | flags
    generator = torch.Generator().manual_seed(0)

    def drawn(shape: tuple[int, ...]) -> Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        exponents = torch.rand(shape, generator=generator, dtype=torch.float64) * _LOWEST_EXPONENT
        return (values * 10**exponents).to(device, dtype)

    parameters = [nn.Parameter(drawn(shape)) for shape in shapes]
    rate = float(group["lr"])
    values["lr"] = rate
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trial = type(optimizer)(parameters, **values)
        trial._warned_capturable_if_run_uncaptured = True
        rates = None if rate_dtype is None else LearningRates(trial, rate_dtype)
        for factor in factors:
            trial.param_groups[0]["lr"] = rate * factor
            for parameter in parameters:
                parameter.grad = drawn(tuple(parameter.shape))
            if rates is None:
                trial.step()
            else:
                rates.fill()
                with rates.on_device():
                    trial.step()
    return [*(p.detach() for p in parameters), *_state_of(trial)]


def _state_of(optimizer: Optimizer) -> Iterator[Tensor]:
    for parameter in optimized(optimizer):
        for _, value in sorted(optimizer.state[parameter].items()):
            yield value if isinstance(value, Tensor) else torch.tensor(float(value or 0))
