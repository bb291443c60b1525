"""One model of the sweep, by a plan and by the plain step: parity, time, form, host waits."""

from __future__ import annotations

import gc
import math
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.outside_models import OutsideModel, optimizer, scheduler, without_dropout
from benchmarks.turns import Turns
from torchfast import ParityError, Plan, Trainer
from torchfast._core.batches import to_device
from torchfast._core.decisions import Report
from torchfast._core.device import has_fast_bf16
from torchfast.testing import ParityResult, Tolerance, assert_parity, plain_step

Record = dict[str, Any]

# A graph is captured at the fourth step of a kind; the last step is shorter, and so of another.
PARITY_STEPS = 9
MAX_GRAD_NORM = 1.0
TOLERANCE = Tolerance(loss=0.05, update=0.5)
# So wide that only what is not finite is refused: the figures are wanted of a plan that fails, too.
UNLIMITED = Tolerance(loss=sys.float_info.max, update=sys.float_info.max)
# Both sides are given what "exact" can take into a graph without changing a bit.
fused_optimizer = partial(optimizer, fused=True)
# AdamW's first updates divide by moments that are still noise, so the sign of a small gradient
# decides a full step, and rounding decides the sign.
close_optimizer = partial(torch.optim.SGD, lr=1e-3, momentum=0.9)

WARM_UP_STEPS = 5
# So many take the captures, and the trial of what is compiled where none goes well.
SETTLING_STEPS = 45
NUM_PAIRS = 10
# So many more where the two are close: whether one is slower by 2 % is not seen in ten.
CLOSE, MORE_PAIRS = 0.1, 40
BLOCK_S = 0.05
WAIT_STEPS = 10
# Of what the compiler did, what is kept; the others as often as they are above 0.
COMPILED = ("compile_graphs", "compile_graph_breaks", "compile_recompiles", "compile_s")


def measure(outside: OutsideModel, plan: str, device: str, turns: Turns) -> Iterator[Record]:
    """Yield what is found out about one model, part by part.

    Only what times is alone on the machine; building, compiling and comparing are not.
    """
    # Parity first: cuBLAS reads once, at its first call, whether its workspace is deterministic.
    with turns.beside_others():
        found = parity(outside, plan, device)
    yield {"parity": found}
    if not found["held"] and _wants_bf16(parse_plan(plan), torch.device(device)):
        with turns.beside_others():
            control = rounding(outside, plan, device)
        yield {"parity": {**found, "rounding": control}}
    if "compile" in found:
        torch.compiler.reset()  # the same loss function with another model would be a recompile
    yield from speed(outside, plan, torch.device(device), turns)


def parity(outside: OutsideModel, plan: str, device: str) -> Record:
    """Return whether the plan trains the model that the plain loop trains."""
    exact = plan in ("eager", "exact")
    tolerance = {} if exact else {"tolerance": asdict(TOLERANCE)}
    try:
        if exact:
            result = _against_plain(outside, fused_optimizer, plan, device, None)
        else:
            result = _close(outside, outside.build, outside.loss_fn, plan, device)
    except ParityError as error:
        return {"held": False, "exact": False, **tolerance, "reason": one_line(error)}
    if not all(map(math.isfinite, result.losses)):
        raise ValueError(f"the plain loop's losses are not finite: {result.losses}")
    return {
        "held": result.loss_error <= TOLERANCE.loss and result.update_error <= TOLERANCE.update,
        "exact": result.exact,
        **tolerance,
        "loss_error": result.loss_error,
        "update_error": result.update_error,
        "losses": result.losses,
        "replays": result.report.counters.get("replays", 0),
        **compiled(result.report),
    }


