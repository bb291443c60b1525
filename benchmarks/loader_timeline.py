"""What the host, the bus and the device do at the same time, with a naive loop and with the loader.

    PYTHONPATH=. python benchmarks/loader_timeline.py --out FILE [--svg SVG]
    PYTHONPATH=. python benchmarks/loader_timeline.py --draw FILE SVG

One job, with samples that take 5 ms each to load, twice: as a loop is first written, with the
DataLoader in its own process and a copy that waits; and through the loader, with worker processes.
Copies and kernels are from the profiler's record of the device, loading from the host's clock.
``--draw`` makes the picture from the figures, and needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import record_function
from torch.utils.data import Dataset, get_worker_info

from benchmarks import loader_timeline_plot, results
from benchmarks.loader_batches import (
    check_shared_memory,
    copied,
    data_loader,
    images,
    mapped,
    num_bytes,
)
from benchmarks.loader_overlap import Span, traced, union
from benchmarks.loader_work import Row, Settings, Work, attempt, resident, synchronize
from torchfast import PrefetchingLoader

SAMPLES, SAMPLE_S = 4, 0.005
WORKERS = 4
STEP_MS = 20.0
STEPS, LEAD, SHOWN_MS = 12, 16, 200.0
MARK = "user_annotation", "the window begins"
# Kernels with less between them are drawn as one.
GAP_US = 30.0


class SlowSamples(Dataset[Any]):
    """Each batch takes as long as its samples do, and tells when it was loaded and by whom.

    Args:
        template: What is loaded.
        sample_s: How long a sample takes.
    """

    def __init__(self, template: Any, sample_s: float) -> None:
        self._template = template
        self._sample_s = sample_s
        self._prepared: Any = None

    def __len__(self) -> int:
        return 2**40

    def __getitems__(self, indices: list[int]) -> dict[str, Any]:
        """Return a batch."""
        start = time.perf_counter()
        if self._prepared is None:
            self._prepared = mapped(self._template, copied)
        time.sleep(SAMPLES * self._sample_s)
        worker = get_worker_info()
        lane = 0 if worker is None else worker.id
        # The clock is that of all processes of a machine.
        return {"data": self._prepared, "loaded": (lane, start, time.perf_counter())}


class Timeline:
    """Runs the job in one way or the other and notes who did what when."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        batch = images(4, 32) if settings.smoke else images(640)
        check_shared_memory(num_bytes(batch), WORKERS)
        self._bytes = num_bytes(batch)
        self._data = SlowSamples(batch, 0.0005 if settings.smoke else SAMPLE_S)
        self._work = Work(settings.device, 4096)
        step_ms = 1.0 if settings.smoke else STEP_MS
        self._work.calibrate(step_ms, resident(batch, settings.device, 1)[0])

    def naive(self) -> Row:
        """Return what happens when loading, copying and computing are written one after another."""
        return self._panel(self._moved(data_loader(self._data, workers=0)))

    def prefetching(self) -> Row:
        """Return what happens with the loader, as it is by default."""
        workers = min(WORKERS, self.settings.workers)
        upstream = data_loader(self._data, workers=workers)
        with PrefetchingLoader(upstream, self.settings.device) as loader:
            return self._panel(iter(loader))

    def _moved(self, batches: Iterable[Any]) -> Iterator[Any]:
        for batch in batches:
            with record_function("copy"):
                moved = mapped(batch, lambda t: t.to(self.settings.device, copy=True))
            yield moved

    def _panel(self, batches: Iterator[Any]) -> Row:
        loaded: list[tuple[int, float, float]] = []
        steps, lead = (3, 4) if self.settings.smoke else (STEPS, LEAD)
        self._run(batches, lead, loaded)
        synchronize(self.settings.device)
        begun: list[float] = []

        def measured() -> None:
            self._run(batches, 2, loaded)  # while the profiler settles
            begun.append(time.perf_counter())
            with record_function(MARK[1]):
                pass
            self._run(batches, steps, loaded)

        events = traced(measured, self.settings.device, cpu=True)
        # What was loaded ahead by then and not used yet belongs into the picture too.
        loaded += [next(batches)["loaded"] for _ in range(2 * WORKERS)]
        batches.close()  # type: ignore[attr-defined]
        return panel(events, loaded, begun[0], SHOWN_MS, on_cuda=self.settings.on_cuda) | {
            "bytes": self._bytes
        }

    def _run(self, batches: Iterator[Any], steps: int, loaded: list[Any]) -> None:
        for _ in range(steps):
            batch = next(batches)
            loaded.append(batch["loaded"])
            with record_function("compute"):
                self._work(batch["data"])


