"""The forward of a block that runs again in the backward, where it stands.

A module is called by ``module(x)``, which runs its hooks and, between them, looks up
``module.forward``. There stands a `BlockForward`, in the object's own ``__dict__``: the class,
keys, parameter names, hooks and ``repr`` stay, and `BlockForward.undo` takes the attribute away.
Why there and not elsewhere:

- hooks that checkpoint would be the user's to see, to copy and to run in the wrong order; a step's
  graph reports hooks, since they do not run in a replay;
- ``_compiled_call_impl`` is where compilation stands, and it has to be outside: a compiled region
  calls the module's hooks and its ``forward``, so recompute is inside what is compiled, as it must;
- around ``forward`` and not around the call, the hooks of the user and of ``fully_shard`` run once
  and not again in the backward.

A deep copy or a pickle of the block gets the class's own forward: what is copied computes as ever.
A shallow copy shares all attributes and so this one too, which cannot know that the copy was
called: it runs the block that was copied. So do the replicas of ``nn.DataParallel``.

Under ``torch.compile`` the same object tells the compiler what to recompute, by torch's checkpoint,
which the compiler understands; what it makes of it writes no buffer twice and draws nothing anew.
By itself it would read a buffer as the block has left it (see `traced_writes`). A block that the
compiler has to leave, because of a graph break, runs again as where nobody compiles.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, final

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from torchfast._core.stand_in import ForwardStandIn
from torchfast.memory.block_costs import CostMeter
from torchfast.memory.kept_calls import KeptCalls, KeptPlaces
from torchfast.memory.kept_results import KeptChoice, choose_kept, policy
from torchfast.memory.kv_caches import LeftOut, has_cache, holds_past, without_cache
from torchfast.memory.own_generators import OwnGenerators
from torchfast.memory.recompute_options import RecomputeOptions
from torchfast.memory.second_run import TwiceRun
from torchfast.memory.written_buffers import Before, WrittenBuffers

# What torch's checkpoint takes for itself, and a block may be called with, too.
_OF_CHECKPOINT = frozenset({*inspect.signature(checkpoint).parameters, "preserve_rng_state"})


def _keep_expensive() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return what tells the compiler what to keep; a block that it has to leave keeps nothing."""
    if torch._guards.TracingContext.try_get() is None:
        return nullcontext(), nullcontext()
    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(policy)
    return contexts


