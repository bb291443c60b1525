"""The loss function of a step, compiled as its plan says.

A step calls ``loss_fn(model, batch)``. Whole means that this call is compiled: the model, the loss
and all between them, so that the last layer is fused with the loss too. By blocks means that these
are compiled where they stand in the model, and what stands around them, the loss above all, in
pieces between them. Regions that are named are compiled where they stand, and the rest runs as it
is. The model stays the user's object in any case, and whatever else calls it (evaluation, the
averaged model) finds it as usual.

The first steps compile, forward and backward, before a graph is captured. Under a graph nothing of
it is left in a step but its kernels: neither guards nor Python.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from torchfast import compiler
from torchfast._core.closing import Closing
from torchfast._core.compiled_code import is_disabled
from torchfast._core.decisions import Decision
from torchfast._core.function_fingerprint import function_fingerprint
from torchfast.compiler import CompileOptions, Mode, compile_decision
from torchfast.plan import Plan

if TYPE_CHECKING:
    from torchfast.compiler import Compiled
    from torchfast.graphs import GraphedUpdate

logger = logging.getLogger(__name__)

LossFn = Callable[[Any, Any], Any]

# What these modes add to another are graphs of torch's own, for which a graph of the whole step has
# no room.
WITHIN_A_GRAPH: dict[str, Mode] = {
    "reduce-overhead": "default",
    "max-autotune": "max-autotune-no-cudagraphs",
}


@final
class CompiledLoss(Closing):
    """Calls ``loss_fn(model, batch)`` with what a plan compiles of it.

    Args:
        model: What the step trains.
        loss_fn: As the user gave it; it is not changed.
        plan: What to compile, and what else is done to the step.
        device: Where it trains.

    Attributes:
        loss_fn: As given.

    Raises:
        ValueError: A region that the model does not have, or a model that is compiled already.

    Numerics: May differ by rounding.
    Synchronizes: While it compiles only.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFn, plan: Plan, device: torch.device) -> None:
        self._model, self.loss_fn, self._device = model, loss_fn, device
        self._function = loss_fn
        self._plan_text = _beside_compiling(plan)
        self._in_graph = plan.graph_options is not None and device.type == "cuda"
        self._compiled: Compiled | None = None
        self._has_own_graphs = False  # torch's, by the mode
        self._is_in_step = False
        self._decisions: list[Decision] = []
        self._undecided: CompileOptions | None = None
        self._is_auto, self._aside = plan.compile == "auto", ""
        self._loss_text = ""
        recompute = plan.recompute_options
        budget = None if recompute is None else recompute.budget
        self._budget: Callable[[], AbstractContextManager[None]] = nullcontext
        if budget is not None:
            from torchfast.memory.recompute_transform import memory_budget  # few plans have one

            self._budget = functools.partial(memory_budget, budget)
        options = self._resolved(plan)
        if options is None:
            return
        if options.mode == "auto":
            compiler.choose_regions(model, options.regions)  # raises now what cannot be
            self._undecided = options
            # Now, since steps may change what it holds.
            self._loss_text = function_fingerprint(loss_fn)
        else:
            self._use(self._make(options))

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        """Return what the loss function returns."""
        with self._budget():
            return self._copied_out(self._function(model, batch))

    def as_given(self, model: nn.Module, batch: Any) -> Any:
        """Return what the loss function returns, called as it was given, by an evaluation."""
        self.begin(is_step=False)
        return self._copied_out(self.loss_fn(model, batch))

    @property
    def is_undecided(self) -> bool:
        """Whether `decide` is still to find out how to compile, for ``mode="auto"``."""
        return self._undecided is not None

    @property
    def changes_model(self) -> bool:
        """Whether regions of the model are compiled where they stand, or may yet be."""
        return self._undecided is not None or (
            self._compiled is not None and isinstance(self._compiled, compiler.CompiledModule)
        )

    def decide(
        self,
        gradients: Callable[[tuple[Any, ...]], tuple[Tensor, object]],
        group: tuple[Any, ...],
        graph: GraphedUpdate | None,
    ) -> None:
        """Find out how to compile.

        Args:
            gradients: Runs the step's forward and backward on a group of micro-batches by this
                object, and returns the loss and more.
            group: Of the first step.
            graph: What will hold the step; None if nothing will.
        """
        from torchfast.compiler.mode_search import search_mode

        options = self._undecided
        assert options is not None
        found = search_mode(
            self._model,
            options,
            self._make,
            self._use,
            lambda: gradients(group)[0],
            group,
            self._device,
            in_graph=self._in_graph,
            plan=self._plan_text,
            loss=self._loss_text,
            graphs=None if graph is None else graph.trials(gradients, group),
        )
        self._undecided = None  # not before: an error of the user's leaves it to the next step
        self._decisions.append(compile_decision(found.outcome, str(found)))
        logger.info("%s", found.receipt)

    def begin(self, *, is_step: bool = True) -> None:
        """Note that a step or an evaluation of a batch begins.

        All micro-batches of a step belong together in torch's own graphs: the gradients of the
        first lie in their memory until the last has added its own. So does an evaluation between
        the two halves of a step.
        """
        if self._has_own_graphs and (is_step or not self._is_in_step):
            torch.compiler.cudagraph_mark_step_begin()
        if is_step and not self._is_in_step and self._compiled is not None:
            self._compiled.before_step()
        self._is_in_step |= is_step

    @property
    def may_step_aside(self) -> bool:
        """Whether what is compiled may turn out not to pay: where ``"auto"`` has chosen it."""
        return self._is_auto and self._compiled is not None

    @property
    def num_breaks(self) -> int:
        """How many graph breaks there are that nobody has asked for."""
        return int(self.counters().get("compile_graph_breaks", 0))

    def suspend(self) -> None:
        """Run everything as it is until `resume`."""
        if self._compiled is not None:
            self._compiled.suspend()

    def resume(self) -> None:
        """Run what was compiled again."""
        if self._compiled is not None:
            self._compiled.resume()

    def step_aside(self, why: str) -> None:
        """Run everything as it is from now on; what is known of the compiled code is kept."""
        self.suspend()
        self._aside = f"the step is faster without: {why}"
        logger.warning("compile: the step is faster without: %s", why)

    def stay(self, why: str) -> None:
        """Note that what was compiled was timed, and is faster."""
        self._decisions.append(compile_decision("applied", f"the step is faster so: {why}"))

    def after_step(self) -> None:
        """Note that a step is done: see `CompiledModule.after_step`."""
        self._is_in_step = False
        if self._compiled is not None:
            self._compiled.after_step()

    def decisions(self) -> list[Decision]:
        """Return what is compiled, what became of it, and what to do about the rest."""
        if self._undecided is not None:
            return [compile_decision("applied", "mode 'auto' is decided on at the first step")]
        found = list(self._decisions)
        compiled = self._compiled
        if self._aside and compiled is not None:
            found.append(compile_decision("stepped aside", self._aside))
            return found + [d for d in compiled.decisions() if d.outcome == "stepped aside"]
        if (
            compiled is not None
            and isinstance(compiled, compiler.CompiledCallable)
            and not compiled.status.startswith("eager")
        ):
            choice = compiler.choose_regions(self._model, compiled.options.regions)
            found.append(compile_decision("applied", f"the loss function with {choice}"))
        return found + ([] if self._compiled is None else self._compiled.decisions())

    def counters(self) -> dict[str, int | float | str]:
        """Return graphs, breaks, recompiles, seconds and the use of caches; empty if none."""
        if self._compiled is None:
            return {}
        counted = self._compiled.report().counters
        return {
            f"compile_{name.removeprefix('compile_')}": number
            for name, number in counted.items()
            if number or name == "graphs"
        }

    @override
    def close(self) -> None:
        """Give the eager model back, and keep what was compiled."""
        if self._compiled is not None:
            self._compiled.close()

    def _copied_out(self, result: Any) -> Any:
        # What lies in the memory of torch's own graphs is overwritten by the next call.
        return tree_map_only(Tensor, Tensor.clone, result) if self._has_own_graphs else result

    def _make(self, options: CompileOptions) -> Compiled:
        """Compile as options say."""
        choice = compiler.choose_regions(self._model, options.regions)
        # Named regions are compiled as named, though it be the model itself. A loss function that
        # torch is to leave alone has its model compiled in it.
        is_named, leaves_loss = isinstance(options.regions, tuple), is_disabled(self.loss_fn)
        if choice.is_whole and not (is_named or leaves_loss):
            return compiler.compile_callable(
                self.loss_fn, options, model=self._model, context=self._plan_text
            )
        fields = {f.name: getattr(options, f.name) for f in dataclasses.fields(options)}
        del fields["update"]  # of the optimizer
        compiled = compiler.CompiledModule(self._model, **fields)
        # Who names regions wants these and no others.
        if not (is_named or leaves_loss):
            compiled.around(self.loss_fn)
        return compiled

    def _use(self, compiled: Compiled | None) -> None:
        self._compiled = compiled
        mode = None if compiled is None else compiled.options.mode
        self._has_own_graphs = mode in WITHIN_A_GRAPH and self._device.type == "cuda"
        self._function = self.loss_fn
        if compiled is None:
            return
        if isinstance(compiled, compiler.CompiledCallable):
            self._function = compiled
        elif compiled.code_around is not None:
            self._function = compiled.code_around

    def _resolved(self, plan: Plan) -> CompileOptions | None:
        """Return how to compile on this device, or None, and note what there is to say."""
        options = plan.compile_options
        if options is None:
            self._decisions.append(compile_decision("left alone", "nothing is compiled"))
            return None
        if plan.compile == "auto" and self._device.type != "cuda":
            why = f"'auto' compiles on CUDA devices only; True does on {self._device.type} too"
            self._decisions.append(compile_decision("left alone", why))
            return None
        other = WITHIN_A_GRAPH.get(options.mode) if self._in_graph else None
        if other is None:
            return options
        why = f"mode {options.mode!r} makes graphs of its own; within the step's it is {other!r}"
        self._decisions.append(compile_decision("applied", why))
        return dataclasses.replace(options, mode=other)


def _beside_compiling(plan: Plan) -> str:
    """Return what a plan does to a step, but for how it compiles, which is told apart."""
    fields = json.loads(plan.to_json())
    fields.pop("compile", None)
    return json.dumps(fields, sort_keys=True)
