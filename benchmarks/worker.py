"""One method on one workload, in a process of its own.

Every loop here, other people's included, is a loop that calls ``job.tick(loss)`` after each step.
So the clock is in the tick: it counts down the steps that were asked for, then looks at the watch,
reports, and waits until the next block is wanted. Between blocks the loop stands still inside its
own callback, whatever it is, while the other methods have the machine to themselves.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import os
import tempfile
import time
import warnings
from collections.abc import Generator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import trace
from benchmarks.cores import stay_on_cores
from benchmarks.job import Job
from benchmarks.methods import Method
from benchmarks.workloads import workload

SEED = 0
# An allocator's cache in bytes beyond which it is given back between turns. The steps before a
# measured block fill it again.
LARGE_CACHE = 4 * 2**30


@dataclass(frozen=True)
class Order:
    """What a worker is to train.

    Attributes:
        workload: Its name.
        method: How.
        size: ``"full"`` or ``"smoke"``.
        device: ``"cuda"`` or ``"cpu"``.
        train_steps: The steps of the warm-up, whose losses are kept.
        cache: The folder for what compilers keep.
        cores: On how many of the machine's cores to stay after the warm-up; 0: on any.
        slowdown: A planted slowdown, as a part of the step: 0.03 makes it 3 % slower.
    """

    workload: str
    method: Method
    size: str
    device: str
    train_steps: int
    cache: Path
    cores: int = 0
    slowdown: float = 0.0


@dataclass(frozen=True)
class Block:
    """Run so many steps unmeasured, then so many bursts of steps, with no wait between them."""

    lead: int
    bursts: int
    burst_steps: int


@dataclass(frozen=True)
class Trace:
    """Run so many steps under the profiler."""

    steps: int


def run(order: Order, pipe: Connection) -> None:
    """Train, and answer what comes through the pipe, until nobody is at its other end."""
    os.setsid()  # whoever kills this process can kill its compilers and loaders with it
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(order.cache)
    # A trace of CUDA graphs needs the tracing library to stay loaded.
    os.environ.update(DISABLE_CUPTI_LAZY_REINIT="1", TEARDOWN_CUPTI="0")
    warnings.filterwarnings("ignore")  # other people's; the methods are what their guides say
    try:
        _train(order, pipe)
    except EOFError:
        pass
    except Exception as error:
        first_line = (str(error).strip() or "no message").splitlines()[0]
        pipe.send({"failed": f"{type(error).__name__}: {first_line}"[:300]})
    finally:
        pipe.close()
        # Loops of other people's are left in the middle; no time is lost on their goodbyes.
        os._exit(0)


def _train(order: Order, pipe: Connection) -> None:
    device = torch.device(order.device)
    if device.type == "cpu":
        torch.set_num_threads(1)  # the processes of a round would fight for the cores
    if order.method.needs is not None:
        importlib.import_module(order.method.needs)
    pipe.recv()  # until told to go on, nothing is taken of the device
    job_workload = workload(order.workload, order.size)
    torch.manual_seed(SEED)
    with device:
        model = job_workload.build()
    clock = Clock(order, pipe, device)
    job = Job(job_workload, model, device, clock.tick)
    if job_workload.loader is None:
        _ = job.batches  # made before the clock starts
    drain(device)
    pipe.send({"num_parameters": sum(parameter.numel() for parameter in model.parameters())})
    pipe.recv()
    clock.start()
    order.method.train(job)
    raise RuntimeError("the loop ended by itself")


def drain(device: torch.device) -> None:
    """Wait until the device has done all that it was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize()


