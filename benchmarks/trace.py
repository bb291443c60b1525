"""What a trace says of a few steps: how busy the device was, and what the host called."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

# Calls of the CUDA runtime and driver, by what they mean for the host. cudaMemcpyAsync does not
# wait by itself: what makes a copy block is the wait after it.
LAUNCHES = ("cudaLaunchKernel", "cudaGraphLaunch", "cuLaunchKernel", "cuGraphLaunch")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


def profiler() -> profile:
    """Return a profiler of the device and of the calls to it; Python itself is not watched."""
    return profile(activities=[ProfilerActivity.CUDA], acc_events=True)


def read(file: Path, steps: int) -> dict[str, float]:
    """Return, a step, of a trace that ends when the device is done.

    ``device_ms`` is the time in which the device did anything, copies included; ``num_kernels``
    what it ran; ``num_launches`` the calls by which the host launched it, a whole graph being one;
    ``host_syncs`` the calls in which the host waited, in threads that launch work: a loader's
    thread that waits for its own copy keeps nobody waiting.
    """
    events = json.loads(file.read_text())["traceEvents"]
    work = [event for event in events if event.get("cat") in ON_DEVICE]
    calls = sorted(
        (event["ts"], event["name"], event.get("tid"))
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver")
    )
    launches = [thread for _, name, thread in calls if name.startswith(LAUNCHES)]
    return {
        "device_ms": busy_us((event["ts"], event["ts"] + event["dur"]) for event in work)
        / 1e3
        / steps,
        "num_kernels": sum(event["cat"] == "kernel" for event in work) / steps,
        "num_launches": len(launches) / steps,
        "host_syncs": num_waits([name for _, name, tid in calls if tid in set(launches)]) / steps,
    }


def num_waits(calls: Sequence[str]) -> int:
    """Return in how many calls the host waited, in the order of time."""
    waits = [name for name in calls if name in WAITS]
    # At the end the measurement waits for the device, and so does the profiler.
    while waits and waits[-1] == "cudaDeviceSynchronize":
        waits.pop()
    return len(waits)


def busy_us(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of time spans."""
    busy, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return busy