def panel(
    events: list[dict[str, Any]],
    loaded: Iterable[tuple[int, float, float]],
    begun_s: float,
    shown_ms: float,
    *,
    on_cuda: bool,
) -> Row:
    """Return what lies in the window, in ms from its beginning.

    Args:
        events: Of a trace.
        loaded: Who loaded a batch, from when to when on the host's clock, in seconds.
        begun_s: The host's clock when the mark in the trace was made.
        shown_ms: How long the window is at most.
        on_cuda: Whether the device kept a record, or the host's own stands for it.
    """
    zero_us = next(e["ts"] for e in events if (e.get("cat"), e.get("name")) == MARK)
    kernels = _named(events, "kernel" if on_cuda else "compute", zero_us, on_cuda)
    copies = _named(events, "HtoD" if on_cuda else "copy", zero_us, on_cuda)
    compute = union(kernels, GAP_US / 1e3)
    length = min(shown_ms, max((end for _, end in kernels), default=shown_ms))
    fetch = [
        [lane, *span]
        for lane, start, end in sorted(set(loaded))
        for span in _clipped([((start - begun_s) * 1e3, (end - begun_s) * 1e3)], length)
    ]
    busy = sum(end - start for start, end in _clipped(union(kernels), length))
    return {
        "window_ms": length,
        "fetch": fetch,
        "copy": _clipped(union(copies), length),
        "compute": _clipped(compute, length),
        "busy": busy / length,
    }


def _named(
    events: Iterable[dict[str, Any]], kind: str, zero_us: float, on_cuda: bool
) -> list[Span]:
    """Return the spans of kernels, of copies to the device, or of the host's own notes."""

    def wanted(event: dict[str, Any]) -> bool:
        category, name = event.get("cat"), event.get("name", "")
        if not on_cuda:
            return category == "user_annotation" and name == kind
        return category == kind or (category == "gpu_memcpy" and kind in name)

    spans = ((e["ts"] - zero_us, e["dur"]) for e in events if wanted(e))
    return [(start / 1e3, (start + duration) / 1e3) for start, duration in spans]


def _clipped(spans: Iterable[Span], length: float) -> list[Span]:
    inside = ((max(start, 0.0), min(end, length)) for start, end in spans)
    return [(round(start, 3), round(end, 3)) for start, end in inside if end > start]


def rows(settings: Settings) -> Iterator[Row]:
    """Yield the two panels of the picture."""
    timeline = Timeline(settings)
    ways: dict[str, Callable[[], Row]] = {
        "a naive loop: num_workers=0, .to() in the loop": timeline.naive,
        f"PrefetchingLoader over {min(WORKERS, settings.workers)} workers": timeline.prefetching,
    }
    for title, measure in ways.items():
        yield attempt(settings, {"title": title}, partial(measure))


def line(row: Row) -> str:
    """Return a row in words."""
    return (
        f"{row['title']}: the device computes {row['busy']:.1%} of {row['window_ms']:.0f} ms, "
        f"{len(row['fetch'])} batches loaded, {len(row['copy'])} copies"
    )


def main() -> None:
    """Measure and write the figures, or draw from them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--draw", type=Path, nargs=2, metavar=("FILE", "SVG"))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    if args.draw:
        source, picture = args.draw
        picture.write_text(loader_timeline_plot.drawn(json.loads(source.read_text())))
        return
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no GPU here; try --device cpu --smoke")
    workers = 2 if args.smoke else WORKERS
    panels = list(rows(Settings(args.device, smoke=args.smoke, workers=workers)))
    for row in panels:
        print(line(row) if row["status"] == "ran" else f"{row['title']}: {row['reason']}")
    figures = {"panels": panels}
    if args.out:
        results.write(args.out, figures)
    if args.svg:
        args.svg.write_text(loader_timeline_plot.drawn({"machine": results.machine(), **figures}))


if __name__ == "__main__":
    main()
