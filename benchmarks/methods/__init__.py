"""Ways to train: each a loop over a `Job`, as its users write it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

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
        fits: Whether it can train a workload; None: any.
    """

    name: str
    train: Callable[[Job], None]
    given: str
    needs: str | None = None
    cuda_only: bool = False
    compiles: bool = False
    cache_of: str | None = None
    fits: Callable[[Workload], bool] | None = None

    def obstacle(self, workload: Workload, *, on_cuda: bool) -> str | None:
        """Return why it cannot train this workload here, or None."""
        if self.fits is not None and not self.fits(workload):
            return "not made for this workload"
        if self.cuda_only and not on_cuda:
            return "needs a CUDA device"
        package = self.needs and self.needs.partition(".")[0]
        if package and importlib.util.find_spec(package) is None:
            return f"the package {package} is not installed"
        return None


COMPILER = "torch._inductor.compile_fx"


def _is_language(workload: Workload) -> bool:
    return workload.language


def _is_llama(workload: Workload) -> bool:
    return workload.name == "llama"


def _has_regions(workload: Workload) -> bool:
    with torch.device("meta"):
        return bool(workload.regions(workload.build()))


def _computes(workload: Workload) -> bool:
    """Return whether the time goes into computing: compiling speeds up no copy and no loader."""
    return workload.bound == "compute"


def _compiled(mode: str, cache_of: str | None = None) -> Method:
    given = f'the tuned loop with `torch.compile(model, mode="{mode}")`'
    return Method(
        f"compile {mode}",
        partial(loops.compiled, mode=mode),
        f"{given} and the cache of `{cache_of}`" if cache_of else given,
        needs=COMPILER,
        compiles=True,
        cache_of=cache_of and f"compile {cache_of}",
        fits=_computes,
    )


def _by_hand(name: str, train: Callable[[Job], None], given: str, **details: object) -> Method:
    return Method(f"by hand: {name}", train, given, cuda_only=True, **details)  # type: ignore[arg-type]


def _plan(plan: str, given: str) -> Method:
    return Method(f"torchfast {plan}", partial(plans.train, plan=plan), given)


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
            "logged, saved or reported",
            needs="transformers.trainer",
            fits=_is_language,
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
            fits=_has_regions,
        ),
        _by_hand(
            "graph + compile whole",
            by_hand.graph_and_whole,
            "the same, model and loss compiled as one",
            needs=COMPILER,
            compiles=True,
            fits=_computes,
        ),
        _by_hand(
            "graph + float8 + compile by block",
            by_hand.graph_and_float8,
            "the same by block, matrix products of the blocks in float8 (torchao, tensorwise)",
            needs="torchao.float8",
            compiles=True,
            fits=_is_llama,
        ),
        _plan("eager", "the plan `eager`; what the tuned loop is given"),
        _plan("exact", "the plan `exact`; what the tuned loop is given"),
        _plan("fast", "the plan `fast`; what the naive loop is given, pinned batches apart"),
    )
}
