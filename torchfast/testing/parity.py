"""assert_parity: a model trained twice from one seed, by the plain loop and by a plan.

The two run in lockstep, each with random generators of its own, and are compared after every
step, so the first difference is found where it arises. Exact means equal bits, under
deterministic algorithms: of the loss, gradients, parameters, buffers, optimizer state,
hyperparameters, scheduler and generators. Close means that losses agree within a relative
tolerance, and that what training did to the parameters (not the parameters, which a few steps
hardly move) agrees within another.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from torchfast._core.arguments import check_batches, check_callable, check_int, explain_keywords
from torchfast._core.batches import MicroBatches, map_batch, to_device
from torchfast._core.building import build_scheduler
from torchfast._core.compare import differences
from torchfast._core.decisions import Report
from torchfast._core.device import resolve_device
from torchfast._core.errors import ParityError
from torchfast._core.rng import get_rng_state, preserved_rng, seed_everything, set_rng_state
from torchfast.ema.pairs import WithoutGraphs
from torchfast.plan import Plan
from torchfast.step import TrainStep
from torchfast.testing.plain_loop import plain_step


@final
@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How far a close plan may be from the plain loop.

    Attributes:
        loss: Largest relative difference of any step's loss.
        update: Largest ``|Δplan - Δplain| / |Δplain|``, where Δ is the change of all parameters
            over the run, as one vector. A plan that does not train at all has 1.
    """

    loss: float = 0.02
    update: float = 0.25


@final
@dataclass(frozen=True, kw_only=True)
class ParityResult:
    """What was compared, when it agreed.

    Attributes:
        exact: Whether every bit was compared.
        num_steps: Updates compared.
        losses: The plain loop's losses.
        loss_error: Largest relative difference of a loss; 0 when exact.
        update_error: Relative difference of the parameters' change; 0 when exact.
        report: What the plan did: a step that ran eagerly proves nothing about its graph, which
            needs a few steps more than it takes to be captured.
    """

    exact: bool
    num_steps: int
    losses: tuple[float, ...]
    loss_error: float
    update_error: float
    report: Report


@explain_keywords
def assert_parity(
    model: nn.Module | Callable[[], nn.Module],
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
    loss_fn: Callable[[Any, Any], Any],
    batches: Iterable[Any],
    plan: str | Plan = "exact",
    *,
    max_grad_norm: float | None = None,
    accumulate: int = 1,
    lr_scheduler: Callable[[Optimizer], Any] | None = None,
    tolerance: Tolerance | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    deterministic: bool = True,
) -> ParityResult:
    """Raise unless a plan trains the model as the plain loop does.

    Args:
        model: A model, which is copied and left alone, or a callable that makes one.
        optimizer: ``parameters -> Optimizer``.
        loss_fn: As `Trainer` takes it.
        batches: Batches, or a loader of few, cut into updates of ``accumulate``; the last may be
            shorter.
        plan: The plan to prove.
        max_grad_norm: As `Trainer` takes it.
        accumulate: Micro-batches in an update.
        lr_scheduler: ``optimizer -> scheduler``.
        tolerance: None means exact if the plan promises to change no number, else
            ``Tolerance()``.
        seed: Where both runs start.
        device: Where both run; None means where the parameters are.
        deterministic: Use deterministic algorithms while comparing. Without, kernels that add in
            no fixed order make two plain loops differ as well.

    Returns:
        What was compared and how far apart it was.

    Raises:
        ParityError: What differs first, where and by how much.
        ValueError: No batch; or the plain loop changed no parameter, so there is nothing to
            compare.

    Example:
        >>> from functools import partial
        >>> model = torch.nn.Linear(3, 1)
        >>> result = assert_parity(
        ...     model,
        ...     partial(torch.optim.AdamW, lr=0.1),
        ...     lambda model, batch: model(batch).square().mean(),
        ...     [torch.randn(4, 3) for _ in range(5)],
        ...     max_grad_norm=1.0,
        ... )
        >>> result.exact, result.num_steps
        (True, 5)
    """
    check_int("accumulate", accumulate, minimum=1)
    if isinstance(optimizer, Optimizer):
        raise TypeError(
            "optimizer must be a callable parameters -> Optimizer, since two are needed, got a "
            f"{type(optimizer).__name__}"
        )
    check_callable("optimizer", optimizer, "optimizer(parameters)")
    check_batches("batches", batches)
    with preserved_rng(torch.device("cpu")):  # a loader draws its order
        taken = list(batches)
    if not taken:
        raise ValueError("assert_parity needs at least one batch, got none")
    chosen = Plan.of(plan)
    if tolerance is None and not _keeps_bits(chosen):
        tolerance = Tolerance()
    pair = _Pair(_twins(model, seed), loss_fn, max_grad_norm, device)
    groups = [taken[i : i + accumulate] for i in range(0, len(taken), accumulate)]
    with preserved_rng(pair.device), _deterministic(deterministic):
        seed_everything(seed)
        pair.build(optimizer, lr_scheduler, plan, accumulate)
        for number, group in enumerate(groups, start=1):
            pair.step(group)
            if tolerance is None:
                pair.compare_exactly(number, len(groups), plan)
        result = pair.result(exact=tolerance is None)
    if tolerance is not None:
        _check_close(result, tolerance, plan, pair)
    return result


