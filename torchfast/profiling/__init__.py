"""Where the time of a step goes: by phase, by kernel, by line; and which function is faster."""

from typing import TYPE_CHECKING

from torchfast._core.later import later
from torchfast.profiling.step_timer import StepTimer
from torchfast.profiling.sync_guard import SYNC_MODES, SyncGuard, SyncMode
from torchfast.profiling.sync_report import HostSync, SyncReport

if TYPE_CHECKING:
    from torchfast.profiling.microbenchmark import SpeedComparison, compare_speed
    from torchfast.profiling.profiler import Profile, profile
    from torchfast.profiling.report import ProfileReport, analyse_trace

__all__ = [
    "SYNC_MODES",
    "HostSync",
    "Profile",
    "ProfileReport",
    "SpeedComparison",
    "StepTimer",
    "SyncGuard",
    "SyncMode",
    "SyncReport",
    "analyse_trace",
    "compare_speed",
    "profile",
]

_HOMES = {
    "torchfast.profiling.microbenchmark": ("SpeedComparison", "compare_speed"),
    "torchfast.profiling.profiler": ("Profile", "profile"),
    "torchfast.profiling.report": ("ProfileReport", "analyse_trace"),
}
__getattr__ = later(globals(), _HOMES)
