"""What a batch costs the host: the call of ``next()``, and a step so short that it shows.

A batch that is ready ahead costs Python's time only. That hides behind the device as long as a step
takes longer than the host needs for it; where a step is one replay of a short CUDA graph it does
not, and the threads of the loader compete with the loop for the interpreter.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.loader_batches import Batches, data_loader, mapped, reserve
from benchmarks.loader_work import (
    Arm,
    Row,
    Settings,
    attempt,
    drained_ms,
    forever,
    middle,
    resident,
    synchronize,
)
from torchfast import PrefetchingLoader

TARGET_US = 50.0
STEP_MS = 0.15
WORKERS = 4
MANY = 100_000  # batches of a list: more than anyone takes
# Spinning lasts longer than the interpreter lets one thread go on, or the loader's would not run.
PAUSES_S = {"sleep": 0.002, "spin": 0.012}


def vectors(batch: int = 256) -> tuple[Tensor, Tensor]:
    """Return the batch: flat pictures of digits, and which digit each is."""
    draw = torch.Generator().manual_seed(0)
    return torch.rand(batch, 784, generator=draw), torch.randint(10, (batch,), generator=draw)


def ready(count: int = 8, *, pinned: bool = False) -> list[Any]:
    """Return as many batches as anyone takes, of a few that are in memory."""
    made = Tensor.pin_memory if pinned else torch.clone
    return [mapped(vectors(), made) for _ in range(count)] * (MANY // count)


def num_workers(settings: Settings) -> int:
    """Return how many processes load."""
    return min(WORKERS, settings.workers)


def workers_of(settings: Settings, *, pinned: bool = False, recycled: bool = False) -> Any:
    """Return a DataLoader of such batches."""
    data, workers = Batches(vectors()), num_workers(settings)
    return data_loader(data, workers=workers, pinned=pinned, recycled=recycled)


# -- The cost of next() ----------------------------------------------------------------------------


def next_rows(settings: Settings) -> Iterator[Row]:
    """Yield the cost of a batch that is ready, and of the same by hand, for comparison."""
    for upstream in ("list", "workers"):
        for reuse in (True, False):
            for pause in ("sleep", "spin") if upstream == "list" else ("sleep",):
                what = {"upstream": upstream, "reuse": reuse, "pause": pause}
                yield attempt(settings, what, lambda w=what: ahead(settings, **w))
    what = {"upstream": "by hand, pinned list", "reuse": False, "pause": "sleep"}
    yield attempt(settings, what, lambda: by_hand(settings))
    if settings.on_cuda:
        what = {"upstream": "pieces", "reuse": False, "pause": "none"}
        yield attempt(settings, what, pieces)


def ahead(settings: Settings, upstream: str, reuse: bool, pause: str) -> Row:
    """Return what ``next()`` costs when the thread has had time to fill the ring."""
    source = ready() if upstream == "list" else workers_of(settings)
    with PrefetchingLoader(source, settings.device, reuse=reuse, background=True) as loader:
        batches = iter(loader)
        row = cost(batches, settings, pause)
        batches.close()  # type: ignore[attr-defined]
    # Only after sleep the ring is full for certain.
    return {**row, "held": row["median_us"] <= TARGET_US if pause == "sleep" else None}


def by_hand(settings: Settings) -> Row:
    """Return what it costs to take a pinned batch from a list and to enqueue its two copies."""
    host = mapped(vectors(), lambda t: t.pin_memory() if settings.on_cuda else t)
    return cost(moved([host] * MANY, settings.device), settings, "sleep")


def moved(batches: Iterable[Any], device: str) -> Iterator[Any]:
    """Yield batches on the device, as one writes it by hand."""
    for inputs, labels in batches:
        yield inputs.to(device, non_blocking=True), labels.to(device, non_blocking=True)


def cost(batches: Iterator[Any], settings: Settings, pause: str) -> dict[str, float]:
    """Return what ``next()`` takes, with a pause in front of each call."""
    wait, seconds = time.sleep if pause == "sleep" else spin, PAUSES_S[pause]
    samples = 8 if settings.smoke else round(1.2 / seconds)
    taken = []
    batch = None
    for _ in range(samples + samples // 4):
        wait(seconds)
        start = time.perf_counter_ns()
        fresh = next(batches)
        taken.append((time.perf_counter_ns() - start) / 1e3)
        batch = fresh
    synchronize(settings.device)
    del batch
    settled = sorted(taken[samples // 4 :])
    return {
        "samples": samples,
        "median_us": statistics.median(settled),
        "p90_us": settled[int(0.9 * (len(settled) - 1))],
        "lowest_us": settled[0],
        "highest_us": settled[-1],
    }


def spin(seconds: float) -> None:
    """Keep the interpreter busy, as a loop that prepares a step does."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def pieces() -> Row:
    """Return what the calls cost that such a loader is made of."""
    stream, event, tensor = torch.cuda.Stream(), torch.cuda.Event(), torch.empty(784, device="cuda")
    pinned, scalars = torch.empty(2**18).pin_memory(), torch.empty(2, device="cuda")
    event.record()
    calls: dict[str, Callable[[], Any]] = {
        "event.record": event.record,
        "stream.wait_event": lambda: stream.wait_event(event),
        "event.query": event.query,
        "current_stream": lambda: torch.cuda.current_stream(tensor.device),
        "tensor.clone": tensor.clone,
        "tensor.add_": lambda: tensor.add_(1),
        "tensor.is_pinned": pinned.is_pinned,
        "tensor.unbind": scalars.unbind,
        "torch.empty_like": lambda: torch.empty_like(tensor),
    }
    found = {name: each_us(call) for name, call in calls.items()}
    torch.cuda.synchronize()
    return {"pieces_us": found, "median_us": sum(found.values()), "p90_us": max(found.values())}