# Of what waits on the host, these are where and when; the rest is where an update runs.
_OF_ACTIVATIONS = {"activations", "min_bytes", "window_bytes", "max_bytes", "max_host_bytes"}


def _keeps_bits(plan: Plan) -> bool:
    """Return whether a plan promises to change no number."""
    options = plan.offload_options
    only_activations = options is None or set(options.changed) <= _OF_ACTIVATIONS
    rest = plan.replace(
        cuda_graph=False,
        recompute=False,
        offload=None if only_activations else plan.offload,
        sync_guard="off",
        allocator=None,
    )
    return rest == Plan()


class _Pair:
    """The two runs, in lockstep."""

    def __init__(
        self,
        models: tuple[nn.Module, nn.Module],
        loss_fn: Callable[[Any, Any], Any],
        max_grad_norm: float | None,
        device: torch.device | str | None,
    ) -> None:
        self.device = resolve_device(device, models[0])
        self.plain, self.planned = (model.to(self.device) for model in models)
        self._loss_fn = loss_fn
        self._max_grad_norm = max_grad_norm
        self._before = [p.detach().clone() for p in self.plain.parameters()]
        self._losses: list[tuple[Tensor, Tensor]] = []

    def build(
        self,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
        lr_scheduler: Callable[[Optimizer], Any] | None,
        plan: str | Plan,
        accumulate: int,
    ) -> None:
        start = get_rng_state(self.device)
        self._optimizer = optimizer([*self.plain.parameters()])
        self._scheduler = build_scheduler(lr_scheduler, self._optimizer)
        if isinstance(self._scheduler, ReduceLROnPlateau):
            raise ValueError(
                "assert_parity steps lr_scheduler after each update, but ReduceLROnPlateau is "
                "stepped on evaluations; leave it out"
            )
        self._plain_rng = get_rng_state(self.device)
        set_rng_state(start, self.device)
        self._step = TrainStep(
            self.planned,
            optimizer,
            self._loss_fn,
            plan,
            max_grad_norm=self._max_grad_norm,
            accumulate=accumulate,
            lr_scheduler=lr_scheduler,
        )
        self._plan_rng = get_rng_state(self.device)

    def step(self, group: list[Any]) -> None:
        set_rng_state(self._plain_rng, self.device)
        loss = plain_step(
            self.plain,
            self._optimizer,
            self._loss_fn,
            # Copies, for a loss_fn may change its batch in place, which is the plan's too.
            [map_batch(to_device(batch, self.device), torch.clone) for batch in group],
            max_grad_norm=self._max_grad_norm,
            lr_scheduler=self._scheduler,
        )
        self._plain_rng = get_rng_state(self.device)
        set_rng_state(self._plan_rng, self.device)
        planned = self._step(MicroBatches(group))
        self._plan_rng = get_rng_state(self.device)
        self._losses.append((loss, planned.clone()))

    def compare_exactly(self, number: int, total: int, plan: object) -> None:
        loss, planned = self._losses[-1]
        state = self._step.state_dict()
        has_schedule = hasattr(self._scheduler, "state_dict")
        compared = {
            "loss": ({"loss": loss}, {"loss": planned}),
            "gradients": (_gradients(self.plain), _gradients(self.planned)),
            "parameters": (
                dict(self.plain.named_parameters()),
                dict(self.planned.named_parameters()),
            ),
            "buffers": (dict(self.plain.named_buffers()), dict(self.planned.named_buffers())),
            "optimizer": (self._optimizer.state_dict(), state["optimizer"]),
            "scheduler": (
                self._scheduler.state_dict() if has_schedule else {},
                state["lr_scheduler"] if has_schedule else {},
            ),
            "random generators": (self._plain_rng, self._plan_rng),
        }
        found = {name: differences(*states) for name, states in compared.items()}
        broken = [name for name, list_ in found.items() if list_]
        if broken:
            first = found[broken[0]]
            also = "; ".join(f"{name} ({len(found[name])})" for name in broken[1:])
            raise ParityError(
                f"plan {plan!r} is not the plain loop at step {number} of {total}: "
                f"{broken[0]} {first[0]}"
                + (f"; {len(first) - 1} more of {broken[0]}" if len(first) > 1 else "")
                + (f"; also {also}" if also else "")
            )
        if number == total:
            self._change(self.plain)

    def result(self, *, exact: bool) -> ParityResult:
        losses = [(float(plain), float(planned)) for plain, planned in self._losses]
        update_error = 0.0
        if not exact:
            plain, planned = self._change(self.plain), self._change(self.planned)
            update_error = float((planned - plain).norm() / plain.norm())
        return ParityResult(
            exact=exact,
            num_steps=len(losses),
            losses=tuple(plain for plain, _ in losses),
            loss_error=float(np.max([_relative(a, b) for a, b in losses])),  # keeps NaN
            update_error=update_error,
            report=self._step.report(),
        )

    def first_far_loss(self, tolerance: float) -> str:
        for number, (plain, planned) in enumerate(self._losses, start=1):
            a, b = float(plain), float(planned)
            if not abs(b - a) <= tolerance * abs(a):
                return f"at step {number} of {len(self._losses)}: expected {a:.9g}, got {b:.9g}"
        return "nowhere"

    def _change(self, model: nn.Module) -> Tensor:
        """Return what training did to all parameters, as one vector; it must be something."""
        pairs = zip(model.parameters(), self._before, strict=True)
        change = torch.cat([(p.detach() - old).double().flatten() for p, old in pairs])
        if model is self.plain and not change.any():
            raise ValueError(
                "the plain loop changed no parameter, so this comparison would prove nothing; "
                "check the learning rate and requires_grad"
            )
        return change


