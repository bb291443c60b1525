"""What a plan does for models that nobody here wrote: does it run, hold parity, and gain.

    PYTHONPATH=. python benchmarks/sweep.py [--plan fast] [--models REGEX] [--device cuda]
                                            [--limit-s 60] [--out FILE] [--fresh]

Each model of ``benchmarks/outside_models.py`` runs in a process of its own, so that one that hangs
or crashes costs only itself. Against the plain eager step, under the same autocast:

- parity: nine updates with accumulation, clipping and a schedule; to the bit under ``eager`` and
  ``exact``, within a tolerance under any other plan; and how many of them were replays of a graph;
- gain: blocks of steps of both, in random order within a pair, the device drained around each;
  the figure is the median over pairs of the ratio of their times;
- how often a step makes the host wait, as torch's sync debug mode counts it (CUDA only).

``--out`` is rewritten after each model. A second run skips what the file already holds for the same
plan, device, torch and commit; ``--fresh`` measures it again. Uncommitted changes are not told
apart.
"""

from __future__ import annotations

import argparse
import gc
import math
import multiprocessing
import os
import random
import re
import signal
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import results
from benchmarks.outside_models import MODELS, OutsideModel, optimizer, scheduler, without_dropout
from torchfast import ParityError, Plan, Trainer
from torchfast._core.batches import to_device
from torchfast._core.decisions import Report
from torchfast._core.device import has_fast_bf16
from torchfast.testing import Tolerance, assert_parity, plain_step

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
NUM_PAIRS = 10
BLOCK_S = 0.05
WAIT_STEPS = 10

# --- one model, in its own process --------------------------------------------------------------


def measure(outside: OutsideModel, plan: str, device: str) -> Iterator[Record]:
    """Yield what is found out about one model, part by part."""
    # Parity first: cuBLAS reads once, at its first call, whether its workspace is deterministic.
    yield {"parity": parity(outside, plan, device)}
    yield from speed(outside, plan, torch.device(device))


def parity(outside: OutsideModel, plan: str, device: str) -> Record:
    """Return whether the plan trains the model that the plain loop trains."""
    exact = plan in ("eager", "exact")
    generator = torch.Generator().manual_seed(0)
    try:
        result = assert_parity(
            outside.build if exact else lambda: without_dropout(outside.build()),
            fused_optimizer if exact else close_optimizer,
            outside.loss_fn,
            [outside.batch(generator) for _ in range(2 * PARITY_STEPS - 1)],
            parse_plan(plan),
            accumulate=2,
            max_grad_norm=MAX_GRAD_NORM,
            lr_scheduler=scheduler,
            device=device,
            tolerance=None if exact else UNLIMITED,
        )
    except ParityError as error:
        return {"held": False, "exact": False, "reason": one_line(error)}
    if not all(map(math.isfinite, result.losses)):
        raise ValueError(f"the plain loop's losses are not finite: {result.losses}")
    return {
        "held": result.loss_error <= TOLERANCE.loss and result.update_error <= TOLERANCE.update,
        "exact": result.exact,
        "loss_error": result.loss_error,
        "update_error": result.update_error,
        "losses": result.losses,
        "replays": result.report.counters.get("replays", 0),
    }


