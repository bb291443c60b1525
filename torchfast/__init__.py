"""torchfast: fast PyTorch training steps that still train the same model.

`Trainer` is the door: it wraps a model, an optimizer and a loss function into one step, and a
`Plan` says what may be done to it. `TrainStep` is the step alone. ``torchfast.testing`` proves for
a model of your own that a plan trains as the plain loop does.
"""

from torchfast._core.batches import MicroBatches
from torchfast._core.decisions import Decision, Report
from torchfast._core.errors import (
    BatchStructureError,
    CaptureError,
    CheckpointCorruptError,
    CheckpointWriteError,
    ClosedError,
    CompileError,
    EmptyEpochError,
    IterationError,
    LossError,
    NonFiniteError,
    ParityError,
    PlanError,
    StateMismatchError,
    TorchFastError,
    UnsafeCheckpointError,
    UnsupportedDeviceError,
    UnsupportedOptimizerError,
)
from torchfast._core.version import __version__ as __version__
from torchfast.checkpoint import Checkpoint, CheckpointManager, import_state_dict
from torchfast.compiler import (
    CompiledCallable,
    CompiledModule,
    CompileOptions,
    CompileRecord,
    compile_callable,
)
from torchfast.data import (
    LoaderStatistics,
    MonitoredDataLoader,
    PrefetchingLoader,
    WorkerMeasurement,
    WorkerSweep,
    build_dataloader,
    sweep_workers,
)
from torchfast.ema import EMAOptions
from torchfast.fit_options import FitEvent, FitResult
from torchfast.graphs import CUDAGraphOptions, CUDAGraphStep, ParallelBranches
from torchfast.plan import Plan
from torchfast.precision import NonfiniteOptions, PrecisionOptions
from torchfast.step import TrainStep
from torchfast.trainer import Trainer

__all__ = [
    "BatchStructureError",
    "CUDAGraphOptions",
    "CUDAGraphStep",
    "CaptureError",
    "Checkpoint",
    "CheckpointCorruptError",
    "CheckpointManager",
    "CheckpointWriteError",
    "ClosedError",
    "CompileError",
    "CompileOptions",
    "CompileRecord",
    "CompiledCallable",
    "CompiledModule",
    "Decision",
    "EMAOptions",
    "EmptyEpochError",
    "FitEvent",
    "FitResult",
    "IterationError",
    "LoaderStatistics",
    "LossError",
    "MicroBatches",
    "MonitoredDataLoader",
    "NonFiniteError",
    "NonfiniteOptions",
    "ParallelBranches",
    "ParityError",
    "Plan",
    "PlanError",
    "PrecisionOptions",
    "PrefetchingLoader",
    "Report",
    "StateMismatchError",
    "TorchFastError",
    "TrainStep",
    "Trainer",
    "UnsafeCheckpointError",
    "UnsupportedDeviceError",
    "UnsupportedOptimizerError",
    "WorkerMeasurement",
    "WorkerSweep",
    "build_dataloader",
    "compile_callable",
    "import_state_dict",
    "sweep_workers",
]
