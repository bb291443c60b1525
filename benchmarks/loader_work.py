"""The step that a loader is measured against, the bus, and the clock.

The step is real work of a length that is set beforehand: matrix products that stay in the cache of
the device, so that they take little from the copies beside them; and it reads every byte of the
batch, so that a batch which is not there yet, or not any more, would be noticed. The products are
launched one by one, or all at once as a CUDA graph: a step that the host can hardly launch in time
is slowed by any other thread of Python, whatever that thread does.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.loader_batches import leaves, mapped

CALIBRATIONS = 3


@dataclass(frozen=True)
class Settings:
    """How loaders are measured.

    Attributes:
        device: ``"cuda"`` or ``"cpu"``.
        smoke: Everything small: it only has to run.
        brief: Only the figures of which several processes are wanted.
        workers: Worker processes where as much as possible is to be supplied.
        peer_workers: Worker processes of each method where methods are compared.
        images: Images of a batch.
        rounds: Blocks of each method.
        block_s: Seconds that a block should take.
        deadline: On ``time.monotonic``: what has not begun by then is left out.
    """

    device: str = "cuda"
    smoke: bool = False
    brief: bool = False
    workers: int = 12
    peer_workers: int = 8
    images: int = 256
    rounds: int = 7
    block_s: float = 0.15
    deadline: float = float("inf")

    @property
    def on_cuda(self) -> bool:
        """Whether there is a bus, and copies that could run beside a step."""
        return self.device == "cuda"

    @property
    def late(self) -> bool:
        """Whether no time is left."""
        return time.monotonic() > self.deadline

    def steps(self, step_ms: float) -> int:
        """Return how many steps a block has."""
        return 3 if self.smoke else min(max(round(self.block_s * 1e3 / step_ms), 24), 2000)

    def to_dict(self) -> dict[str, Any]:
        """Return what a reader needs to know."""
        return {key: v for key, v in dataclasses.asdict(self).items() if key != "deadline"}


Row = dict[str, Any]


def attempt(settings: Settings, what: Row, measure: Callable[[], Row]) -> Row:
    """Return a row of figures, or why there are none, so that others can follow."""
    if settings.late:
        return {**what, "status": "left out", "reason": "no time was left"}
    try:
        return {**what, "status": "ran", **measure()}
    except Exception as error:
        return {**what, "status": "failed", "reason": f"{type(error).__name__}: {error}"}


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


class Work:
    """A step: it reads all of a batch, then multiplies matrices.

    Args:
        device: Where.
        size: Of the matrices; 2048 in bf16 stay in the cache of a large GPU.
        graphed: Launch the products as one CUDA graph, where there is CUDA.

    Attributes:
        graphed: May be changed at any time.
    """

    def __init__(self, device: str, size: int = 2048, *, graphed: bool = False) -> None:
        on_cuda = device == "cuda"
        size, dtype = (size, torch.bfloat16) if on_cuda else (64, torch.float32)
        draw = torch.Generator(device).manual_seed(0)
        self.device = device
        self.graphed = graphed
        self.repeats = 1
        self._graph: torch.cuda.CUDAGraph | None = None
        self.total = torch.zeros((), dtype=torch.int64, device=device)
        self._a, self._b = (
            torch.randn(size, size, device=device, dtype=dtype, generator=draw) / size**0.5
            for _ in range(2)
        )
        self._out = torch.empty_like(self._a)

    def __call__(self, batch: Any) -> None:
        """Enqueue a step."""
        self.read(batch)
        self.multiply()

    def read(self, batch: Any) -> None:
        """Add up all bytes of a batch."""
        for tensor in leaves(batch):
            flat = tensor.reshape(-1).view(torch.uint8)
            self.total += (flat.view(torch.int64) if flat.numel() % 8 == 0 else flat).sum()

    def sum_of(self, batch: Any) -> int:
        """Return what a batch adds to the total."""
        before = int(self.total)
        self.read(batch)
        return int(self.total) - before

    def multiply(self) -> None:
        """Multiply matrices."""
        if self.graphed and self._graph is not None:
            self._graph.replay()
        else:
            self._multiply_one_by_one()

    def _multiply_one_by_one(self) -> None:
        for _ in range(self.repeats):
            torch.mm(self._a, self._b, out=self._out)

    def calibrate(self, step_ms: float, batch: Any) -> float:
        """Make a step with such a batch take about ``step_ms``, or a little more.

        Returns:
            What it takes.
        """
        reading_ms = self.time_ms(lambda: self.read(batch))
        self.repeats, self._graph = 1, None
        one_ms = self.time_ms(self.multiply, 200 if self.device == "cuda" else 5)
        found_ms = 0.0
        for _ in range(CALIBRATIONS):
            self.repeats = max(1, math.ceil((step_ms - reading_ms) / one_ms))
            if self.device == "cuda":
                self._graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self._graph):
                    self._multiply_one_by_one()
            found_ms = self.time_ms(lambda: self(batch))
            # In a row, and behind the reading, a product takes another time than alone.
            one_ms = max((found_ms - reading_ms) / self.repeats, one_ms / 4)
        return found_ms

    def time_ms(self, fn: Callable[[], Any], repeats: int = 20) -> float:
        """Return what a call takes when many are enqueued, the device's time or the host's."""
        if self.device != "cuda":
            repeats = 3
        for _ in range(max(3, repeats // 4)):
            fn()
        synchronize(self.device)
        start = time.perf_counter()
        for _ in range(repeats):
            fn()
        synchronize(self.device)
        return (time.perf_counter() - start) / repeats * 1e3


def transfer_ms(batch: Any, device: str) -> float:
    """Return what the bus needs for a batch out of pinned memory, by the device's clock."""
    if device != "cuda":
        return 0.01
    pairs = [(torch.empty_like(t, device=device), t.pin_memory()) for t in leaves(batch)]
    times = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for target, source in pairs:
            target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[2:])