def _check_close(result: ParityResult, tolerance: Tolerance, plan: object, pair: _Pair) -> None:
    # Written so that NaN fails.
    if not result.loss_error <= tolerance.loss:
        raise ParityError(
            f"plan {plan!r} is not close to the plain loop: losses differ by up to "
            f"{result.loss_error:.3g} of their value (tolerance {tolerance.loss}), first "
            f"{pair.first_far_loss(tolerance.loss)}{_draws_otherwise(result.report, pair.plain)}"
        )
    if not result.update_error <= tolerance.update:
        raise ParityError(
            f"plan {plan!r} is not close to the plain loop: over {result.num_steps} steps the "
            f"parameters' change differs by {result.update_error:.3g} of its norm "
            f"(tolerance {tolerance.update}), though losses agree within {result.loss_error:.3g}"
        )


def _draws_otherwise(report: Report, model: nn.Module) -> str:
    """Return the remedy where losses differ since compiled code draws other dropout masks."""
    if not any(d.lever == "compile" and d.outcome == "applied" for d in report.decisions):
        return ""
    rates = [module.p for module in model.modules() if isinstance(module, _DropoutNd)]
    if not any(rates):
        return ""
    return (
        f"; the plan compiles, and compiled code drops other units after the same seed (p="
        f"{max(rates):g} in {len(rates)} modules): compare with every p at 0"
    )


def _relative(expected: float, actual: float) -> float:
    return 0.0 if expected == actual else abs(actual - expected) / max(abs(expected), 1e-12)


def _twins(model: nn.Module | Callable[[], nn.Module], seed: int) -> tuple[nn.Module, nn.Module]:
    if isinstance(model, nn.Module):
        with WithoutGraphs():  # a loss that a module keeps in an attribute, say
            return copy.deepcopy(model), copy.deepcopy(model)
    check_callable("model", model, "model() -> torch.nn.Module")
    twins = []
    for _ in range(2):
        with preserved_rng(torch.device("cpu")):
            seed_everything(seed)
            twins.append(model())
    for twin in twins:
        if not isinstance(twin, nn.Module):
            raise TypeError(f"model() must return a torch.nn.Module, got {type(twin).__name__}")
    found = differences(twins[0].state_dict(), twins[1].state_dict())
    if found:
        raise ValueError(
            f"model() made two different models from one seed ({found[0]}); pass a model instead"
        )
    return twins[0], twins[1]


def _gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in model.named_parameters()}


@contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    if not wanted:
        yield
        return
    mode = torch.get_deterministic_debug_mode()
    benchmark = torch.backends.cudnn.benchmark
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    # cuBLAS is deterministic only with a workspace of a fixed size, which it reads from here.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        torch.backends.cudnn.benchmark = benchmark
        if workspace is None:
            del os.environ["CUBLAS_WORKSPACE_CONFIG"]