def each_us(call: Callable[[], Any], repeats: int = 300) -> float:
    """Return the host's time of a call."""
    for _ in range(20):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats * 1e6


def next_line(row: Row) -> str:
    """Return a row in words."""
    start = f"{row['upstream']:20} reuse {row['reuse']!s:5} after {row['pause']:5}"
    if "pieces_us" in row:
        return "pieces: " + ", ".join(f"{name} {us:.1f}" for name, us in row["pieces_us"].items())
    held = {True: "held", False: "missed", None: ""}[row.get("held")]
    return f"{start} next() {row['median_us']:6.1f} µs, p90 {row['p90_us']:6.1f} µs {held}"


# -- A step that is one replay of a short graph ----------------------------------------------------


class GraphedTraining:
    """A training step of a small perceptron as one CUDA graph; eager where there is none.

    Args:
        device: Where.
        inner: Updates within a step, to make it as long as is wanted.
    """

    def __init__(self, device: str, inner: int = 1) -> None:
        torch.manual_seed(0)
        self._inner = inner
        first, second = nn.Linear(784, 512), nn.Linear(512, 512)
        layers = (first, nn.ReLU(), second, nn.ReLU(), nn.Linear(512, 10))
        self._model = nn.Sequential(*layers).to(device)
        self._inputs, self._labels = (t.to(device) for t in vectors())
        self._graph: Any = None
        if device == "cuda":
            self._capture()

    def _capture(self) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._train()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._train()
        self._graph = graph

    def _train(self) -> None:
        parameters = list(self._model.parameters())
        for _ in range(self._inner):
            loss = F.cross_entropy(self._model(self._inputs), self._labels)
            gradients = torch.autograd.grad(loss, parameters)
            with torch.no_grad():
                torch._foreach_add_(parameters, gradients, alpha=-1e-3)

    def __call__(self, batch: tuple[Tensor, Tensor]) -> None:
        """Copy a batch into the graph's inputs and replay it."""
        inputs, labels = batch
        self._inputs.copy_(inputs)
        self._labels.copy_(labels)
        if self._graph is None:
            self._train()
        else:
            self._graph.replay()


