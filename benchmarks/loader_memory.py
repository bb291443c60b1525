"""Whether memory stays what it is over many epochs, some of which break off in the middle.

Looked at after each epoch: what torch's allocator has reserved on the device, what it has pinned,
and of the process the memory, the open files and the threads.
"""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.loader_batches import Batches, data_loader, images, mapped
from benchmarks.loader_work import Row, Settings, Work, attempt, synchronize
from torchfast import PrefetchingLoader

EPOCHS, BATCHES, BREAK_EVERY = 40, 14, 3
# By then every buffer has been made, also those for an epoch that breaks off.
SETTLED = 6
# By how much each may grow: batches on their way have files open, one more or one less.
FLAT = {
    "reserved_bytes": 0,
    "pinned_bytes": 0,
    "pinned_allocations": 0,
    "open_files": 8,
    "threads": 1,
}


def rows(settings: Settings) -> Iterator[Row]:
    """Yield a row for each way to hand out batches, and the control, which keeps them."""
    forms = [(True, False, False), (False, False, False), (False, True, False)]
    if settings.on_cuda:
        forms.append((False, False, True))
    for reuse, across, keep in forms:
        what = {"reuse": reuse, "across_epochs": across, "control_keeps_batches": keep}
        yield attempt(settings, what, partial(epochs, settings, reuse, across, keep))


def epochs(settings: Settings, reuse: bool, across_epochs: bool, keep: bool) -> Row:
    """Run epochs with a loader of workers that stay, the last batch of each a smaller one."""
    num_epochs = SETTLED + 4 if settings.smoke else EPOCHS
    num_batches = 4 if settings.smoke else BATCHES
    size = 4 if settings.smoke else 96
    data = Ragged(images(size, 32 if settings.smoke else 224), "copy", num_batches)
    upstream = data_loader(data, workers=min(4, settings.peer_workers))
    work = Work(settings.device)
    seen: list[dict[str, int | None]] = []
    kept = []
    with PrefetchingLoader(
        upstream, settings.device, reuse=reuse, across_epochs=across_epochs
    ) as loader:
        for epoch in range(num_epochs):
            loader.set_epoch(epoch)
            for number, batch in enumerate(loader):
                work(batch)
                if keep:
                    kept.append(mapped(batch, torch.clone))
                if epoch % BREAK_EVERY == 1 and number == num_batches // 2:
                    break
            synchronize(settings.device)
            del batch
            seen.append(memory(settings))
    return {
        "epochs": num_epochs,
        "batches": num_batches,
        "seen": seen,
        "grown": {name: growth(seen, name) for name in (*FLAT, "resident_set_bytes")},
        "held": all((growth(seen, name) or 0) <= most for name, most in FLAT.items()) != keep,
    }


class Ragged(Batches):
    """An epoch whose last batch is smaller than the others."""

    def __getitems__(self, indices: list[int]) -> Any:
        """Return a batch."""
        batch = super().__getitems__(indices)
        if indices[0] < self.batches - 1:
            return batch
        return mapped(batch, lambda t: t[: len(t) // 2 + 1].clone())


def memory(settings: Settings) -> dict[str, int | None]:
    """Return what is taken now."""
    found: dict[str, int | None] = {
        "reserved_bytes": torch.cuda.memory_reserved() if settings.on_cuda else None,
        "allocated_bytes": torch.cuda.memory_allocated() if settings.on_cuda else None,
        "pinned_bytes": None,
        "pinned_allocations": None,
        "open_files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "resident_set_bytes": resident_set_bytes(),
    }
    # Its names have changed between versions: of those that a version lacks nothing is said.
    statistics = getattr(torch.cuda, "host_memory_stats", dict)() if settings.on_cuda else {}
    allocated = statistics.get("allocated_bytes.current")
    found["pinned_bytes"] = statistics.get("reserved_bytes.current", allocated)
    found["pinned_allocations"] = statistics.get("num_host_alloc")
    return found


def resident_set_bytes() -> int | None:
    """Return what the process holds of the machine's memory."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return None


def growth(seen: list[dict[str, int | None]], name: str) -> int | None:
    """Return by how much the highest value after settling is above the one then."""
    values = [epoch[name] for epoch in seen[SETTLED - 1 :]]
    if any(value is None for value in values):
        return None
    return max(values) - values[0]  # type: ignore[type-var, operator]


def line(row: Row) -> str:
    """Return a row in words."""
    last = row["seen"][-1]
    grown = ", ".join(
        f"{name} {last[name] / 1e6:.1f}M +{grown:,}"
        if name.endswith("bytes")
        else f"{name} {last[name]} +{grown}"
        for name, grown in row["grown"].items()
        if grown is not None
    )
    unknown = [name for name, grown in row["grown"].items() if grown is None]
    control = " control: keeps batches" if row["control_keeps_batches"] else ""
    return (
        f"reuse {row['reuse']!s:5} across {row['across_epochs']!s:5}{control} "
        f"{row['epochs']} epochs: {'as it should be' if row['held'] else 'NOT HELD'}; {grown}"
        f"{'; not known here: ' + ', '.join(unknown) if unknown else ''}"
    )