def speed(outside: OutsideModel, plan: str, device: torch.device) -> Iterator[Record]:
    """Yield times and gain, then the form of the plan's step and the host waits."""
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
    steps = (eager, partial(trainer.step, prefetched))
    yield compare(*steps, _drain(device))
    report = trainer.report()
    yield {"form": form(report), "stepped_aside": [str(d.detail) for d in report.stepped_aside]}
    if device.type == "cuda":
        waits = [host_waits(step) for step in steps]
        yield {"host_waits": dict(zip(("eager", "plan"), waits, strict=True))}


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
    pairs = []
    gc.collect()
    gc.disable()  # a collection in one block of a pair is no property of that block
    try:
        for _ in range(NUM_PAIRS):
            pair = [0.0, 0.0]
            for which in shuffled.sample((0, 1), 2):
                pair[which] = block_ms(steps[which], counts[which], drain)
            pairs.append(pair)
    finally:
        gc.enable()
    ratios = [eager_ms / plan_ms for eager_ms, plan_ms in pairs]
    low, _, high = statistics.quantiles(ratios, n=4)
    return {
        "eager_ms": statistics.median(eager_ms for eager_ms, _ in pairs),
        "plan_ms": statistics.median(plan_ms for _, plan_ms in pairs),
        "gain": statistics.median(ratios),
        "gain_quartiles": [low, high],
        "pairs_ms": pairs,
    }


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

    ``"captured"``: all of it is a CUDA graph, compiled or not; ``"captured, update after"``: all
    but the optimizer's; ``"compiled"``; or ``"eager"``.
    """
    if report.counters.get("replays"):
        outside = any("is not in the graph" in d.detail for d in report.stepped_aside)
        return "captured, update after" if outside else "captured"
    applied = {d.lever for d in report.decisions if d.outcome == "applied"}
    return "compiled" if "compile" in applied else "eager"


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
    wanted = plan.precision_options.format
    if not (wanted == "bf16" or (wanted == "auto" and has_fast_bf16(device))):
        return loss_fn
    return torch.autocast(device.type, torch.bfloat16)(loss_fn)


def _drain(device: torch.device) -> Callable[[], None]:
    return torch.cuda.synchronize if device.type == "cuda" else lambda: None


# --- all models, each in a process --------------------------------------------------------------


def start_server(device: str) -> Any:
    """Return a context whose processes start with everything imported, CUDA left alone.

    Where an import touches CUDA all the same (torchao's does), its forks could not use the device:
    then each process imports for itself, which takes longer.
    """
    # With this set, torch asks the driver's library for devices; otherwise a package that asks
    # torch whether there is one, at its import, would leave every fork without CUDA.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is downloaded, kernels included
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch._dynamo", "timm", "transformers.modeling_utils", "benchmarks.sweep"]
    )
    # This first one also waits for the imports, which count against no model's limit.
    first = context.Process(target=_use_device, args=(device,))
    first.start()
    first.join()
    return context if first.exitcode == 0 else multiprocessing.get_context("spawn")


def _use_device(device: str) -> None:
    torch.zeros((), device=device)


def run_apart(
    context: Any, outside: OutsideModel, plan: str, device: str, limit_s: float
) -> Record:
    """Return the record of one model, measured in a process that is killed after the limit."""
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_record, args=(sender, outside, plan, device, limit_s))
    record: Record = {}
    begun = time.monotonic()
    try:
        process.start()
        sender.close()  # so that the end of the process is the end of what is received
        while "status" not in record:
            if receiver.poll(max(0.0, begun + limit_s - time.monotonic())):
                record |= receiver.recv()
            else:
                record |= _failed(f"not done in {limit_s:g} s")
    except (EOFError, OSError):
        process.join()
        record |= _failed(_death(process.exitcode))
    finally:
        if process.pid is not None:
            process.kill()
            process.join()
    return {**record, "wall_s": time.monotonic() - begun}


def _send_record(
    sender: Connection, outside: OutsideModel, plan: str, device: str, limit_s: float
) -> None:
    os.setsid()  # Ctrl-C is the sweep's to handle, which then kills this process
    signal.alarm(math.ceil(limit_s) + 5)  # should nobody be left to do so
    with sender:
        try:
            for part in measure(outside, plan, device):
                sender.send(part)
            sender.send({"status": "ran"})
        except Exception as error:
            sender.send(_failed(one_line(error)))


def _failed(reason: str) -> Record:
    return {"status": "failed", "reason": reason}


def _death(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"crashed with signal {-exit_code}"
    return f"ended with exit code {exit_code}"


def sweep(
    models: Mapping[str, OutsideModel],
    plan: str = "fast",
    device: str = "cpu",
    *,
    limit_s: float = 60.0,
    out: Path | None = None,
    fresh: bool = False,
) -> dict[str, Record]:
    """Measure every model, print a line for each, and keep the result file up to date.

    Returns:
        The records of ``models``; the file may hold those of other models as well.

    Raises:
        SystemExit: The file was measured by another commit, elsewhere or under other settings.
    """
    settings = {"plan": plan, "device": device, "limit_s": limit_s, "num_pairs": NUM_PAIRS}
    earlier = results.resumed(out, {"settings": settings}) if out else None
    held: dict[str, Record] = earlier["models"] if earlier else {}
    context = None
    for name, outside in models.items():
        if name in held and not fresh:
            continue
        context = context or start_server(device)
        held[name] = run_apart(context, outside, plan, device, limit_s)
        print(line(name, held[name]), flush=True)
        if out:
            results.write(out, {"settings": settings, "models": held})
    return {name: held[name] for name in models}


def line(name: str, record: Record) -> str:
    """Return a model's line of the printed table."""
    if record["status"] == "failed":
        return f"{name:28} failed: {record['reason']}"
    held = record["parity"]["held"]
    low, high = record["gain_quartiles"]
    waits = record.get("host_waits")
    return (
        f"{name:28} parity {'held' if held else 'NOT held'}  {record['form']:8}  "
        f"{record['eager_ms']:8.2f} -> {record['plan_ms']:8.2f} ms  "
        f"gain {record['gain']:.2f} [{low:.2f}, {high:.2f}]"
        + (f"  host waits {waits['eager']:g} -> {waits['plan']:g}" if waits else "")
    )


def summary(records: Mapping[str, Record]) -> str:
    """Return the last line of the printed table."""
    ran = [record for record in records.values() if record["status"] == "ran"]
    text = f"ran {len(ran)} of {len(records)}"
    if ran:
        forms = [record["form"] for record in ran]
        text += (
            f"; parity held {sum(record['parity']['held'] for record in ran)}"
            f"; median gain {statistics.median(record['gain'] for record in ran):.2f}; "
        )
        text += ", ".join(
            f"{kind} {sum(form.startswith(kind) for form in forms)}"
            for kind in ("captured", "compiled", "eager")
        )
    return text


def main() -> None:
    """Sweep, and print a summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", default="fast", help="a preset's name, or a plan as JSON")
    parser.add_argument("--models", default="", metavar="REGEX")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--limit-s", type=float, default=60.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--fresh", action="store_true")
    args = parser.parse_args()
    parse_plan(args.plan)  # refuses an unknown one before anything starts
    chosen = {name: model for name, model in MODELS.items() if re.search(args.models, name)}
    # As Ctrl-C does: unwind, and kill the model that runs.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        records = sweep(
            chosen, args.plan, args.device, limit_s=args.limit_s, out=args.out, fresh=args.fresh
        )
    except KeyboardInterrupt:
        sys.exit("interrupted; what was measured is kept")
    print(summary(records))


if __name__ == "__main__":
    main()
