"""A training in a process of its own, with nothing in its compiler's cache."""

from __future__ import annotations

import itertools
import os
import signal
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import compilation_time_metrics

from benchmarks.sweep_model import compiled, form, one_line
from benchmarks.workloads import Size, Workload, workload
from benchmarks.workloads.definition import blocks
from benchmarks.workloads.gpt import GPT, GPTSize
from benchmarks.workloads.tokens import language_workload, token_batches
from torchfast import Plan, Trainer
from torchfast._core.batches import to_device

Row = dict[str, Any]

DEEP = "deep"
DEEP_SIZES: dict[Size, GPTSize] = {
    "full": GPTSize(24, 1024, 16, vocabulary=50_304, batch=8, context=1024, lr=3e-4),
    "smoke": GPTSize(6, 16, 2, vocabulary=64, batch=2, context=16, lr=3e-3),
}
# A graph is captured at the fourth step, and checked at the next ones; after ten of them what was
# compiled is kept.
READY_STEPS = 12
LEAST_SPAN_S = 0.01


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a process trains.

    Attributes:
        workload: Its name; ``"deep"`` is a GPT of 24 blocks.
        plan: As JSON.
        size: ``"full"`` or ``"smoke"``.
        device: ``"cuda"`` or ``"cpu"``.
        seed: Of the weights.
        num_losses: Steps on as many batches, whose losses are returned; 0: the workload's own
            batches, and no losses.
    """

    workload: str
    plan: str
    size: Size = "full"
    device: str = "cuda"
    seed: int = 0
    num_losses: int = 0


class Failed(Exception):  # noqa: N818 - a result, not an error of the measurement
    """Why a process gave no figures."""


class Training:
    """A training in a process, which stands still between its turns.

    Args:
        context: Makes the process.
        work: What it trains.
        scratch: Where its compiler's cache goes, empty at first.
    """

    def __init__(self, context: Any, work: Work, scratch: Path) -> None:
        self._pipe, far_end = context.Pipe()
        self._process = context.Process(target=_run, args=(work, far_end, scratch))
        self._process.start()
        far_end.close()

    def first_steps(self, limit_s: float) -> Row:
        """Return what the first steps took and what was compiled, or raise `Failed`."""
        return self._answer(limit_s)

    def step_ms(self, steps: int, limit_s: float = 120.0) -> float:
        """Return the milliseconds of each of some steps."""
        self._pipe.send(steps)
        return float(self._answer(limit_s)["ms"])

    def _answer(self, limit_s: float) -> Row:
        if not self._pipe.poll(max(0.0, limit_s)):
            raise Failed(f"not done in {limit_s:.0f} s")
        try:
            answer: Row = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(5)
            raise Failed(f"its process ended with {self._process.exitcode}") from None
        if "failed" in answer:
            raise Failed(answer["failed"])
        return answer

    def stop(self) -> None:
        """End the process, with the compilers that it has started."""
        self._pipe.close()
        self._process.join(2)  # it ends by itself, unless it is in the middle of something
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()


def workload_of(name: str, size: Size) -> Workload:
    """Return a workload of the yardstick, or the deep one."""
    if name != DEEP:
        return workload(name, size)
    at = DEEP_SIZES[size]
    return language_workload(name, "deep GPT", partial(GPT, at), at, lr=at.lr, regions=blocks)


def _run(work: Work, pipe: connection.Connection, scratch: Path) -> None:
    os.setsid()  # whoever kills this process can kill its compilers with it
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="compiled-", dir=scratch)
    os.environ.pop("TRITON_CACHE_DIR", None)  # the compiler puts it beside its own
    try:
        with suppress(EOFError):
            _train(work, pipe)
    except Exception as error:
        pipe.send({"failed": one_line(error)[:2000]})
    finally:
        pipe.close()


def _train(work: Work, pipe: connection.Connection) -> None:
    import_compiler()  # before the clock starts
    device = torch.device(work.device)
    if work.size == "smoke":
        torch.set_num_threads(1)  # threads that compete for few cores take the time of a test
    load = workload_of(work.workload, work.size)
    torch.manual_seed(work.seed)
    model = load.build().to(device)
    batches = itertools.cycle([to_device(batch, device) for batch in _batches(load, work)])
    _drain(device)

    started = time.perf_counter()
    trainer = Trainer(
        model,
        torch.optim.AdamW(model.parameters(), lr=load.lr),
        load.loss_fn,
        Plan.from_json(work.plan),
        max_grad_norm=1.0,
    )
    losses = [trainer.step(next(batches))]
    _drain(device)
    first_step_s = time.perf_counter() - started
    while len(losses) < max(READY_STEPS, work.num_losses):
        losses.append(trainer.step(next(batches)))
    _drain(device)
    row = {
        "first_step_s": first_step_s,
        "first_steps_s": time.perf_counter() - started,
        **_told(trainer, work, losses),
    }
    pipe.send(row)
    while True:
        steps = pipe.recv()
        _drain(device)
        started = time.perf_counter()
        for _ in range(steps):
            trainer.step(next(batches))
        _drain(device)
        pipe.send({"ms": (time.perf_counter() - started) / steps * 1e3})


def import_compiler() -> None:
    """Import what torch imports of its compiler, some of it in the middle of the first compilation.

    A cold start and a warm one have that in common, and it is no part of either: where Python keeps
    no compiled files it takes as long as to find a whole model in the cache.
    """
    import torch._inductor.compile_fx  # noqa: F401
    from torch._dynamo.backends import registry
    from torch._inductor.codegen import common

    registry._lazy_import()
    common.init_backend_registration()


def _told(trainer: Trainer, work: Work, losses: list[Tensor]) -> Row:
    report = trainer.report()
    told: Row = {"form": form(report), **compiled(report)}
    told["stepped_aside"] = [str(d.detail) for d in report.stepped_aside if d.lever == "compile"]
    # What torch timed of it, one within the other: where a start spends its time.
    totals = {name: sum(each) for name, each in compilation_time_metrics.items()}
    told["spans_s"] = {name: round(s, 3) for name, s in totals.items() if s >= LEAST_SPAN_S}
    if work.num_losses:
        told["losses"] = torch.stack(losses).tolist()
    return told


def _batches(load: Workload, work: Work) -> list[tuple[Tensor, ...]]:
    if not work.num_losses:
        return load.batches()
    tokens, _ = load.batches()[0]
    # As many as there are steps, so that nothing is learnt by heart.
    return token_batches(
        vocabulary=load.build().get_parameter("embed.weight").shape[0],
        batch=tokens.shape[0],
        context=tokens.shape[1],
        num_batches=work.num_losses,
    )


def _drain(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