def rounding(outside: OutsideModel, plan: str, device: str) -> Record:
    """Return how far bf16 alone takes the plain loop from fp32, by the errors of `parity`.

    This is the control of a plan in bf16 that is not held. Both sides are the plain loop (the
    second under the plan that does nothing), from the same seed and on the same batches; the second
    is under the user's own autocast, and laid out as channels_last by hand where the plan has that.
    """
    chosen, place = parse_plan(plan), torch.device(device)
    in_bf16 = _autocast(outside.loss_fn, chosen, place)
    built: list[nn.Module] = []  # that of the loop in fp32 first

    def build() -> nn.Module:
        model = outside.build()
        if built and chosen.channels_last:
            model = model.to(memory_format=torch.channels_last)
        built.append(model)
        return model

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        if model is built[0]:
            return outside.loss_fn(model, batch)
        return in_bf16(model, to_device(batch, place, channels_last=chosen.channels_last))

    try:
        result = _close(outside, build, loss_fn, "eager", device)
    except ParityError:
        return {"reason": "not finite"}
    return {"loss_error": result.loss_error, "update_error": result.update_error}


def _close(
    outside: OutsideModel,
    build: Callable[[], nn.Module],
    loss_fn: Callable[[Any, Any], Tensor],
    plan: str,
    device: str,
) -> ParityResult:
    """Return the errors of a side that rounds, whatever they are unless they are not finite."""
    changed = replace(outside, build=lambda: without_dropout(build()), loss_fn=loss_fn)
    return _against_plain(changed, close_optimizer, plan, device, UNLIMITED)


def _against_plain(
    outside: OutsideModel,
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    plan: str,
    device: str,
    tolerance: Tolerance | None,
) -> ParityResult:
    generator = torch.Generator().manual_seed(0)
    return assert_parity(
        outside.build,
        make_optimizer,
        outside.loss_fn,
        [outside.batch(generator) for _ in range(2 * PARITY_STEPS - 1)],
        parse_plan(plan),
        accumulate=2,
        max_grad_norm=MAX_GRAD_NORM,
        lr_scheduler=scheduler,
        device=device,
        tolerance=tolerance,
    )


def speed(outside: OutsideModel, plan: str, device: torch.device, turns: Turns) -> Iterator[Record]:
    """Yield times and gain, then the form of the plan's step and the host waits."""
    drain = _drain(device)
    with turns.beside_others():
        steps, trainer = both_steps(outside, plan, device)
        warm_up = SETTLING_STEPS if device.type == "cuda" else WARM_UP_STEPS
        for step in steps:
            block_ms(step, warm_up, drain)
    with turns.alone():
        times = compare(*steps, drain)
        waits = [host_waits(step) for step in steps] if device.type == "cuda" else []
    yield times
    report = trainer.report()
    yield {
        "form": form(report),
        "stepped_aside": [str(d.detail) for d in report.stepped_aside],
        **compiled(report),
    }
    if waits:
        yield {"host_waits": dict(zip(("eager", "plan"), waits, strict=True))}


def both_steps(
    outside: OutsideModel, plan: str, device: torch.device
) -> tuple[tuple[Callable[[], object], Callable[[], object]], Trainer]:
    """Return the plain step and the plan's, and the trainer of the latter."""
    batch = outside.batch(torch.Generator().manual_seed(0))
    model, planned = (_built(outside, device) for _ in range(2))
    chosen = parse_plan(plan)
    trainer = Trainer(
        planned,
        fused_optimizer(planned.parameters()),
        outside.loss_fn,
        chosen,
        max_grad_norm=MAX_GRAD_NORM,
    )
    (prefetched,) = trainer.prefetch([batch])
    eager = partial(
        plain_step,
        model,
        fused_optimizer(model.parameters()),
        _autocast(outside.loss_fn, chosen, device),
        [to_device(batch, device)],
        max_grad_norm=MAX_GRAD_NORM,
    )
    return (eager, partial(trainer.step, prefetched)), trainer


