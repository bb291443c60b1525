"""What a step's plan says of memory: the allocator's settings, and what happens when it runs out.

The leaf `torchfast.memory` knows neither plans nor loaders nor the parts of a step. They come
together here: which function is which stage, whose tensors there are besides the model's, and what
has to let go of a step that failed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from torchfast._core.decisions import Decision
from torchfast._core.errors import PlanError
from torchfast._core.local import local
from torchfast._core.reachable import held_by
from torchfast._core.untouched import holders_in
from torchfast.data import PrefetchingLoader
from torchfast.data.loader_report import device_tensors
from torchfast.ema import WeightAverage
from torchfast.gradients import Gradients
from torchfast.memory import StepOffload
from torchfast.memory.attention_watch import AttentionWatch
from torchfast.parallel import Sharding
from torchfast.plan import Plan
from torchfast.precision import UpdateGuard
from torchfast.update import Update

if TYPE_CHECKING:
    from torchfast.memory import MemoryAccount, MemoryMonitor, OutOfMemoryGuard

R = TypeVar("R")
Group = tuple[object, ...]

_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel")

# The innermost that a traceback goes through counts.
_STAGES = {
    Gradients.__call__.__code__: "backward",
    Gradients._forward.__code__: "forward",
    Gradients.compute_loss.__code__: "forward",
    Gradients._backward.__code__: "backward",
    Update.__call__.__code__: "update",
    Update.clip.__code__: "update",
    Update.behind_graph.__code__: "update",
}


class Run(Protocol):
    """How `OutOfMemoryGuard.run` is called here."""

    def __call__(self, attempt: Callable[[Group], R], group: Group, *, is_step: bool = True) -> R:
        """Return ``attempt(group)``."""


@final
class StepMemory:
    """The memory of a step.

    Args:
        plan: Its ``allocator`` is applied at once, before anything is moved to a device.
        model: Looked at for what other ranks are in, as is what ``loss_fn`` refers to.
        loss_fn: The user's.

    Raises:
        PlanError: Steps in parts for a model that is wrapped or sharded already on several ranks.

    Attributes:
        attention: Which attention the first forwards ran.
        monitor: What watches memory in `fit`; None before, and on a device without an allocator.
        run: Runs a step or its first half on micro-batches, from `watch` on; see
            `OutOfMemoryGuard.run`.
    """

    run: Run

    def __init__(self, plan: Plan, model: nn.Module, loss_fn: Callable[..., Any]) -> None:
        self._plan, self._loss_fn = plan, loss_fn
        if plan.out_of_memory_options.action == "split":
            _check_alone([model, *held_by(loss_fn)])
        self._decisions: list[Decision] = []
        if plan.allocator_config is not None:
            from torchfast.memory import apply_allocator

            self._decisions = apply_allocator(plan.allocator_config)
        self._guard: OutOfMemoryGuard | None = None
        self._forget: Callable[[], None] = lambda: None
        self._sharding: Sharding | None = None
        self.monitor: MemoryMonitor | None = None
        self.attention = AttentionWatch()
        self._device = torch.device("cpu")
        self._loaders: weakref.WeakSet[PrefetchingLoader] = weakref.WeakSet()

    def watch(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        guard: UpdateGuard,
        average: WeightAverage,
        offload: StepOffload,
        gradients: Gradients,
    ) -> None:
        """Begin to care for a step's memory."""
        device = self._device = gradients.device
        self._forget, self._sharding = guard.forget, gradients.sharding
        from torchfast.memory import OutOfMemoryGuard  # when something trains, not at import

        def others() -> dict[str, Iterable[Tensor]]:
            return {
                "averaged weights": [
                    t for m in average.named for t in (*m.parameters(), *m.buffers())
                ],
                "the loader's ring": [t for each in self._loaders for t in device_tensors(each)],
                **offload.on_device(),
            }

        guard_of_memory = self._guard = OutOfMemoryGuard(
            model,
            optimizer,
            device,
            self._plan.out_of_memory_options,
            stages=_STAGES,
            facts={name: getattr(self._plan, name) for name in type(self._plan).__annotations__},
            others=others,
            after_failure=guard.forget,
            loss_of=lambda batch: gradients.compute_loss(batch, model),
            used=partial(holders_in, self._loss_fn),
            in_float8=self._plan.float8_options is not None,
            ranks=gradients.sharding.shared if gradients.sharding.is_on else None,
        )
        self.run = guard_of_memory.run  # itself: a step would feel a call in between

    def check_ranks(self, model: nn.Module, sharding: Sharding) -> None:
        """Raise if a step in parts could not be begun again by all ranks.

        Raises:
            PlanError: A forward meets other ranks where they cannot be asked.
        """
        if self._plan.out_of_memory_options.action != "split" or not sharding.is_on:
            return
        found = [name for name, m in model.named_modules() if isinstance(m, nn.SyncBatchNorm)]
        if found:
            raise PlanError(
                f"out_of_memory='split' does not go with nn.SyncBatchNorm ({found[0]!r}) on "
                f"{sharding.ranks.world_size} ranks: they meet within its forward, where a rank "
                "that has run out of memory cannot tell the others; take nn.BatchNorm, or smaller "
                "batches and accumulate"
            )

    def run_update(self, update: Callable[[], R]) -> R:
        """Return ``update()``; gradients stay if it fails, so that it can be called again."""
        assert self._guard is not None
        return self._guard.run(lambda _: update(), (), keeps_gradients=True)

    def after_failed_capture(self) -> None:
        """Take an account, if it was memory that ran out, and let go of what was kept."""
        if self._guard is not None:
            self._guard.after_failed_capture()
        self.after_trial()
        if self._sharding is not None:
            self._sharding.after_failure()

    def after_trial(self) -> None:
        """Let go of what was kept of a step that was tried, on this rank alone."""
        self._forget()
        if self._sharding is not None:
            self._sharding.close_pass()

    def note_loader(self, loader: PrefetchingLoader) -> None:
        """Let the account know whose the memory of a loader is."""
        self._loaders.add(loader)

    @contextmanager
    def monitored(self) -> Iterator[None]:
        """Watch the memory of the steps of the body, where a device's allocator tells of it."""
        if self.monitor is None and self._device.type == "cuda":
            from torchfast.memory import MemoryMonitor

            self.monitor = MemoryMonitor(self._device)
        try:
            yield
        finally:
            if self.monitor is not None:
                self.monitor.close()

    def end_step(self) -> None:
        """Note the end of a step."""
        if self.monitor is not None:
            self.monitor.step()

    def to_record(self) -> dict[str, Any]:
        """Return what a record of steps says of memory; empty where there is nothing to say."""
        told: dict[str, Any] = {}
        if self.monitor is not None and (memory := self.monitor.to_record()):
            told["memory"] = memory
        if counters := self.counters():
            told["out_of_memory"] = counters
        return told

    @property
    def last_account(self) -> MemoryAccount | None:
        """What was in memory when a step or a capture last ran out of it; None if none has."""
        return None if self._guard is None else self._guard.last_account

    def decisions(self) -> list[Decision]:
        """Return what became of the allocator's settings, and of memory over the run."""
        found = [*self._decisions, *self.attention.decisions()]
        if self._guard is not None:
            found += self._guard.decisions()
        if self.monitor is not None:
            found.append(self.monitor.decision())
        return found

    def counters(self) -> dict[str, int]:
        """Return how often memory ran out; empty if it never has."""
        return {} if self._guard is None else self._guard.counters()

    def close(self) -> None:
        """End the noting of lines. The allocator's settings stay: they are the process's."""
        if self._guard is not None:
            self._guard.close()


def _check_alone(held: Iterable[object]) -> None:
    """Raise if the backward of a model meets other ranks: a second one of this rank would not."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    models = [each for each in held if isinstance(each, nn.Module)]
    # By name: FullyShardedDataParallel takes long to import, and is not there on every platform.
    names = [base.__name__ for model in models for m in model.modules() for base in type(m).__mro__]
    wrapper = next((name for name in names if name in _WRAPPERS), None)
    if wrapper is not None or any(local(p) is not p for m in models for p in m.parameters()):
        what = "sharded" if wrapper is None else f"a {wrapper}"
        raise PlanError(
            f"out_of_memory='split' is for one rank alone, but the model is {what} on "
            f"{dist.get_world_size()} ranks: a backward that is done again would meet what the "
            "other ranks began in the first one; give the plain model and Plan(shard=...), or take "
            "smaller batches and accumulate"
        )
