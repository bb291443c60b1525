"""Memory: how torch lays it out, what becomes of it over a run, what can wait elsewhere."""

from typing import TYPE_CHECKING

from torchfast._core.later import later
from torchfast.memory.offload_options import OffloadOptions
from torchfast.memory.out_of_memory_options import OutOfMemoryOptions
from torchfast.memory.recompute_options import RecomputeOptions
from torchfast.memory.splitting import SplitBatch
from torchfast.memory.step_offload import StepOffload

if TYPE_CHECKING:
    from torchfast.memory.account import HeldTensor, MemoryAccount, MemoryLine
    from torchfast.memory.activation_offload import ActivationOffload
    from torchfast.memory.allocator_change import AllocatorChange, SettingChange
    from torchfast.memory.allocator_config import AllocatorConfig
    from torchfast.memory.allocator_decision import apply_allocator, check_allocator
    from torchfast.memory.allocator_environment import AllocatorEnvironment
    from torchfast.memory.attention import AttentionReport, attention_backends, attention_report
    from torchfast.memory.diagnosis import GrowingLine, MemoryDiagnosis
    from torchfast.memory.expert_buffers import ExpertBuffers
    from torchfast.memory.memory_pool import MemoryPool, PoolStatistics
    from torchfast.memory.monitor import MemoryMonitor
    from torchfast.memory.offload_choice import OffloadChoice
    from torchfast.memory.optimizer_offload import OffloadedOptimizer
    from torchfast.memory.out_of_memory import OutOfMemoryGuard
    from torchfast.memory.parameter_offload import ParameterOffload
    from torchfast.memory.recompute import Recompute
    from torchfast.memory.recompute_plan import RecomputeChoice, RecomputePlan
    from torchfast.memory.recompute_transform import RecomputeTransform, memory_budget
    from torchfast.memory.samples import MemorySample
    from torchfast.memory.sources import MemorySource

__all__ = [
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
    "OutOfMemoryGuard",
    "OutOfMemoryOptions",
    "ParameterOffload",
    "PoolStatistics",
    "Recompute",
    "RecomputeChoice",
    "RecomputeOptions",
    "RecomputePlan",
    "RecomputeTransform",
    "SettingChange",
    "SplitBatch",
    "StepOffload",
    "apply_allocator",
    "attention_backends",
    "attention_report",
    "check_allocator",
    "memory_budget",
]

# A plan needs some of it; the rest is imported by who asks for it.
_HOMES = {
    "torchfast.memory.activation_offload": ("ActivationOffload",),
    "torchfast.memory.offload_choice": ("OffloadChoice",),
    "torchfast.memory.optimizer_offload": ("OffloadedOptimizer",),
    "torchfast.memory.recompute_transform": ("RecomputeTransform", "memory_budget"),
    "torchfast.memory.account": (
        "HeldTensor",
        "MemoryAccount",
        "MemoryLine",
    ),
    "torchfast.memory.allocator_change": (
        "AllocatorChange",
        "SettingChange",
    ),
    "torchfast.memory.allocator_config": ("AllocatorConfig",),
    "torchfast.memory.allocator_decision": (
        "apply_allocator",
        "check_allocator",
    ),
    "torchfast.memory.allocator_environment": ("AllocatorEnvironment",),
    "torchfast.memory.attention": (
        "AttentionReport",
        "attention_backends",
        "attention_report",
    ),
    "torchfast.memory.diagnosis": (
        "GrowingLine",
        "MemoryDiagnosis",
    ),
    "torchfast.memory.expert_buffers": ("ExpertBuffers",),
    "torchfast.memory.memory_pool": (
        "MemoryPool",
        "PoolStatistics",
    ),
    "torchfast.memory.monitor": ("MemoryMonitor",),
    "torchfast.memory.out_of_memory": ("OutOfMemoryGuard",),
    "torchfast.memory.parameter_offload": ("ParameterOffload",),
    "torchfast.memory.recompute": ("Recompute",),
    "torchfast.memory.recompute_plan": (
        "RecomputeChoice",
        "RecomputePlan",
    ),
    "torchfast.memory.samples": ("MemorySample",),
    "torchfast.memory.sources": ("MemorySource",),
}
__getattr__ = later(globals(), _HOMES)
