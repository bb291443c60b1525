"""A whole training step as one CUDA graph, the form of optimizer it needs, branches on streams."""

from typing import TYPE_CHECKING

from torchfast._core.later import later
from torchfast.graphs.graph_form import GraphForm, graph_form
from torchfast.graphs.learning_rates import LearningRates, rates_of
from torchfast.graphs.named_state import NamedState
from torchfast.graphs.optimizer_form import OptimizerForm
from torchfast.graphs.options import CUDAGraphOptions, graph_decision
from torchfast.graphs.parallel_branches import ParallelBranches
from torchfast.graphs.step import CUDAGraphStep

if TYPE_CHECKING:
    from torchfast.graphs.entries import Ready
    from torchfast.graphs.graphed_update import GraphedUpdate, InGraph
    from torchfast.graphs.saved_named_state import SavedNamedState
    from torchfast.graphs.trials import GraphTrials

__all__ = [
    "CUDAGraphOptions",
    "CUDAGraphStep",
    "GraphForm",
    "GraphTrials",
    "GraphedUpdate",
    "InGraph",
    "LearningRates",
    "NamedState",
    "OptimizerForm",
    "ParallelBranches",
    "Ready",
    "SavedNamedState",
    "graph_decision",
    "graph_form",
    "rates_of",
]

# The engine, which a step needs that is captured.
_HOMES = {
    "torchfast.graphs.entries": ("Ready",),
    "torchfast.graphs.graphed_update": ("GraphedUpdate", "InGraph"),
    "torchfast.graphs.saved_named_state": ("SavedNamedState",),
    "torchfast.graphs.trials": ("GraphTrials",),
}
__getattr__ = later(globals(), _HOMES)
