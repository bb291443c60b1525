"""The optimizer's update, compiled where a plan asks for it.

torch's for-loop and foreach updates launch a dozen kernels for each tensor or list of tensors, and
each of them reads and writes all of the state. Compiled, the update of every group is one graph of
few kernels. It helps optimizers without a fused form, and small tensors. It does not help where the
update is fused already, which it is under ``plan="fast"`` wherever torch can, or where the time
goes to reading and writing the state of a large model once.

`CompiledUpdate` stands in the place of ``optimizer.step()`` in a step. The optimizer's own ``step``
is not touched, so there is nothing to put back, nor anything in a copy or a file:

- The first update runs as it is. It makes the optimizer's state, which then is where the compiled
  code finds it.
- Hooks and schedulers of the user's see an update as ever. While it runs, each group holds its
  learning rate as a tensor, so that a schedule compiles nothing again.
- One graph or none: an update with a graph break is not compiled in part, as nobody could say what
  of it has been done where the rest fails. It runs as it is, in the same step, with the cause in
  the report.

Forbidden: ranks. Each compiles by itself, and one that cannot would round otherwise than the rest.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from torchfast import compiler
from torchfast._core.building import optimized
from torchfast._core.closing import Closing
from torchfast._core.decisions import Decision, Outcome
from torchfast._core.errors import CompileError
from torchfast._core.reachable import weak_method
from torchfast.compiler import CompileOptions, compile_decision
from torchfast.graphs import LearningRates
from torchfast.precision import as_low_bit

if TYPE_CHECKING:
    from torchfast.compiler import OneGraph
    from torchfast.graphs import InGraph
    from torchfast.update_trial import UpdateTrial

logger = logging.getLogger(__name__)

# Updates that may tell nothing before it is given up to measure. A loss scale that begins too high
# takes some to come down.
_MOST_TRIALS = 8


@final
class CompiledUpdate(Closing):
    """Runs an optimizer's update: as ``optimizer.step()`` does, or compiled.

    Args:
        optimizer: Whose update it is, in the form in which it is to run; left as it is.
        options: ``update`` says whether; how it is compiled, and what a failure does. None
            compiles nothing.

    Attributes:
        is_undecided: Whether `decide` is still to measure.
        is_of_graph: Whether what it has found is about an update in a graph.

    Raises:
        CompileError: From a call, under ``on_failure="raise"``. The update has not run then.

    Numerics: Close to the update as it is: other roundings, and learning rates in float32.
    Synchronizes: While it compiles and measures; and at the first update, where that does.
    """

    def __init__(self, optimizer: Optimizer, options: CompileOptions | None) -> None:
        self._optimizer = optimizer
        self._options = options if options is not None else CompileOptions()
        self._name = type(optimizer).__name__
        self._graph: OneGraph | None = None
        self._has_state = False
        self._is_torchs = type(optimizer).__module__.startswith("torch.optim")
        self._changes_rates = False
        self._num_graphs_before = 0  # of what was let go
        self.is_undecided = self._options.update == "auto"
        self._found: UpdateTrial | None = None
        self.is_of_graph = False
        self._num_trials = 0
        self._outcome: Outcome = "applied"
        self._why_eager: str | None = None
        if self._options.update is False:
            self._why_eager = "the plan does not ask for it"
        elif (why := _why_left_alone(optimizer)) is not None:
            self._outcome, self._why_eager, self.is_undecided = "left alone", why, False
        else:
            self._inner = _inner_step(optimizer)
            self._rates = LearningRates(optimizer) if _has_rates(optimizer) else None
            self._graph = compiler.OneGraph(self._inner, self._name, self._options)
            self._load_hook = optimizer.register_load_state_dict_post_hook(
                weak_method(self._after_load)
            )

    def __call__(self) -> None:
        """Run the update."""
        if self._why_eager is not None or self.is_undecided or not self._has_state:
            rates = self._rates_now()
            self._optimizer.step()
            self._has_state = True
            # Behind a compiled update that does so it would be too late to run it as it is.
            self._changes_rates |= not self._is_torchs and self._rates_now() != rates
            return
        if (why := self._obstacle()) is not None:
            self._give_up(why)
            self._optimizer.step()
            return
        # Made anew each time, as it would keep this object alive, and with it the compiled code.
        Optimizer.profile_hook_step(self._run)(self._optimizer)
        if "step" in vars(self._optimizer):  # a scheduler's, which notes that it was called
            self._optimizer._opt_called = True  # type: ignore[attr-defined]

    def decide(self, in_graph: InGraph | None) -> None:
        """Measure, under ``update="auto"``, once there is state; gradients must be there.

        Args:
            in_graph: Captures a way by itself, where a graph will hold the update; None where none
                will. What was found about one is forgotten then.
        """
        if in_graph is None and self.is_of_graph:
            self._begin_anew()
        if not self.is_undecided or not self._has_state:
            return
        if (why := self._obstacle()) is not None:
            self._give_up(why)
            return
        assert self._graph is not None
        graph = self._graph
        if graph.off_because is not None:  # as in a capture, where nothing can be measured either
            return
        self._found = found = self._found_out(graph, in_graph)
        self._num_trials += 1
        if found.is_better is None and self._num_trials < _MOST_TRIALS:
            return
        self.is_undecided, self.is_of_graph = False, in_graph is not None
        if graph.failure is not None:
            self._give_up(graph.failure, graph.error)
        elif not found.is_better:
            self._outcome, self._why_eager = "left alone", found.why
            if found.is_better is None:
                self._why_eager = f"given up after {_MOST_TRIALS} trials, as {found.why}"
            graph.close()

    def _begin_anew(self) -> None:
        """Forget what was found about an update in a graph; not within a capture."""
        assert self._graph is not None
        if self._graph.off_because is not None:
            return
        self.is_of_graph = False
        if self._outcome == "stepped aside":  # it cannot be compiled, in a graph or not
            return
        if self._why_eager is not None:  # what was compiled is closed
            self._renew_graph()
        self._outcome, self._why_eager = "applied", None
        self._found, self._num_trials, self.is_undecided = None, 0, True

    def _found_out(self, graph: OneGraph, in_graph: InGraph | None) -> UpdateTrial:
        """Return what an earlier run has measured, or what this one does."""
        # What few plans ask for, and takes long to import.
        from torchfast.update_receipt import receipt_key, remember, remembered
        from torchfast.update_trial import try_update

        optimizer, options = self._optimizer, self._options
        device = next(iter(optimized(optimizer))).device
        key = None
        if options.cache is not None:
            key = receipt_key(optimizer, options, device, is_in_graph=in_graph is not None)
        if key is not None and (known := remembered(options, key)) is not None:
            return known
        found = try_update(
            optimizer,
            eager=self._run_as_it_is,
            compiled=self._run_compiled,
            why_failed=lambda: graph.failure,
            device=device,
            budget_s=options.budget_s,
            in_graph=in_graph,
        )
        if key is not None:
            remember(options, key, optimizer, found)
        return found

    def decisions(self) -> list[Decision]:
        """Return whether the update is compiled, and why; nothing where nobody asked."""
        if self._options.update is False:
            return []
        what = f"the update of {self._name}"
        if self._why_eager is not None:
            return [compile_decision(self._outcome, f"{what} runs as it is: {self._why_eager}")]
        assert self._graph is not None
        off = self._graph.off_because
        if not self._graph.graphs and self._has_state and off is not None:
            detail = f"{what} runs as it is: {off}; it is tried again at each update"
            return [compile_decision("stepped aside", detail)]
        if self.is_undecided:
            when = "at the second update" if self._found is None else "at the next update"
            detail = f"{what}: measured {when}"
            detail += "" if self._found is None else f", as before {self._found.why}"
        elif not self._graph.graphs:
            detail = f"{what}: not compiled yet, which the second update does"
        else:
            detail = f"{what}: compiled in {self._graph.seconds:.1f} s"
            detail += "" if self._found is None else f"; {self._found.why}"
        return [compile_decision("applied", detail)]

    def counters(self) -> dict[str, int | float | str]:
        """Return how many graphs were made of the update; more than one if it was changed."""
        if self._graph is None:
            return {}
        return {"update_graphs": self._num_graphs_before + self._graph.graphs}

    @override
    def close(self) -> None:
        """Free what was compiled; the optimizer was never changed."""
        if self._graph is not None:
            self._graph.close()
            self._load_hook.remove()

    # --- the ways to run it -----------------------------------------------------------------

    def _run(self, _: Optimizer) -> None:
        """Run the update within its hooks: compiled, or if that fails as it is."""
        if self._run_compiled():
            return
        graph = self._graph
        assert graph is not None
        if graph.failure is not None:
            self._give_up(graph.failure, graph.error)
        self._run_as_it_is()

    def _run_compiled(self) -> bool:
        assert self._graph is not None
        with torch.no_grad():
            if self._rates is None:
                return self._graph(self._optimizer)
            self._rates.fill()
            with self._rates.on_device():
                return self._graph(self._optimizer)

    def _run_as_it_is(self) -> None:
        with torch.no_grad():
            self._inner(self._optimizer)

    def _rates_now(self) -> list[object]:
        """Return the learning rates, tensors by identity, which asks no device."""
        rates = [group.get("lr") for group in self._optimizer.param_groups]
        return [id(rate) if isinstance(rate, Tensor) else rate for rate in rates]

    def _obstacle(self) -> str | None:
        """Return what keeps the update from being compiled; None if nothing does."""
        own: Any = vars(self._optimizer).get("step")  # as schedulers leave one
        if own is not None and getattr(own, "__wrapped__", None) is not type(self._optimizer).step:
            return "its step() was replaced by another function, which would not be called"
        if self._changes_rates:
            return "its step() changes the learning rate; change it between steps, by a scheduler"
        assert self._graph is not None
        return None if self._graph.graphs else _why_never(self._optimizer)

    def _give_up(self, why: str, error: BaseException | None = None) -> None:
        self._outcome, self._why_eager, self.is_undecided = "stepped aside", why, False
        assert self._graph is not None
        self._graph.close()
        if self._options.on_failure == "raise":
            raise CompileError(f"the update of {self._name} cannot be compiled: {why}") from error
        logger.warning("the update of %s runs eagerly: %s", self._name, why)

    def _after_load(self, _: Optimizer) -> None:
        """Compile anew: the guards know the state that was replaced, and versions are limited."""
        assert self._graph is not None
        if self._why_eager is None and self._graph.graphs:
            self._renew_graph()

    def _renew_graph(self) -> None:
        """Let go of what was compiled, which stays counted, and begin with nothing."""
        assert self._graph is not None
        self._num_graphs_before += self._graph.graphs
        self._graph.close()
        self._graph = compiler.OneGraph(self._inner, self._name, self._options)


def _why_left_alone(optimizer: Optimizer) -> str | None:
    """Return why there is nothing to compile; None if there is something."""
    if as_low_bit(optimizer) is not None:
        return "it compiles its own"
    if any(group.get("fused") for group in optimizer.param_groups):
        return "it is fused, which is one kernel or a few already"
    return None


def _why_never(optimizer: Optimizer) -> str | None:
    """Return why this optimizer's update cannot be compiled; None if it may be."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return "there are other ranks, and each would compile by itself; take a fused optimizer"
    step: Any = type(optimizer).step
    if getattr(step, "_torchdynamo_disable", False):
        return "torch does not compile this optimizer"
    if any(g.get("foreach") and g.get("capturable") is False for g in optimizer.param_groups):
        return "foreach=True takes no learning rate as a tensor here; build it without foreach"
    for parameter in optimized(optimizer):
        if type(parameter) not in (Tensor, nn.Parameter):
            return f"a parameter is a {type(parameter).__name__}, not a plain tensor"
        for name, value in optimizer.state.get(parameter, {}).items():
            # Compiled, it would be moved to the device, and stay there.
            if isinstance(value, Tensor) and value.device != parameter.device:
                return f"{name!r} of its state is on {value.device}; AdamW and SGD can be compiled"
    return None


def _inner_step(optimizer: Optimizer) -> Callable[[Optimizer], object]:
    """Return an optimizer's step without hooks, and without the switch of gradient recording.

    torch's own switch is a graph break, by intent; under ``no_grad`` there is nothing to switch.
    """
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    code = getattr(step, "__code__", None)
    if code is not None and code.co_name == "_use_grad":
        step = step.__wrapped__
    inner: Callable[[Optimizer], object] = step
    return inner


def _has_rates(optimizer: Optimizer) -> bool:
    return all(
        isinstance(group.get("lr"), float | int | Tensor) for group in optimizer.param_groups
    )