@final
class BlockKind:
    """Equal blocks, for which one choice of results to keep holds.

    Attributes:
        names: The blocks in words.
        choice: What selective recompute keeps, once the first call has shown what there is.
        places: Where in a block that is made.
        end: Behind how many saved tensors come those at the end that cost nothing to keep.
        ends_later: Whether what is saved may be filled only behind that.
        num_recomputed: Calls that will run again.
        is_compiled: Whether a call was compiled, so that the compiler recomputes.
        has_dropped_cache: Whether a cache of keys and values was left out of a call.
        left_out: Which ones were, of those that live.
        num_with_past: Calls that ran as they are, because their cache holds earlier tokens.
        has_compiled_past: Whether there are such calls in what is compiled.
        num_in_eval: Calls that ran as they are in eval mode, though with gradients.
    """

    def __init__(self, names: str, options: RecomputeOptions) -> None:
        self.names = names
        self.options = options
        self.choice: KeptChoice | None = None
        self.places: KeptPlaces | None = None
        self.end: int | None = None
        self.ends_later = False
        self.num_recomputed = 0
        self.is_compiled = False
        self.has_dropped_cache = False
        self.left_out = LeftOut()
        self.num_with_past = self.num_in_eval = 0
        self.has_compiled_past = False

    def measured(self, module: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a first call as it is, and choose what later ones keep."""
        result, costs_of = CostMeter(module).run(module, run, args, kwargs)
        costs = costs_of()
        share = self.options.share
        choice = choose_kept(costs.results, costs.saved_bytes, costs.input_bytes, share)
        self.choice = choice
        self.places = KeptPlaces.of(
            choice.kept,
            costs.made_in,
            costs.order,
            costs.norms,
            costs.attention,
            costs.kept_inputs,
        )
        return result


@final
class BlockForward(ForwardStandIn):
    """Stands as ``forward`` of a module, which it does not keep alive.

    Args:
        path: Where the module stands.
        module: The module.
        kind: What it is equal to.
    """

    __slots__ = ("_buffers", "_generators", "_parts", "kind", "path")

    def __init__(self, path: str, module: nn.Module, kind: BlockKind) -> None:
        super().__init__(module)
        self.path, self.kind = path, kind
        self._buffers, self._generators = WrittenBuffers(), OwnGenerators()
        self._parts: list[_Part] | None = None  # of which these two know

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward; in training, so that it runs again in the backward."""
        module: Any = self._module()
        if module is None:
            raise RuntimeError(
                f"a shallow copy of the block {self.path} was called, which runs the block itself, "
                "and that is gone; use copy.deepcopy, or copy the block before it recomputes"
            )
        if not self._is_active:
            return self._plain(*args, **kwargs)
        # The compiler would have to follow it; and what runs again gets the same cache again.
        is_watched = not torch.compiler.is_compiling() and torch._C._current_graph_task_id() == -1
        if is_watched and self.kind.has_dropped_cache:
            self.kind.left_out.check(self.path, args, kwargs)
        if not module.training or not torch.is_grad_enabled():
            if is_watched and torch.is_grad_enabled():  # else the compiler would guard the number
                self.kind.num_in_eval += 1
            return self._plain(*args, **kwargs)
        if has_cache(args, kwargs):
            if holds_past(module, args, kwargs):
                if torch.compiler.is_compiling():  # which would guard the number
                    self.kind.has_compiled_past = True
                else:
                    self.kind.num_with_past += 1
                return self._plain(*args, **kwargs)
            if is_watched:
                self.kind.left_out.add(self.path, args, kwargs)
            args, kwargs = without_cache(args, kwargs)
            self.kind.has_dropped_cache = True
        if torch.compiler.is_compiling():
            self.kind.is_compiled = True
            return self._compiled(args, kwargs)
        return self._recomputed(module, args, kwargs)

    def _recomputed(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run eagerly, so that it runs again in the backward."""
        kind = self.kind
        if self._parts is not None and not all(map(_is_as_it_was, self._parts)):
            # Others, which are looked at as in a first call; what has run goes on with the former.
            self._buffers, self._generators, self._parts = WrittenBuffers(), OwnGenerators(), None
        if kind.options.selective and kind.choice is None and not _is_checkpointed():
            before = self._buffers.before(module)
            result = kind.measured(module, self._plain, args, kwargs)
            self._buffers.written(module, before)
            self._parts = _parts_of(module)
            return result
        kind.num_recomputed += 1
        call = _Call(module, self._plain, self._buffers, kind)
        result = call.run(self._generators, args, kwargs)
        if self._parts is None:
            self._parts = _parts_of(module)
        return result

    def _compiled(self, args: Any, kwargs: Any) -> Any:
        """Run what is compiled, or stand where the compiler has to leave the block."""
        run: Callable[..., Any] = self._either
        if not _OF_CHECKPOINT.isdisjoint(kwargs):
            run, kwargs = partial(run, **kwargs), {}
        if self.kind.options.selective:
            result = checkpoint(
                run, *args, use_reentrant=False, context_fn=_keep_expensive, **kwargs
            )
        else:
            result = checkpoint(run, *args, use_reentrant=False, **kwargs)
        if torch.compiler.is_dynamo_compiling():
            # It needs torch's compiler, whose import takes seconds.
            from torchfast.memory.traced_writes import keep_what_is_written

            keep_what_is_written()
        return result

    def _either(self, *args: Any, **kwargs: Any) -> Any:
        """Run within what is compiled, or, where the compiler has to leave the block, eagerly.

        Then torch's checkpoint is around it, which puts back no generator of the block's own and
        copies no object that it is called with. So what autograd saves does not come to it: it has
        nothing to compute again, and the block is run as where nobody compiles.
        """
        if torch.compiler.is_compiling():
            return self._plain(*args, **kwargs)
        hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
        torch._C._autograd._pop_saved_tensors_default_hooks()
        try:
            module: Any = self._module()
            return self._recomputed(module, args, kwargs)
        finally:
            torch._C._autograd._push_saved_tensors_default_hooks(*hooks)


def _is_checkpointed() -> bool:
    """Whether torch's checkpoint is around, in whose second run as much has to be saved as now."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and getattr(hooks[0], "__module__", "") == checkpoint.__module__


# A module's children and buffers as they stand there, how many buffers, and which children.
_Part = tuple[Any, Any, int, tuple[nn.Module | None, ...]]


def _parts_of(block: nn.Module) -> list[_Part]:
    return [
        (m._modules, m._buffers, len(m._buffers), tuple(m._modules.values()))
        for m in block.modules()
    ]


def _is_as_it_was(part: _Part) -> bool:
    children, buffers, num, there = part
    return len(buffers) == num and tuple(children.values()) == there


def forward_of(module: nn.Module) -> BlockForward | None:
    """Return what stands in a module's way, if it is one of ours."""
    there = vars(module).get(BlockForward.ATTRIBUTE)
    return there if isinstance(there, BlockForward) else None


@final
class _Call:
    """One call of a block: first the forward, and later as often as the backward asks."""

    __slots__ = ("_before", "_buffers", "_kept", "_kind", "_module", "_run")

    def __init__(
        self,
        module: nn.Module,
        run: Callable[..., Any],
        buffers: WrittenBuffers,
        kind: BlockKind,
    ) -> None:
        self._module, self._run, self._buffers, self._kind = module, run, buffers, kind
        places = kind.places
        self._kept = None if places is None else KeptCalls(places, module)
        self._before: Before = []

    def run(self, generators: OwnGenerators, args: Any, kwargs: Any) -> Any:
        """Run the forward, which may draw from generators of its own."""
        known, of_host = generators.of(self._module), generators.before()
        kind = self._kind
        end, device = kind.end, _device_of(self._module)
        twice = TwiceRun(self._again, args, kwargs, device, known, end, ends_later=kind.ends_later)
        before = self._buffers.before(self._module)
        # For a backward within the forward, which comes before it is known what was written to.
        self._before = [kept for kept in before if kept.is_known]
        if self._kept is None:
            result = twice.first(self._run, args, kwargs)
        else:
            with self._kept.keeping(twice):
                result = twice.first(self._run, args, kwargs)
        self._before = self._buffers.written(self._module, before)
        twice.drew(generators.drawn(of_host))
        if end is None:
            kind.end, kind.ends_later = twice.end, twice.ends_later
        return result

    # It gets the call, which would hold itself if it were held here.
    def _again(self, twice: TwiceRun, *args: Any, **kwargs: Any) -> None:
        if not self._module.training:
            raise RuntimeError(
                f"a {type(self._module).__name__} was put in eval mode between its forward and its "
                "backward, in which it runs again and would compute something else; call eval() "
                "behind the backward, or train() before it"
            )
        with self._buffers.standing_in(self._before):
            if self._kept is None:
                self._run(*args, **kwargs)
            else:
                with self._kept.giving(twice):
                    self._run(*args, **kwargs)


def _device_of(module: nn.Module) -> torch.device | None:
    parameter = next(module.parameters(), None)
    is_there = parameter is not None and parameter.device.type not in ("cpu", "meta")
    return parameter.device if parameter is not None and is_there else None
