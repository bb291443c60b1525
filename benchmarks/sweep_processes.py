"""The models of a sweep, each in a process of its own, some of them at a time."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.outside_models import OutsideModel
from benchmarks.sweep_model import Record, measure, one_line
from benchmarks.turns import Turns


class Order(NamedTuple):
    """How every model is measured.

    Attributes:
        plan: A preset's name, or a plan as JSON.
        device: Where.
        limit_s: How long a model may take, what it waits for others left out.
        compile_threads: With how many threads each compiles; torch's own number, if it is None.
    """

    plan: str
    device: str
    limit_s: float
    compile_threads: int | None = None


def start_server(device: str) -> Any:
    """Return a context whose processes start with everything imported, CUDA left alone.

    Where an import touches CUDA all the same, its forks could not use the device: then each process
    imports for itself, which takes longer.
    """
    # With this set, torch asks the driver's library for devices; otherwise a package that asks
    # torch whether there is one, at its import, would leave every fork without CUDA.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is downloaded, kernels included
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.preloaded"])
    # This first one also waits for the imports, which count against no model's limit.
    first = context.Process(target=_use_device, args=(device,))
    first.start()
    first.join()
    if first.exitcode == 0:
        return context
    print(
        f"slow: a fork could not use {device}, since a package that is imported beforehand touches "
        "CUDA; each model's process imports for itself",
        flush=True,
    )
    return multiprocessing.get_context("spawn")


def _use_device(device: str) -> None:
    torch.zeros((), device=device)


def run_all(
    context: Any, models: Mapping[str, OutsideModel], order: Order, jobs: int = 1
) -> Iterator[tuple[str, Record]]:
    """Yield the name and the record of each model, as they are done.

    Args:
        context: Makes the processes.
        models: What is measured.
        order: How.
        jobs: How many processes at a time. Those that time something do so alone.
    """
    waiting = list(models.items())
    running: list[Run] = []
    with tempfile.TemporaryDirectory(prefix="sweep-") as folder:
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    running.append(Run(context, *waiting.pop(0), order, Path(folder)))
                    running[-1].start()
                soonest = min(run.seconds_left() for run in running)
                receivers = [run.receiver for run in running]
                connection.wait(receivers, None if soonest == math.inf else soonest)
                for run in running:
                    run.look()
                for run in [run for run in running if run.is_done]:
                    running.remove(run)
                    run.stop()
                    yield run.name, {**run.record, "wall_s": run.own_s}
        finally:
            for run in running:
                run.stop()


class Run:
    """One model in a process, which is killed after the limit.

    Args:
        context: Makes the process.
        name: The model's.
        outside: The model.
        order: How it is measured.
        folder: For what the processes share, and for what each one's compiler keeps.
    """

    def __init__(
        self, context: Any, name: str, outside: OutsideModel, order: Order, folder: Path
    ) -> None:
        self.name = name
        self.record: Record = {}
        self._limit_s = order.limit_s
        self._begun = time.monotonic()
        self._waited_s = 0.0
        self._waiting_since: float | None = None
        self._ended: float | None = None
        self.receiver, self._sender = context.Pipe(duplex=False)
        given = (self._sender, outside, order, folder)
        self._process = context.Process(target=_send_record, args=given)

    def start(self) -> None:
        """Start the process."""
        self._begun = time.monotonic()
        self._process.start()
        self._sender.close()  # so that the end of the process is the end of what is received

    @property
    def is_done(self) -> bool:
        """Whether the record is whole."""
        return "status" in self.record

    @property
    def own_s(self) -> float:
        """The seconds that it took, without those that it waited for others."""
        now = time.monotonic() if self._ended is None else self._ended
        waiting_s = 0.0 if self._waiting_since is None else now - self._waiting_since
        return now - self._begun - self._waited_s - waiting_s

    def seconds_left(self) -> float:
        """Return what is left of the limit, which does not run while it waits for others."""
        return math.inf if self._waiting_since else max(0.0, self._limit_s - self.own_s)

    def look(self) -> None:
        """Take what has come, and see whether the time is over."""
        try:
            while not self.is_done and self.receiver.poll():
                self._take(self.receiver.recv())
        except (EOFError, OSError):
            self._process.join()
            self.record |= _failed(_death(self._process.exitcode))
        if not self.is_done and self.seconds_left() == 0:
            self.record |= _failed(f"not done in {self._limit_s:g} s")

    def _take(self, message: Record | bool) -> None:
        if not isinstance(message, bool):
            self.record |= message
        elif message:
            self._waiting_since = time.monotonic()
        elif self._waiting_since is not None:
            self._waited_s += time.monotonic() - self._waiting_since
            self._waiting_since = None

    def stop(self) -> None:
        """End the process, with the compilers that it has started."""
        if self._ended is None:
            self._ended = time.monotonic()
        if self._process.pid is not None:
            # It leads a group of its own once it runs; the group may have outlived it.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
            self._process.join()
        self.receiver.close()


def _send_record(
    sender: connection.Connection, outside: OutsideModel, order: Order, folder: Path
) -> None:
    os.setsid()  # Ctrl-C is the sweep's to handle, which then kills this process
    # A cache of its own, so that what is compiled is compiled here.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="compiled-", dir=folder)
    if order.compile_threads is not None:
        from torch._inductor import config

        config.compile_threads = order.compile_threads
    left_s = math.ceil(order.limit_s) + 5
    signal.alarm(left_s)  # should nobody be left to kill it

    def tell(waits: bool) -> None:
        nonlocal left_s
        if waits:
            left_s = signal.alarm(0)
        else:
            signal.alarm(left_s)
        sender.send(waits)

    turns = Turns(folder / "turns", tell)
    with sender:
        try:
            for part in measure(outside, order.plan, order.device, turns):
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
