"""CUDAGraphStep: a whole training step as one graph replay, for any callable that is a step.

A small model's step is thousands of kernels of a few microseconds each, and the host needs longer
to ask for one than the device to run it. A CUDA graph is asked for once: the device then runs all
of them by itself. What it replays is exactly what was recorded, and that is both the gain and the
danger. Recorded are addresses, shapes, and every number that the host knew at the time. What the
host computes is not in it: no Python runs in a replay.

So a call goes through these stations:

1. **Warm-up.** The first calls run as they are, on the stream that will capture: real steps of the
   training, in which libraries choose kernels, compilers compile, optimizers make their state.
2. **Capture.** The step is recorded, which computes nothing; then it is replayed for that batch.
3. **Replay.** The batch is copied to where the graph reads it, learning rates are brought up to
   date, the graph runs, and what it returns is cloned.

Before each replay the state is looked at: a module in another mode, another shape or another value
that is no tensor gets a graph of its own; what was replaced, and hyperparameters that changed, make
the graphs invalid, and a new one is captured. Whatever cannot be captured runs as it is, with a
reason in the report.

It helps where the host is the limit. A step of large kernels gains nothing, and keeps its memory
twice while graphs of several shapes do not share it well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, Final, Literal, final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from torchfast._core.arguments import check_callable, check_choice, explain_keywords
from torchfast._core.building import claim, release
from torchfast._core.closing import Closing
from torchfast._core.decisions import Decision, Report
from torchfast._core.device import check_device
from torchfast._core.errors import UnsupportedDeviceError
from torchfast._core.reachable import held_by
from torchfast.graphs.graph_form import Numerics, graph_form
from torchfast.graphs.learning_rates import LearningRates
from torchfast.graphs.named_state import NamedState
from torchfast.graphs.optimizer_form import OptimizerForm
from torchfast.graphs.options import CUDAGraphOptions


@final
class CUDAGraphStep(Closing):
    """A step that is captured once per shape and replayed.

    For one process: it asks no other rank how that one runs a step, and a graph with collectives
    must be captured and replayed on all ranks or on none. ``Plan(shard=...)`` sees to that.

    Args:
        fn: The step: any callable that computes on one device, changes the named state in place,
            and returns tensors in any nesting. What it returns besides tensors is frozen.
        state: Modules, optimizers, ``torch.amp.GradScaler``, generators and tensors that ``fn``
            reads or changes. What is not named cannot be watched nor put back; modules, tensors
            and generators in its closure are found without being named.
        numerics: ``"exact"`` brings an optimizer to a form that a graph can hold only where that
            changes no bit; ``"close"`` wherever torch has such a form, and takes graphs of what
            ``fn`` computes because it is told of the capture, if that is close.
        warm_up_steps: Calls that run as they are before a capture; later shapes take one.
        max_graphs: Graphs kept; the least recently used goes first.
        new_shapes: ``"capture"`` gives another shape its own graph, ``"eager"`` runs it as it is.
        on_failure: ``"eager"`` runs what cannot be captured as it is, with one warning;
            ``"raise"`` raises.
        check: Compare two replays with two eager steps after each capture; a graph that computes
            something else is not used.
        host_constants: Take what the step copies from the host for constants if it is the same in
            two steps: ``"auto"`` what is made of plain numbers, of which a change is noticed; True
            all, and what changes later is frozen; False nothing.
        time_phases: Put events into the graph where each `phase` begins and ends, for
            `phase_times`. Some 2 us of the device for each.
        device: Where; None means the device of the first parameter that is not on the host, or the
            current CUDA device if there is none and some lie in pinned memory.

    Raises:
        TypeError: An argument of the wrong kind.
        ValueError: A choice that does not exist, or a number out of range.
        UnsupportedDeviceError: The device has no graphs.
        CaptureError: With ``on_failure="raise"``, from the call that was to be captured; the state
            is as it was before.

    Numerics: Bitwise equal to ``fn`` with its optimizers in the form that `report` tells.
    Synchronizes: At construction, while it warms up and at captures only.
    """

    _runs_steps: Final = True  # so a method that calls one is none of a step's

    @explain_keywords
    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        state: Iterable[object] = (),
        numerics: Numerics = "exact",
        warm_up_steps: int = 3,
        max_graphs: int = 8,
        new_shapes: Literal["capture", "eager"] = "capture",
        on_failure: Literal["eager", "raise"] = "eager",
        check: bool = True,
        host_constants: bool | Literal["auto"] = "auto",
        time_phases: bool = False,
        device: torch.device | str | int | None = None,
    ) -> None:
        check_callable("fn", fn, "fn(batch)")
        check_choice("numerics", numerics, ("exact", "close"))
        options = CUDAGraphOptions(
            warm_up_steps=warm_up_steps,
            max_graphs=max_graphs,
            new_shapes=new_shapes,
            on_failure=on_failure,
            check=check,
            host_constants=host_constants,
            parity="exact" if numerics == "exact" else "close",
            time_phases=time_phases,
        )
        named = NamedState(state, found=held_by(fn), function=fn)
        self.device = _device_of(named, device)
        self._name = getattr(fn, "__qualname__", type(fn).__name__)
        self._forms: list[OptimizerForm] = []
        self._hooks: list[RemovableHandle] = []
        self._decisions: list[Decision] = []
        from torchfast.graphs.engine import GraphEngine  # as for every step that is captured

        self._engine = GraphEngine(fn, named, options, self.device)
        for optimizer in named.optimizers:
            release(optimizer)
            claim(optimizer, self.close)
        found = [self._rates(o, named.modules, numerics) for o in named.optimizers]
        named.rates = [rates for rates in found if rates is not None]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step.

        Args:
            *args: Passed to ``fn``. Tensors on the device or in pinned memory keep the host from
                waiting.
            **kwargs: Likewise.

        Returns:
            What ``fn`` returns, detached and safe to keep.
        """
        return self._engine.run(*args, **kwargs)

    def phase_times(self) -> list[dict[str, float]]:
        """Return what each `phase` took in some of the latest replays, with ``time_phases=True``.

        Returns:
            Milliseconds by name, a dictionary for a replay; at most 256, the latest last.

        Synchronizes: Never; a replay that the device is not through with is not told.
        """
        return self._engine.store.phase_times()

    def report(self) -> Report:
        """Return what was captured and what was not, and why. Synchronizes: Never."""
        return Report(
            title=f"CUDAGraphStep({self._name}) on {self.device}",
            decisions=(*self._decisions, *self._engine.decisions()),
            counters=self._engine.counters(),
        )

    @override
    def close(self) -> None:
        """Let go of the graphs and put the optimizers back; a second call does nothing."""
        with ExitStack() as stack:
            for form in self._forms:
                stack.callback(form.close)
            for hook in self._hooks:
                stack.callback(hook.remove)
            stack.callback(self._engine.close)
        self._forms, self._hooks = [], []

    def __repr__(self) -> str:
        return f"CUDAGraphStep({self._name}, device={str(self.device)!r})"

    def _rates(
        self, optimizer: torch.optim.Optimizer, modules: list[nn.Module], numerics: Numerics
    ) -> LearningRates | None:
        """Bring an optimizer to a form that a graph can hold; return its learning rates."""
        found, decision = graph_form(optimizer, numerics)
        if found is not None:
            form = OptimizerForm(optimizer, found.form, nn.ModuleList(modules))
            if form.form != "as_given":
                self._forms.append(form)
                hook = optimizer.register_load_state_dict_post_hook(lambda _: form.apply())
                self._hooks.append(hook)
                self._decisions.append(decision)
                return LearningRates(optimizer, found.rate_dtype)
            decision = form.decision
        self._decisions.append(decision)
        return None


def _device_of(state: NamedState, device: object) -> torch.device:
    if device is not None:
        return check_device(device, data=False)
    # An offload keeps parameters on the host, in pinned memory, and computes where the others are.
    for tensor in state.tensors:
        if tensor.device.type != "cpu":
            return tensor.device
    if state.tensors and not any(tensor.is_pinned() for tensor in state.tensors):
        return state.tensors[0].device
    try:
        return check_device("cuda", data=False)
    except UnsupportedDeviceError:  # whose remedy is another device, which has no graphs either
        raise UnsupportedDeviceError(
            f"there are no graphs here, since this machine or torch build ({torch.__version__}) "
            "has no CUDA; call the step itself, or use Trainer, which steps aside where there are "
            "none"
        ) from None
