"""torchfast: fast PyTorch training steps that still train the same model.

`Trainer` is the door: it wraps a model, an optimizer and a loss function into one step, and a
`Plan` says what may be done to it. `TrainStep` is the step alone. ``torchfast.testing`` proves for
a model of your own that a plan trains as the plain loop does.
"""

from typing import TYPE_CHECKING

from torchfast._core.batches import MicroBatches, StepBatches
from torchfast._core.decisions import Decision, Report
from torchfast._core.errors import (
    BatchStructureError,
    CaptureError,
    CheckpointCorruptError,
    CheckpointWriteError,
    ClosedError,
    CompileError,
    EmptyEpochError,
    HostSyncError,
    IterationError,
    LossError,
    NonFiniteError,
    OutOfMemoryError,
    ParityError,
    PlanError,
    RankError,
    StateMismatchError,
    TorchFastError,
    TraceError,
    UnsafeCheckpointError,
    UnsupportedDeviceError,
    UnsupportedOptimizerError,
)
from torchfast._core.later import later
from torchfast._core.phases import phase
from torchfast._core.step_times import PhaseTimes, StepTimes
from torchfast._core.version import __version__ as __version__
from torchfast.compiler import CompileOptions
from torchfast.data import LoaderStatistics, PadToLengths, PrefetchingLoader, shard_loader
from torchfast.ema import EMAOptions
from torchfast.fit_options import FitEvent, FitResult
from torchfast.graphs import CUDAGraphOptions, CUDAGraphStep, ParallelBranches
from torchfast.memory import OutOfMemoryOptions, RecomputeOptions
from torchfast.parallel import Ranks, ShardOptions, Watchdog, start_ranks
from torchfast.plan import Plan
from torchfast.precision import (
    Float8Options,
    LowBitOptions,
    NonfiniteOptions,
    PrecisionOptions,
)
from torchfast.profiling import HostSync, SyncGuard, SyncReport
from torchfast.step import TrainStep
from torchfast.trainer import Trainer

if TYPE_CHECKING:
    from torchfast.checkpoint import Checkpoint, CheckpointManager, import_state_dict
    from torchfast.compiler import (
        CompiledCallable,
        CompiledModule,
        CompileRecord,
        compile_callable,
    )
    from torchfast.data import (
        MonitoredDataLoader,
        WorkerMeasurement,
        WorkerSweep,
        build_dataloader,
        sweep_workers,
    )
    from torchfast.memory import (
        ActivationOffload,
        AllocatorChange,
        AllocatorConfig,
        AllocatorEnvironment,
        AttentionReport,
        ExpertBuffers,
        GrowingLine,
        HeldTensor,
        MemoryAccount,
        MemoryDiagnosis,
        MemoryLine,
        MemoryMonitor,
        MemoryPool,
        MemorySample,
        MemorySource,
        OffloadChoice,
        OffloadedOptimizer,
        OffloadOptions,
        ParameterOffload,
        PoolStatistics,
        Recompute,
        RecomputeChoice,
        RecomputePlan,
        SettingChange,
        attention_backends,
        attention_report,
    )
    from torchfast.precision import Float8Linears, LowBitAdamW
    from torchfast.profiling import (
        Profile,
        ProfileReport,
        SpeedComparison,
        analyse_trace,
        compare_speed,
        profile,
    )
    from torchfast.recompute_planning import plan_recompute

__all__ = [
    "ActivationOffload",
    "AllocatorChange",
    "AllocatorConfig",
    "AllocatorEnvironment",
    "AttentionReport",
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
    "ExpertBuffers",
    "FitEvent",
    "FitResult",
    "Float8Linears",
    "Float8Options",
    "GrowingLine",
    "HeldTensor",
    "HostSync",
    "HostSyncError",
    "IterationError",
    "LoaderStatistics",
    "LossError",
    "LowBitAdamW",
    "LowBitOptions",
    "MemoryAccount",
    "MemoryDiagnosis",
    "MemoryLine",
    "MemoryMonitor",
    "MemoryPool",
    "MemorySample",
    "MemorySource",
    "MicroBatches",
    "MonitoredDataLoader",
    "NonFiniteError",
    "NonfiniteOptions",
    "OffloadChoice",
    "OffloadOptions",
    "OffloadedOptimizer",
    "OutOfMemoryError",
    "OutOfMemoryOptions",
    "PadToLengths",
    "ParallelBranches",
    "ParameterOffload",
    "ParityError",
    "PhaseTimes",
    "Plan",
    "PlanError",
    "PoolStatistics",
    "PrecisionOptions",
    "PrefetchingLoader",
    "Profile",
    "ProfileReport",
    "RankError",
    "Ranks",
    "Recompute",
    "RecomputeChoice",
    "RecomputeOptions",
    "RecomputePlan",
    "Report",
    "SettingChange",
    "ShardOptions",
    "SpeedComparison",
    "StateMismatchError",
    "StepBatches",
    "StepTimes",
    "SyncGuard",
    "SyncReport",
    "TorchFastError",
    "TraceError",
    "TrainStep",
    "Trainer",
    "UnsafeCheckpointError",
    "UnsupportedDeviceError",
    "UnsupportedOptimizerError",
    "Watchdog",
    "WorkerMeasurement",
    "WorkerSweep",
    "analyse_trace",
    "attention_backends",
    "attention_report",
    "build_dataloader",
    "compare_speed",
    "compile_callable",
    "import_state_dict",
    "phase",
    "plan_recompute",
    "profile",
    "shard_loader",
    "start_ranks",
    "sweep_workers",
]

_HOMES = {
    "torchfast.checkpoint": ("Checkpoint", "CheckpointManager", "import_state_dict"),
    "torchfast.compiler": (
        "CompileRecord",
        "CompiledCallable",
        "CompiledModule",
        "compile_callable",
    ),
    "torchfast.data": (
        "MonitoredDataLoader",
        "WorkerMeasurement",
        "WorkerSweep",
        "build_dataloader",
        "sweep_workers",
    ),
    "torchfast.memory": (
        "ActivationOffload",
        "AllocatorChange",
        "AllocatorConfig",
        "AllocatorEnvironment",
        "AttentionReport",
        "ExpertBuffers",
        "GrowingLine",
        "HeldTensor",
        "MemoryAccount",
        "MemoryDiagnosis",
        "MemoryLine",
        "MemoryMonitor",
        "MemoryPool",
        "MemorySample",
        "MemorySource",
        "OffloadChoice",
        "OffloadOptions",
        "OffloadedOptimizer",
        "ParameterOffload",
        "PoolStatistics",
        "Recompute",
        "RecomputeChoice",
        "RecomputePlan",
        "SettingChange",
        "attention_backends",
        "attention_report",
    ),
    "torchfast.precision": ("Float8Linears", "LowBitAdamW"),
    "torchfast.profiling": (
        "Profile",
        "ProfileReport",
        "SpeedComparison",
        "analyse_trace",
        "compare_speed",
        "profile",
    ),
    "torchfast.recompute_planning": ("plan_recompute",),
}
__getattr__ = later(globals(), _HOMES, modules=("losses", "testing"))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