def resident(batch: Any, device: str, copies: int = 3) -> list[Any]:
    """Return batches that are on the device for good."""
    return [mapped(batch, lambda t: t.to(device, copy=True)) for _ in range(copies)]


def forever(batches: list[Any]) -> Iterator[Any]:
    """Yield the batches over and over."""
    while True:
        yield from batches


class Arm:
    """One way to get batches, at work: its iterator lives on between blocks.

    Args:
        batches: Yields batches without end.
        step: What is done with one.
        device: Where.
        lead: Steps before the clock starts: what waits in front of the step from standing still
            is used up by then.
        close: Called at the end.
    """

    def __init__(
        self,
        batches: Iterable[Any],
        step: Callable[[Any], Any],
        device: str,
        *,
        lead: int = 8,
        close: Callable[[], Any] | None = None,
    ) -> None:
        self._batches = iter(batches)
        self._step = step
        self._device = device
        self._lead = lead
        self._close = close
        self.num_steps = 0

    def run(self, steps: int) -> None:
        """Do steps, without waiting for the device at their end."""
        # The loop that everybody writes: the batch is alive until the next one has come.
        for _ in range(steps):
            batch = next(self._batches)
            self._step(batch)
        self.num_steps += steps

    def block_ms(self, steps: int) -> float:
        """Return the time of a step, over a block of them."""
        self.run(self._lead)
        synchronize(self._device)
        start = time.perf_counter()
        self.run(steps)
        synchronize(self._device)
        return (time.perf_counter() - start) / steps * 1e3

    def close(self) -> None:
        """End what runs in the background."""
        close = getattr(self._batches, "close", None)
        if close is not None:
            close()
        self._batches = iter(())
        if self._close is not None:
            self._close()


def drained_ms(batches: Iterator[Any], settings: Settings, skip: int, device: str = "cpu") -> float:
    """Return the time of a batch where nothing is done with it: what the supply could be.

    Args:
        batches: A loader at its beginning.
        settings: How long it may take.
        skip: Batches that are not counted, since they waited there already.
        device: To be waited for at the end.
    """
    limit_s, most = (0.2, 4) if settings.smoke else (1.5, 300)
    for _ in range(skip):
        next(batches)
    count = 0
    start = time.perf_counter()
    while count < most and (count < 4 or time.perf_counter() - start < limit_s):
        next(batches)
        count += 1
    synchronize(device)
    return (time.perf_counter() - start) / count * 1e3


def middle(values: list[float]) -> tuple[float, float, float]:
    """Return the quartiles: the low one, the median and the high one."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high
