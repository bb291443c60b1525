"""Whether copies run beside the step, by the device's own record, and whether the host ever waits.

The part of the copies' time in which a kernel ran is what overlaps. Two controls show that the
measure can fail: copies on the step's own stream, which cannot overlap, and a step that makes the
host wait, which the synchronisation guard has to catch.
"""

from __future__ import annotations

import collections
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

from benchmarks.loader_batches import (
    Batches,
    How,
    data_loader,
    images,
    mapped,
    num_bytes,
    reserve,
)
from benchmarks.loader_work import (
    Arm,
    Row,
    Settings,
    Work,
    attempt,
    forever,
    resident,
    synchronize,
    transfer_ms,
)
from benchmarks.trace import LAUNCHES, WAITS
from torchfast import PrefetchingLoader

RATIO = 0.5
TARGET = 0.95
TRACED_STEPS = 40
PINNED = "Memcpy HtoD (Pinned -> Device)"

Event = dict[str, Any]
Span = tuple[float, float]


def rows(settings: Settings) -> Iterator[Row]:
    """Yield the overlap with the loader and without, and whether the host waited."""
    bench = Bench(settings)
    for recycled, reuse in ((True, True), (True, False), (False, True)):
        what = {"measure": "overlap", "upstream": named(recycled), "reuse": reuse}
        yield attempt(settings, what, lambda c=recycled, r=reuse: bench.overlap("copy", r, c))
    what = {"measure": "overlap", "upstream": "ready", "reuse": True}
    yield attempt(settings, what, lambda: bench.overlap("ready", True, False))
    what = {"measure": "overlap", "upstream": "control: one stream", "reuse": False}
    yield attempt(settings, what, bench.control)
    for recycled, reuse in ((True, True), (True, False), (False, True)):
        what = {"measure": "no synchronisation", "upstream": named(recycled), "reuse": reuse}
        yield attempt(settings, what, lambda c=recycled, r=reuse: bench.guarded(r, c, waits=False))
    what = {"measure": "no synchronisation", "upstream": "control: .item()", "reuse": True}
    yield attempt(settings, what, lambda: bench.guarded(True, True, waits=True))


def named(recycled: bool) -> str:
    """Return what the batches come from."""
    return "copy, recycled" if recycled else "copy"


class Bench:
    """One step of which half is needed on the bus."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.template = images(settings.images, 32 if settings.smoke else 224)
        # Under the profiler each launch costs the host several times as much.
        self._work = Work(settings.device, graphed=True)
        self._upstreams: dict[tuple[How, bool], DataLoader[Any]] = {}
        batch = resident(self.template, settings.device, 1)[0]
        self._work.calibrate(transfer_ms(self.template, settings.device) / RATIO, batch)

    def _arm(self, how: How, reuse: bool, recycled: bool, step: Callable[[Any], Any]) -> Arm:
        settings = self.settings
        if (how, recycled) not in self._upstreams:  # once: their workers start slowly
            self._upstreams[how, recycled] = data_loader(
                Batches(self.template, how), workers=settings.workers, recycled=recycled
            )
        upstream = self._upstreams[how, recycled]
        loader = PrefetchingLoader(upstream, settings.device, reuse=reuse)
        lead = reserve(settings.workers, loader.depth) + 8
        return Arm(loader, step, settings.device, lead=lead, close=loader.close)

    def overlap(self, how: How, reuse: bool, recycled: bool) -> Row:
        """Return what a trace of the loop with the loader says."""
        return self._traced(self._arm(how, reuse, recycled, self._work))

    def control(self) -> Row:
        """Return what a trace says of copies on the step's own stream."""
        host, device = self.template, self.settings.device
        if self.settings.on_cuda:
            host = mapped(host, lambda t: t.pin_memory())

        def step(batch: Any) -> None:
            self._work(mapped(batch, lambda t: t.to(device, non_blocking=True)))

        return self._traced(Arm(forever([host]), step, device))

    def _traced(self, arm: Arm) -> Row:
        steps = 4 if self.settings.smoke else TRACED_STEPS
        try:
            arm.block_ms(steps)
            events = traced(lambda: arm.run(steps), self.settings.device)
        finally:
            arm.close()
        if not self.settings.on_cuda:
            return {"reason": "there is no bus", "overlap": None}
        return summary(events, steps, num_bytes(self.template))

    def guarded(self, reuse: bool, recycled: bool, *, waits: bool) -> Row:
        """Run steps with synchronisation made an error, in the loop's thread and the loader's."""
        step = (lambda batch: next(iter(batch)).sum().item()) if waits else self._work
        arm = self._arm("copy", reuse, recycled, step)
        steps = 3 if self.settings.smoke else 100
        try:
            arm.block_ms(2)
            error = self._run_guarded(arm, steps)
        finally:
            arm.close()
        held = (error is None) != waits if self.settings.on_cuda else None
        return {"steps": steps, "error": error, "held": held}

    def _run_guarded(self, arm: Arm, steps: int) -> str | None:
        if not self.settings.on_cuda:
            arm.run(steps)
            return None
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            arm.run(steps)
        except RuntimeError as error:
            return str(error).splitlines()[0]
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        return None


# -- What a trace says -----------------------------------------------------------------------------


