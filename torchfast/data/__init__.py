"""How batches get to the step."""

from torchfast.data.loader import DeviceLoader
from torchfast.data.monitored import MonitoredDataLoader
from torchfast.data.worker_sweep import WorkerMeasurement, WorkerSweep, sweep_workers
from torchfast.data.workers import build_dataloader

__all__ = [
    "DeviceLoader",
    "MonitoredDataLoader",
    "WorkerMeasurement",
    "WorkerSweep",
    "build_dataloader",
    "sweep_workers",
]
