"""Which recompute fits: the planner of `torchfast.memory`, with the graphs of `torchfast.graphs`.

Neither knows the other. What times a step as replays captures it as the step of a `Plan` would be.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchfast._core.arguments import check_flag, explain_keywords
from torchfast._core.device import resolve_device
from torchfast._core.errors import UnsupportedDeviceError
from torchfast._core.reachable import held_by
from torchfast.graphs import CUDAGraphOptions, GraphTrials
from torchfast.memory.recompute_options import Regions
from torchfast.memory.recompute_plan import RecomputePlan, measure_recompute
from torchfast.memory.recompute_times import Graphs, Step


@explain_keywords
def plan_recompute(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Any],
    batch: Any,
    *,
    memory_gb: float,
    optimizer: Optimizer | Callable[[Any], Optimizer] | None = None,
    autocast: torch.dtype | None = None,
    device: torch.device | str | int | None = None,
    repeats: int = 3,
    cuda_graph: bool | CUDAGraphOptions = False,
    regions: Regions = "blocks",
) -> RecomputePlan:
    """Measure a model and find the cheapest recompute with which its step fits into a memory.

    Args:
        model: Run in training mode, forward and backward: once for each choice, once more for the
            first, in ``repeats`` turns of two to eight steps for each, and on a CUDA device twice
            more.
            Its gradients, buffers and mode, and the random generators, are put back.
        loss_fn: As a `Trainer` takes it.
        batch: A batch, or a micro-batch where gradients are accumulated.
        memory_gb: What there is for a step, in GB of 10**9 bytes.
        optimizer: Whose state takes memory too, or a callable that makes it of parameters. Before
            its first step the state is that of a small parameter, scaled; of an optimizer that is
            neither torch's nor ours it is guessed by its options.
        autocast: The dtype of autocast, if the step is to train under it.
        device: Where to measure; None means where the parameters are.
        repeats: How many turns of each choice are timed. A turn is as many steps, two to eight, as
            take 0.2 s with the first choice.
        cuda_graph: What the plan will have: whether a graph will hold the step, and then replays
            are timed. They keep memory of their own, what a step needs at its peak.
        regions: What is recomputed, as `RecomputeOptions` names it: the blocks that the model
            repeats, or modules by path or class.

    Returns:
        The choices, from the fastest. ``is_eager`` says of what the times are: on a device without
        graphs, or where the step cannot be captured, of eager steps. What fits is decided by the
        peak of a forward and backward on a CUDA device, whose statistics of the peak begin anew,
        and elsewhere by what is saved. What runs out of memory there does not fit, unless
        ``memory_gb`` is more than the device has.

    Raises:
        TypeError: Not a module, not a loss function, not an optimizer, or not a dtype.
        ValueError: A model whose blocks cannot be recomputed, or that has none.

    Numerics: Changes nothing.
    Synchronizes: Yes.

    Example:
        >>> block = lambda: nn.TransformerEncoderLayer(16, 2, 64, batch_first=True)
        >>> model = nn.Sequential(block(), block(), block(), block())
        >>> plan = plan_recompute(
        ...     model, lambda m, x: m(x).square().mean(), torch.ones(8, 32, 16), memory_gb=1.0
        ... )
        >>> plan.choice.name
        'none'
    """
    options = cuda_graph if isinstance(cuda_graph, CUDAGraphOptions) else CUDAGraphOptions()
    wants_graphs = options is cuda_graph or check_flag("cuda_graph", cuda_graph)

    def graphs(step: Step, inputs: Any) -> Graphs | None:
        with suppress(UnsupportedDeviceError):
            return GraphTrials(
                step,
                inputs,
                model=model,
                found=held_by(loss_fn),
                options=options,
                device=resolve_device(device, model),
            )
        return None

    return measure_recompute(
        model,
        loss_fn,
        batch,
        memory_gb=memory_gb,
        optimizer=optimizer,
        autocast=autocast,
        device=device,
        repeats=repeats,
        regions=regions,
        graphs=graphs if wants_graphs else None,
    )