def traced(run: Callable[[], Any], device: str, *, cpu: bool = False) -> list[Event]:
    """Return the events of a trace of ``run``; the device has finished before it ends."""
    activities = [ProfilerActivity.CUDA] if device == "cuda" else [ProfilerActivity.CPU]
    if cpu and device == "cuda":
        activities.append(ProfilerActivity.CPU)
    with profile(activities=activities, acc_events=True) as trace:
        run()
        synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(file))
        found: list[Event] = json.loads(file.read_text())["traceEvents"]
    return found


def summary(events: list[Event], steps: int, batch_bytes: int) -> Row:
    """Return the part of the copies that ran beside kernels, and what kind of copies they were."""
    kernels = union(spans(events, "kernel"))
    to_device = [e for e in events if e.get("cat") == "gpu_memcpy" and "HtoD" in e["name"]]
    copies = [span_of(event) for event in to_device]
    copying_us = sum(end - start for start, end in copies)
    beside_us = sum(shared_us(copy, kernels) for copy in copies)
    overlap = beside_us / copying_us if copying_us else None
    return {
        "steps": steps,
        "copies": dict(collections.Counter(event["name"] for event in to_device)),
        "all_pinned": bool(to_device) and all(event["name"] == PINNED for event in to_device),
        "copies_a_step": len(copies) / steps,
        "copy_ms_a_step": copying_us / 1e3 / steps,
        "copy_gb_s": batch_bytes * steps / copying_us / 1e3 if copying_us else None,
        "kernel_ms_a_step": sum(end - start for start, end in kernels) / 1e3 / steps,
        "span_ms_a_step": span_ms(events) / steps,
        "streams": streams(events),
        "host_waits_of_the_loop": loop_waits(events),
        "overlap": overlap,
        "held": overlap is not None and overlap >= TARGET,
    }


def span_of(event: Event) -> Span:
    """Return when an event began and ended, in µs."""
    return event["ts"], event["ts"] + event["dur"]


def spans(events: Iterable[Event], kind: str) -> list[Span]:
    """Return the spans of events of a kind."""
    return [span_of(event) for event in events if event.get("cat") == kind]


def union(found: Iterable[Span], gap: float = 0.0) -> list[Span]:
    """Return spans that do not overlap; those less than ``gap`` apart are one."""
    merged: list[Span] = []
    for start, end in sorted(found):
        if merged and start <= merged[-1][1] + gap:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def shared_us(span: Span, others: Iterable[Span]) -> float:
    """Return how much of a span lies in the others, which do not overlap."""
    start, end = span
    return sum(max(0.0, min(end, b) - max(start, a)) for a, b in others)


def span_ms(events: Iterable[Event]) -> float:
    """Return the time from the first kernel to the end of the last."""
    kernels = spans(events, "kernel")
    return (max(b for _, b in kernels) - min(a for a, _ in kernels)) / 1e3 if kernels else 0.0


def streams(events: Iterable[Event]) -> dict[str, int]:
    """Return on how many streams kernels ran, and copies from the host."""
    found: dict[str, set[Any]] = {"kernels": set(), "copies": set()}
    for event in events:
        stream = event.get("args", {}).get("stream")
        if event.get("cat") == "kernel":
            found["kernels"].add(stream)
        elif event.get("cat") == "gpu_memcpy" and "HtoD" in event["name"]:
            found["copies"].add(stream)
    return {
        "kernels": len(found["kernels"]),
        "copies": len(found["copies"]),
        "both": len(found["kernels"] & found["copies"]),
    }


def loop_waits(events: Iterable[Event]) -> dict[str, int]:
    """Return the calls in which the thread that launches the step waited, but for the last."""
    calls = [e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")]
    launches = collections.Counter(e["tid"] for e in calls if e["name"].startswith(LAUNCHES))
    if not launches:
        return {}
    loop = launches.most_common(1)[0][0]
    waits = collections.Counter(e["name"] for e in calls if e["tid"] == loop and e["name"] in WAITS)
    # With these the measurement ends.
    del waits["cudaDeviceSynchronize"]
    return dict(waits)


def verdict(held: bool | None) -> str:
    """Return whether what was to be shown was shown."""
    return "nothing to see here" if held is None else "as it should be" if held else "NOT HELD"


def line(row: Row) -> str:
    """Return a row in words."""
    start = f"{row['measure']:18} {row['upstream']:19} reuse {row['reuse']!s:5}"
    if row["measure"] != "overlap":
        return f"{start} {verdict(row['held'])}: {row['error'] or 'nothing waited'}"
    if row["overlap"] is None:
        return f"{start} {row.get('reason', 'no copies were seen')}"
    kinds = "all pinned" if row["all_pinned"] else str(row["copies"])
    return (
        f"{start} overlap {row['overlap']:.4f}; {row['copies_a_step']:.1f} copies a step, {kinds}, "
        f"{row['copy_ms_a_step']:.3f} ms, {row['copy_gb_s']:.1f} GB/s; kernels "
        f"{row['kernel_ms_a_step']:.3f} of {row['span_ms_a_step']:.3f} ms; "
        f"loop waits {row['host_waits_of_the_loop'] or 'never'}"
    )
