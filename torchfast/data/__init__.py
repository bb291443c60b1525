"""How batches get to the step."""

from typing import TYPE_CHECKING

from torchfast._core.later import later
from torchfast.data.loader import PrefetchingLoader
from torchfast.data.padding import PadToLengths
from torchfast.data.sharded import shard_loader
from torchfast.data.statistics import LoaderStatistics

if TYPE_CHECKING:
    from torchfast.data.monitored import MonitoredDataLoader
    from torchfast.data.worker_sweep import WorkerMeasurement, WorkerSweep, sweep_workers
    from torchfast.data.workers import build_dataloader

__all__ = [
    "LoaderStatistics",
    "MonitoredDataLoader",
    "PadToLengths",
    "PrefetchingLoader",
    "WorkerMeasurement",
    "WorkerSweep",
    "build_dataloader",
    "shard_loader",
    "sweep_workers",
]

# A trainer needs the loaders that are there; the rest is imported by who makes one.
_HOMES = {
    "torchfast.data.monitored": ("MonitoredDataLoader",),
    "torchfast.data.worker_sweep": ("WorkerMeasurement", "WorkerSweep", "sweep_workers"),
    "torchfast.data.workers": ("build_dataloader",),
}
__getattr__ = later(globals(), _HOMES)