def compare(
    eager: Callable[[], object], planned: Callable[[], object], drain: Callable[[], None]
) -> Record:
    """Return median times of a step, their paired ratio and the raw pairs."""
    steps = (eager, planned)
    counts = []
    for step in steps:
        block_ms(step, WARM_UP_STEPS, drain)
        counts.append(max(1, round(BLOCK_S * 1e3 / block_ms(step, 2, drain))))
    shuffled = random.Random(0)

    def pair() -> tuple[float, float]:
        taken = [0.0, 0.0]
        for which in shuffled.sample((0, 1), 2):
            taken[which] = block_ms(steps[which], counts[which], drain)
        return taken[0], taken[1]

    gc.collect()
    gc.disable()  # a collection in one block of a pair is no property of that block
    try:
        pairs = [pair() for _ in range(NUM_PAIRS)]
        if abs(statistics.median(_gains(pairs)) - 1) < CLOSE:
            pairs += [pair() for _ in range(MORE_PAIRS)]
    finally:
        gc.enable()
    ratios = _gains(pairs)
    low, _, high = statistics.quantiles(ratios, n=4)
    return {
        "eager_ms": statistics.median(eager_ms for eager_ms, _ in pairs),
        "plan_ms": statistics.median(plan_ms for _, plan_ms in pairs),
        "gain": statistics.median(ratios),
        "gain_quartiles": [low, high],
        "pairs_ms": pairs,
    }


def _gains(pairs: list[tuple[float, float]]) -> list[float]:
    return [eager_ms / plan_ms for eager_ms, plan_ms in pairs]


def block_ms(step: Callable[[], object], count: int, drain: Callable[[], None]) -> float:
    """Return milliseconds a step over a block."""
    drain()
    start = time.perf_counter()
    for _ in range(count):
        step()
    drain()
    return (time.perf_counter() - start) / count * 1e3


def form(report: Report) -> str:
    """Return what became of the step.

    ``"captured"``: all of it is a CUDA graph; ``"compiled"``; ``"captured, compiled"``; or
    ``"eager"``. Of what was timed and is slower nothing is told. Behind it ``", update after"``
    where the graph has all but the optimizer's update.
    """
    asides = " ".join(str(d.detail) for d in report.stepped_aside)
    is_captured = bool(report.counters.get("replays"))
    is_captured = is_captured and "the step runs compiled, which is faster" not in asides
    words = ["captured"] * is_captured
    if report.counters.get("compile_graphs") and "the step is faster without" not in asides:
        words.append("compiled")
    if is_captured and "is not in the graph" in asides:
        words.append("update after")
    return ", ".join(words) or "eager"


def compiled(report: Report) -> Record:
    """Return what the compiler did; nothing where it was not asked."""
    counts = {k: v for k, v in report.counters.items() if k.startswith("compile_")}
    if not counts:
        return {}
    found = {**dict.fromkeys(COMPILED, 0), **counts}
    return {"compile": {name.removeprefix("compile_"): value for name, value in found.items()}}


def host_waits(step: Callable[[], object]) -> float:
    """Return how often a steady step makes the host wait."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(WAIT_STEPS):
                step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = sum("synchronizing CUDA operation" in str(w.message) for w in caught)
    return waits / WAIT_STEPS


def parse_plan(plan: str) -> Plan:
    """Return the plan of a preset's name or of JSON."""
    return Plan.from_json(plan) if plan.startswith("{") else Plan.preset(plan)


def one_line(error: BaseException) -> str:
    """Return an error's type and the first line of its message."""
    if isinstance(error, ModuleNotFoundError):
        return f"needs the package {error.name}"
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _built(outside: OutsideModel, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return outside.build().to(device)


def _autocast(
    loss_fn: Callable[[Any, Any], Tensor], plan: Plan, device: torch.device
) -> Callable[[Any, Any], Tensor]:
    """Return the loss function as a user runs it who wants bf16 wherever the plan does."""
    if not _wants_bf16(plan, device):
        return loss_fn
    return torch.autocast(device.type, torch.bfloat16)(loss_fn)


def _wants_bf16(plan: Plan, device: torch.device) -> bool:
    wanted = plan.precision_options.format
    return wanted == "bf16" or (wanted == "auto" and has_fast_bf16(device))


def _drain(device: torch.device) -> Callable[[], None]:
    return torch.cuda.synchronize if device.type == "cuda" else lambda: None
