"""Data parallel: each rank has the whole model, and gradients are averaged as they come.

torch's `DistributedDataParallel` does the work: it reduces gradients in buckets while the backward
still runs. It is usually wrapped around the model, which then is another object with other keys,
and only calls of that object are in sync: ``model.module.loss(x)`` trains each rank by itself, and
nothing says so. Here it is wrapped around the **loss function**: whatever that does with the model,
calls it twice, calls a method of it or uses a weight by itself, lies within, and the model stays
the user's object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final, final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchfast._core.collectives import Observation
from torchfast._core.errors import PlanError
from torchfast._core.phases import COMMUNICATION, phase
from torchfast._core.rank_group import RankGroup
from torchfast.parallel.options import ShardOptions
from torchfast.parallel.ranks import send_from_first
from torchfast.parallel.shared_try import SharedTry

if TYPE_CHECKING:
    from torchfast.parallel.observed_replicas import ObservedReplicas

# What is tried where the size is to be measured; the usual one first.
BUCKETS_MB: Final = (25.0, 5.0, 100.0)
_NEVER: Final = 2**31 - 1


class _Call(nn.Module):
    """The model as the part of a module whose forward is any call that uses it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, call: Callable[[], Any]) -> Any:
        return call()


@final
class ReplicatedModel:
    """Runs calls that use a model so that its gradients are averaged over the ranks.

    Args:
        model: The same on all ranks; its parameters and buffers become those of the first one.
        options: How.
        ranks: Who agree.
        shared: Whether a step is a shared try. Its gradients are averaged behind the backward.

    Attributes:
        stream: The context in which torch's wrapper is built. It keeps the nodes that accumulate
            gradients, which stay on the stream that they were made on; no capture may wait for the
            default one.

    Numerics: The mean of the ranks' gradients; sums in the order of the collective.
    Synchronizes: In `apply`, at the first step, and when parameters were replaced or others are
        trained.
    """

    def __init__(
        self, model: nn.Module, options: ShardOptions, ranks: RankGroup, shared: SharedTry
    ) -> None:
        self._shared = shared
        self._model, self._options, self._ranks = model, options, ranks
        self.stream: Callable[[], AbstractContextManager[None]] = nullcontext
        self._has_failed = False
        size = options.bucket_mb
        self.bucket_mb = BUCKETS_MB[0] if size == "auto" else size
        self._wrapped: DistributedDataParallel | None = None
        self._known: list[Any] = []
        self._observation: Observation | None = None
        self._observed: ObservedReplicas | None = None

    def apply(self) -> None:
        """Make the model on each rank what it is on the first."""
        send_from_first(self._ranks, [*self._model.parameters(), *self._model.buffers()])

    def run(self, call: Callable[[], Any], *, is_last: bool) -> Any:
        """Call, within a forward that is in sync; only the ``is_last`` one reduces gradients."""
        wrapped = self._settled()
        if wrapped is None:  # no parameter is trained
            return call()
        if wrapped.require_forward_param_sync:  # the first forward sends buffers, the others not
            self._shared.ask()
        with nullcontext() if is_last and not self._shared.is_on else wrapped.no_sync():
            return wrapped(call)

    @contextmanager
    def shared(self, ask: Callable[[], None]) -> Iterator[None]:  # noqa: ARG002
        """Return the context of a shared try; see `Shared`. Each forward asks by itself."""
        if (wrapped := self._settled()) is None:
            yield
            return
        # A forward that is not to be reduced tells the next one that buffers need not be sent.
        wrapped.require_forward_param_sync = True
        try:
            yield
        finally:
            wrapped.require_forward_param_sync = True

    def drop_try(self) -> None:
        """Do nothing: a shared try leaves what averages gradients alone."""

    def end_backward(self) -> None:
        """See to it that all gradients are averaged.

        Raises:
            PlanError: A trained parameter took no part in the loss.
        """
        if not self._shared.is_on:
            self.check_reduced()
        elif self._wrapped is not None:
            self._average()

    def _average(self) -> None:
        """Average gradients as they lie, a bucket at a time, so that little is copied at once."""
        assert self._wrapped is not None
        ask, group = self._shared.ask, self._wrapped.process_group
        ask()
        of_ranks = self._ranks.gather([p.grad is not None for p in self._known])
        if not self._options.unused_parameters and not all(map(all, of_ranks)):
            raise self._unused()
        is_used = [any(column) for column in zip(*of_ranks, strict=True)]
        used = [p for p, is_one in zip(self._known, is_used, strict=True) if is_one]
        for parameter in used:
            if parameter.grad is None:  # here
                parameter.grad = torch.zeros_like(parameter)
        for gradients in _buckets([p.grad for p in used], self.bucket_mb * 2**20):
            flat = gradients[0]
            if not flat.is_sparse:
                flat = torch.cat([gradient.flatten() for gradient in gradients])
            ask()
            with phase(COMMUNICATION):
                dist.all_reduce(flat, group=group)
            flat.div_(dist.get_world_size(group))
            if not flat.is_sparse:
                parts = flat.split([gradient.numel() for gradient in gradients])
                for gradient, part in zip(gradients, parts, strict=True):
                    gradient.copy_(part.view_as(gradient))

    def _settled(self) -> DistributedDataParallel | None:
        if self._has_failed:
            self._has_failed = False
            if not self._ranks.all_agree(self._is_through()):
                self.use_buckets(self.bucket_mb)
        return self._current()

    def after_failure(self) -> None:
        """Look at the next call whether a backward ended in the middle; all ranks are told.

        Its gradients would be missing in the next one: what averages them waits for all of a step.
        """
        self._has_failed = True

    def use_buckets(self, size_mb: float) -> None:
        """Reduce so much at a time from now on."""
        self.bucket_mb, self._wrapped, self._observed, self._known = size_mb, None, None, []

    def observe(self, observation: Observation | None) -> None:
        """Note there when collectives run; None ends it."""
        self._observation = observation
        if self._wrapped is None:
            return
        if self._observed is None:
            from torchfast.parallel.observed_replicas import ObservedReplicas  # few steps want it

            self._observed = ObservedReplicas(self._wrapped)
        self._observed.observe(observation)

    def check_reduced(self) -> None:
        """Raise if the backward has left gradients that are not averaged; torch says so late.

        Raises:
            PlanError: A trained parameter took no part in the loss.
        """
        try:
            self._check_through()
        except RuntimeError as error:
            raise self._unused() from error

    def _unused(self) -> PlanError:
        named = self._model.named_parameters()
        odd = [name for name, p in named if p.requires_grad and p.grad is None]
        return PlanError(
            f"the loss did not use all trained parameters ({', '.join(odd[:3]) or 'unknown'}), "
            "so gradients were not averaged over the ranks; give "
            "ShardOptions(unused_parameters=True), requires_grad_(False) what is never used, "
            "and detach what loss_fn returns besides the loss"
        )

    def _check_through(self) -> None:
        if self._wrapped is not None:
            self._wrapped._check_reducer_finalized()

    def _is_through(self) -> bool:
        try:
            self._check_through()
        except RuntimeError:
            return False
        return True

    def close(self) -> None:
        """Take the hooks off the parameters."""
        self._wrapped, self._observed, self._known = None, None, []
        for parameter in self._model.parameters():
            parameter.grad = None  # a view of a bucket

    def _current(self) -> DistributedDataParallel | None:
        """Return the wrapper, a new one if parameters are others or others are trained."""
        now = list(_trained(self._model))
        if len(now) == len(self._known) and all(
            a is b for a, b in zip(now, self._known, strict=True)
        ):
            return self._wrapped
        # Takes its hooks along, before others are put on.
        self._wrapped = self._observed = None
        if now:
            mesh = self._options.mesh
            for parameter in now:
                parameter.grad = None
            with self.stream():
                self._wrapped = DistributedDataParallel(
                    _Call(self._model),
                    process_group=None if mesh is None else mesh.get_group(),
                    bucket_cap_mb=self.bucket_mb,
                    gradient_as_bucket_view=True,
                    find_unused_parameters=self._options.unused_parameters,
                )
            # To keep statistics of its own it waits for the device, in one step of a hundred.
            self._wrapped._set_ddp_runtime_logging_sample_rate(_NEVER)
            if self._observation is not None:
                self.observe(self._observation)
        self._known = now
        return self._wrapped


def _buckets(gradients: list[Any], size: float) -> Iterator[list[torch.Tensor]]:
    """Yield what is reduced at once: of one dtype and device, sparse ones each by itself."""
    open_ones: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for gradient in gradients:
        if gradient.is_sparse:
            yield [gradient]
            continue
        bucket = open_ones.setdefault((gradient.dtype, gradient.device), [])
        bucket.append(gradient)
        if sum(each.nbytes for each in bucket) >= size:
            yield open_ones.pop((gradient.dtype, gradient.device))
    yield from open_ones.values()


def _trained(model: nn.Module) -> Iterator[torch.Tensor]:
    return (p for p in model.parameters() if p.requires_grad)