class Clock:
    """Measures a loop from inside.

    ``tick`` costs a subtraction and a comparison within a block. Everything else happens in
    ``_script``, which yields how many steps it wants and is resumed with the last one's loss.
    """

    def __init__(self, order: Order, pipe: Connection, device: torch.device) -> None:
        self._order = order
        self._pipe = pipe
        self._device = device
        self._script = self._measure()
        self._steps_left = 0
        self._slowdown = Slowdown(0.0, device)

    def start(self) -> None:
        """Start the watch: the method's first line comes next."""
        self._steps_left = next(self._script)

    def tick(self, loss: Tensor) -> None:
        """Count a step."""
        if self._slowdown.seconds:
            self._slowdown.apply()
        self._steps_left -= 1
        if self._steps_left == 0:
            self._steps_left = self._script.send(loss)

    def _measure(self) -> Generator[int, Tensor, None]:
        yield from self._warm_up()
        if self._order.cores:
            stay_on_cores(self._order.cores)
        if self._order.slowdown:
            yield from self._plant()
        gc.disable()  # a collection in one method's block is no property of that method
        gc.collect()
        gc.freeze()  # what was imported and built; collections between turns took most of the time
        while True:
            request = self._pipe.recv()
            gc.collect()
            if isinstance(request, Block):
                yield from self._block(request)
            else:
                yield from self._trace(request)

    def _warm_up(self) -> Generator[int, Tensor, None]:
        started = time.perf_counter()
        losses = []
        for _ in range(self._order.train_steps):
            loss = yield 1
            losses.append(loss.detach().clone())  # a graph may write the next one over it
        drain(self._device)
        elapsed = time.perf_counter() - started
        self._send(elapsed_s=elapsed, losses=[loss.item() for loss in losses], **self._peaks())

    def _block(self, block: Block) -> Generator[int, Tensor, None]:
        yield block.lead
        drain(self._device)
        started = time.perf_counter()
        marks = [Mark(self._device)]
        for _ in range(block.bursts):
            yield block.burst_steps
            marks.append(Mark(self._device))
        launched = time.perf_counter()
        drain(self._device)
        ended = time.perf_counter()
        per_step = 1e3 / (block.bursts * block.burst_steps)
        best = min(start.ms_until(end) for start, end in itertools.pairwise(marks))
        self._send(
            ms=(ended - started) * per_step,
            host_ms=(launched - started) * per_step,
            best_ms=best / block.burst_steps,
        )

    def _trace(self, request: Trace) -> Generator[int, Tensor, None]:
        if self._device.type != "cuda":
            self._send(device_ms=None, host_syncs=None, num_kernels=None, num_launches=None)
            return
        with tempfile.TemporaryDirectory() as folder:
            profiler = trace.profiler()
            drain(self._device)
            profiler.start()
            yield request.steps
            drain(self._device)
            profiler.stop()
            file = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(file))
            self._send(**trace.read(file, request.steps))

    def _plant(self) -> Generator[int, Tensor, None]:
        steps = 20
        drain(self._device)
        started = time.perf_counter()
        yield steps
        drain(self._device)
        step_s = (time.perf_counter() - started) / steps
        self._slowdown = Slowdown(self._order.slowdown * step_s, self._device)

    def _peaks(self) -> dict[str, int | None]:
        if self._device.type != "cuda":
            return {"peak_bytes": None, "reserved_bytes": None}
        return {
            "peak_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": torch.cuda.max_memory_reserved(),
        }

    def _send(self, **figures: Any) -> None:
        """Send figures, and let go of device memory that the others may need."""
        if self._device.type == "cuda":
            if torch.cuda.memory_reserved() > LARGE_CACHE:
                torch.cuda.empty_cache()
            figures["free_bytes"] = torch.cuda.mem_get_info()[0]
        self._pipe.send(figures)


class Mark:
    """A moment in the device's work, or in the host's where there is no device."""

    def __init__(self, device: torch.device) -> None:
        self._host_s = time.perf_counter()
        self._event = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()

    def ms_until(self, later: Mark) -> float:
        """Return the time between two moments, both of which must be past."""
        if self._event is None:
            return (later._host_s - self._host_s) * 1e3
        return self._event.elapsed_time(later._event)

    def wait(self) -> None:
        """Wait until the moment is past."""
        if self._event is not None:
            self._event.synchronize()


class Slowdown:
    """Makes a step longer by a stated time, whether the host or the device is what it waits for."""

    def __init__(self, seconds: float, device: torch.device) -> None:
        self.seconds = seconds
        self._cycles = 0
        if seconds and device.type == "cuda":
            self._cycles = int(seconds * self._cycles_per_second())

    @staticmethod
    def _cycles_per_second() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        cycles = 50_000_000
        for _ in range(2):  # the first raises the clock
            start.record()
            torch.cuda._sleep(cycles)
            end.record()
            end.synchronize()
        return cycles / (start.elapsed_time(end) * 1e-3)

    def apply(self) -> None:
        """Keep both waiting."""
        if self._cycles:
            torch.cuda._sleep(self._cycles)
        until = time.perf_counter() + self.seconds
        while time.perf_counter() < until:
            pass
