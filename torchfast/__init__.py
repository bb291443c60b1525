"""torchfast: fast PyTorch training steps that still train the same model.

`Trainer` is the door: it wraps a model, an optimizer and a loss function into one step, and a
`Plan` says what may be done to it. `TrainStep` is the step alone. ``torchfast.testing`` proves for
a model of your own that a plan trains as the plain loop does.
"""

from torchfast._core.batches import MicroBatches
from torchfast._core.decisions import Decision, Report
from torchfast._core.errors import (
    ClosedError,
    EmptyEpochError,
    LossError,
    ParityError,
    PlanError,
    StateMismatchError,
    TorchFastError,
    UnsupportedDeviceError,
    UnsupportedOptimizerError,
)
from torchfast.data import (
    DeviceLoader,
    MonitoredDataLoader,
    WorkerMeasurement,
    WorkerSweep,
    build_dataloader,
    sweep_workers,
)
from torchfast.loop import FitEvent, FitResult
from torchfast.plan import Plan
from torchfast.precision import PrecisionOptions
from torchfast.step import TrainStep
from torchfast.trainer import Trainer

__all__ = [
    "ClosedError",
    "Decision",
    "DeviceLoader",
    "EmptyEpochError",
    "FitEvent",
    "FitResult",
    "LossError",
    "MicroBatches",
    "MonitoredDataLoader",
    "ParityError",
    "Plan",
    "PlanError",
    "PrecisionOptions",
    "Report",
    "StateMismatchError",
    "TorchFastError",
    "TrainStep",
    "Trainer",
    "UnsupportedDeviceError",
    "UnsupportedOptimizerError",
    "WorkerMeasurement",
    "WorkerSweep",
    "build_dataloader",
    "sweep_workers",
]

__version__ = "0.1.0"
