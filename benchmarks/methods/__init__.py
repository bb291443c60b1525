"""Ways to train: each a loop over a `Job`, as its users write it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.job import Job
from benchmarks.methods import by_hand, loops, peers, plans
from benchmarks.workloads import Workload


@dataclass(frozen=True)
class Method:
    """A way to train.

    Attributes:
        name: As tables show it.
        train: Trains until ``job.tick`` ends the run by an exception.
        given: What it is given beyond the naive loop, in a line for the reader.
        needs: The module that it needs beyond torch, imported before the clock starts.
        cuda_only: Whether it has no meaning without a GPU.
        compiles: Whether its first steps wait for a compiler, mostly on the host.
        cache_of: The method from which it is given the compiler's cache.
        search_s: How long it may measure at its start, beside what compiling may take. It starts
            alone then: who shares the GPU measures somebody else.
        steps_at_once: How many steps it launches together. So many steps in a row, or a multiple,
            hold a whole number of launches wherever they begin.
        left_out: Why a workload is not measured with it, if so; None: all are.
    """

    name: str
    train: Callable[[Job], None]
    given: str
    needs: str | None = None
    cuda_only: bool = False
    compiles: bool = False
    cache_of: str | None = None
    search_s: float = 0.0
    steps_at_once: int = 1
    left_out: Callable[[Workload], str | None] | None = None

    def obstacle(self, workload: Workload, *, on_cuda: bool) -> str | None:
        """Return why it is not measured on this workload here, or None."""
        if self.left_out is not None and (reason := self.left_out(workload)):
            return reason
        if self.cuda_only and not on_cuda:
            return "needs a CUDA device"
        package = self.needs and self.needs.partition(".")[0]
        if package and importlib.util.find_spec(package) is None:
            return f"the package {package} is not installed"
        return None


COMPILER = "torch._inductor.compile_fx"


def _without_language(workload: Workload) -> str | None:
    return None if workload.language else "measured on language models only"


def _without_vocabulary(workload: Workload) -> str | None:
    with torch.device("meta"):
        is_apart = hasattr(workload.build(), "output_weight")
    return None if is_apart else "measured on transformers over a vocabulary only"


def _without_large_products(workload: Workload) -> str | None:
    return None if workload.name == "llama" else "measured on the largest matrix products only"


def _without_short_steps(workload: Workload) -> str | None:
    return None if workload.name == "mlp" else "measured on the shortest step only"


def _without_blocks(workload: Workload) -> str | None:
    with torch.device("meta"):
        repeated = workload.regions(workload.build())
    return None if repeated else "no block repeats"


def _without_computing(workload: Workload) -> str | None:
    return None if workload.bound == "compute" else "compiling speeds up no copy and no loader"


def _compiled(mode: str, cache_of: str | None = None) -> Method:
    given = f'the tuned loop with `torch.compile(model, mode="{mode}")`'
    return Method(
        f"compile {mode}",
        partial(loops.compiled, mode=mode),
        f"{given} and the cache of `{cache_of}`" if cache_of else given,
        needs=COMPILER,
        compiles=True,
        cache_of=cache_of and f"compile {cache_of}",
        left_out=_without_computing,
    )


def _by_hand(name: str, train: Callable[[Job], None], given: str, **details: object) -> Method:
    return Method(f"by hand: {name}", train, given, cuda_only=True, **details)  # type: ignore[arg-type]


def _plan(plan: str, given: str, variant: str = "", **changes: Any) -> Method:
    compiles = plan == "fast" and changes.get("compiled", True)
    left_out = _without_vocabulary if changes.get("loss_over_vocabulary") else None
    return Method(
        f"torchfast {plan}{variant}",
        partial(plans.train, plan=plan, **changes),
        given,
        needs=COMPILER if compiles else None,
        compiles=compiles,
        search_s=changes.get("search_s", 0.0),
        steps_at_once=changes.get("unroll", 1),
        left_out=_without_short_steps if changes.get("unroll") else left_out,
    )


NAIVE = Method(
    "naive",
    loops.naive,
    "blocking copies from pageable memory, `loss.item()` every step, AdamW as torch builds it",
)
# What other methods are set against, round by round.
TUNED = Method(
    "tuned",
    loops.tuned,
    "pinned batches, copies that do not block, fused AdamW, gradients set to None, no host reads; "
    "for convolutions channels_last and `cudnn.benchmark`",
)
METHODS = {
    method.name: method
    for method in (
        NAIVE,
        TUNED,
        Method(
            "Lightning",
            peers.lightning,
            "what the tuned loop has; no logger, checkpoint, progress bar or summary; clipping in "
            "its own hook, since `gradient_clip_val` refuses the fused optimizer",
            needs="lightning",
        ),
        Method(
            "Accelerate",
            peers.accelerate,
            "what the tuned loop has, `non_blocking=True` by its `DataLoaderConfiguration`",
            needs="accelerate",
        ),
        Method(
            "transformers Trainer",
            peers.transformers_trainer,
            'what the tuned loop has, `optim="adamw_torch_fused"`, `non_blocking=True`; nothing '
            "logged, saved or reported, losses not looked at for NaN",
            needs="transformers.trainer",
            left_out=_without_language,
        ),
        _compiled("default"),
        _compiled("reduce-overhead"),
        _compiled("max-autotune-no-cudagraphs"),
        _compiled("max-autotune", cache_of="max-autotune-no-cudagraphs"),
        _by_hand(
            "graph",
            by_hand.graph,
            "the whole step in one CUDA graph, batches sent on a side stream",
        ),
        _by_hand(
            "graph + compile by block",
            by_hand.graph_and_blocks,
            "the same, the repeated blocks compiled one by one",
            needs=COMPILER,
            compiles=True,
            left_out=_without_blocks,
        ),
        _by_hand(
            "graph + compile whole",
            by_hand.graph_and_whole,
            "the same, model and loss compiled as one",
            needs=COMPILER,
            compiles=True,
            left_out=_without_computing,
        ),
        _by_hand(
            "graph + float8 + compile by block",
            by_hand.graph_and_float8,
            "the same by block, matrix products of the blocks in float8 (torchao, tensorwise)",
            needs="torchao.float8",
            compiles=True,
            left_out=_without_large_products,
        ),
        _plan("eager", "the plan `eager`; what the tuned loop is given"),
        _plan("exact", "the plan `exact`; what the tuned loop is given"),
        _plan(
            "exact",
            "the same, the loss by `torchfast.losses.linear_cross_entropy`, without the logits",
            " + vocabulary loss",
            loss_over_vocabulary=True,
        ),
        _plan(
            "fast",
            "the plan `fast` with `compile=False`; what the naive loop is given, pinned batches "
            "apart",
            ", not compiled",
            compiled=False,
        ),
        _plan(
            "fast",
            "the plan `fast`, which compiles; what the naive loop is given, pinned batches apart",
        ),
        _plan(
            "fast",
            "the same, the loss by `torchfast.losses.linear_cross_entropy`, without the logits",
            " + vocabulary loss",
            loss_over_vocabulary=True,
        ),
        _plan(
            "fast",
            "the plan `fast`, eight steps in each replay by `Trainer.steps`",
            ", unrolled",
            unroll=8,
        ),
        _plan(
            "fast",
            'the plan `fast` with `CompileOptions(mode="auto", budget_s=90)`: the way of compiling '
            "that it measures to be the fastest; its cold start has the search",
            ", searched",
            search_s=90.0,
        ),
    )
}
