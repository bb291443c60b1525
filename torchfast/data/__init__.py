"""How batches get to the step."""

from torchfast.data.loader import PrefetchingLoader
from torchfast.data.monitored import MonitoredDataLoader
from torchfast.data.padding import PadToLengths
from torchfast.data.sharded import shard_loader
from torchfast.data.statistics import LoaderStatistics
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