def short_training(settings: Settings) -> GraphedTraining:
    """Return a step of about the length that is wanted."""
    one = GraphedTraining(settings.device)
    if not settings.on_cuda:
        return one
    batch = resident(vectors(), settings.device, 1)[0]
    return GraphedTraining(settings.device, max(1, round(STEP_MS / length_ms(one, batch))))


def length_ms(step: Callable[[Any], Any], batch: Any, repeats: int = 200) -> float:
    """Return what a step takes on a batch that is on the device."""
    for _ in range(20):
        step(batch)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        step(batch)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats * 1e3


def launch_rows(settings: Settings) -> Iterator[Row]:
    """Yield how a short step fares with each upstream, handed out in each way.

    Worker processes supply less than such a step takes, however they are asked: one row shows it.
    """
    step = short_training(settings)
    for upstream in ("list", "pinned list", "recycled workers"):
        for how in ("reuse=True", "reuse=False", "in a thread", "by hand"):
            if upstream == "recycled workers" and how != "reuse=True":
                continue
            what = {"upstream": upstream, "how": how}
            yield attempt(settings, what, lambda w=what: launch_bound(settings, step, **w))


def launch_bound(settings: Settings, step: GraphedTraining, upstream: str, how: str) -> Row:
    """Return the time of a step beside that on resident data, block by block in turns."""
    device = settings.device
    recycled = upstream == "recycled workers"
    workers = num_workers(settings) if upstream.endswith("workers") else 0
    pinned = upstream == "pinned list" and settings.on_cuda
    source: Any = workers_of(settings, recycled=recycled) if workers else ready(pinned=pinned)
    supply_ms = drained_ms(iter(source), settings, 2 * reserve(workers)) if workers else 0.0
    control = Arm(forever(resident(vectors(), device)), step, device, lead=_lead(settings))
    arm = _arm(settings, source, step, how, workers)
    steps = settings.steps(STEP_MS)
    try:
        arm.run(reserve(workers) + 4)
        alone, fed = [], []
        for _ in range(settings.rounds):
            alone.append(control.block_ms(steps))
            fed.append(arm.block_ms(steps))
    finally:
        arm.close()
    low, eta, high = middle([a / b for a, b in zip(alone, fed, strict=True)])
    resident_ms = middle(alone)[1]
    return {
        "steps": steps,
        "workers": workers,
        "supply_ms": supply_ms,
        "supply_over_demand": resident_ms / supply_ms if supply_ms else None,
        "resident_ms": resident_ms,
        "loader_ms": middle(fed)[1],
        "more_us": (middle(fed)[1] - resident_ms) * 1e3,
        "eta": eta,
        "eta_quartiles": [low, high],
        "resident_blocks_ms": alone,
        "loader_blocks_ms": fed,
    }


def _lead(settings: Settings, workers: int = 0) -> int:
    return 2 if settings.smoke else reserve(workers, 2) + 50


def _arm(settings: Settings, source: Any, step: GraphedTraining, how: str, workers: int) -> Arm:
    device, lead = settings.device, _lead(settings, workers)
    if how != "by hand":
        loader = PrefetchingLoader(
            source,
            device,
            reuse=how != "reuse=False",
            background=how == "in a thread" or "auto",
        )
        return Arm(loader, step, device, lead=lead, close=loader.close)
    if workers:
        source = workers_of(settings, pinned=settings.on_cuda)
    return Arm(moved(source, device), step, device, lead=lead)


def launch_line(row: Row) -> str:
    """Return a row in words."""
    low, high = row["eta_quartiles"]
    supply = row["supply_over_demand"]
    known = "supply ready" if supply is None else f"supply x{supply:.2f}"
    return (
        f"{row['upstream']:16} {row['how']:11} step {row['resident_ms']:.4f} -> "
        f"{row['loader_ms']:.4f} ms ({row['more_us']:+.1f} µs), eta {row['eta']:.3f} "
        f"[{low:.3f} {high:.3f}], {known}"
    )
