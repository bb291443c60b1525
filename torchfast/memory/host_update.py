"""An update on the host of parameters that are on a device: copies out, the update, copies back.

It goes through the parameters in buckets:

- gradients to the host, by a stream of their own, all buckets one after another;
- the update of a bucket as soon as its gradients are there, by the optimizer as it is: it skips
  parameters without a gradient, so it is given those of one bucket at a time;
- its parameters back to the device, by another stream, while the next bucket is updated.

An optimizer that is not torch's own may count its steps, or look at all gradients at once, and so
may hooks of ``step()`` or another in its place, so its update is one bucket.

With ``overlaps`` gradients go in the backward already, and the update of those that have come
begins while the device still computes the others. That is a guess: they may be changed behind the
backward, as by clipping. The state that such a bucket had is kept until the backward is over and
all gradients are found to be what was copied (`EarlyGradients`). If they are not, it is put back,
and the bucket updated anew. The device has nothing of an update before that. The method is
speculation-then-validation of SuperOffload (Lian et al., 2025), with the state kept in place of
computed back, so that it is the same bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchfast.memory.copy_streams import CopyStreams
from torchfast.memory.early_gradients import EarlyGradients
from torchfast.memory.host_pool import HostPool
from torchfast.memory.undo import Undo


@final
class HostUpdate:
    """Updates copies of parameters on the host.

    Args:
        side: Streams of the device.
        hosts: The parameters to update by those that they stand for: `copy` of those on the device,
            and themselves where they are on the host anyway.
        bucket_bytes: How much is updated at a time, by an optimizer of torch's.
        overlaps: Whether gradients are copied, and the update begins, in the backward.
        max_undo_bytes: The most state to keep of what begins there.

    Attributes:
        streams: That of the copies to the host, and that of those back.
        gradients: Where gradients go, by parameter.
        early: What copies them in the backward, or None.
    """

    def __init__(
        self,
        side: CopyStreams,
        hosts: Mapping[Tensor, nn.Parameter],
        *,
        bucket_bytes: int,
        overlaps: bool,
        max_undo_bytes: int,
    ) -> None:
        self._side, self._hosts, self._bucket_bytes = side, hosts, bucket_bytes
        self._pool = HostPool(side.pinned, 1 << 62)
        self._undo = Undo(max_undo_bytes)
        self._seen: dict[Tensor, tuple[int, int]] = {}
        self._num_begun = self._num_undone = 0
        self.streams = side.new(), side.new()
        self.gradients: dict[Tensor, Tensor] = {}
        self.early = EarlyGradients(side, self.streams[0], self.gradients) if overlaps else None

    def __str__(self) -> str:
        """Say what it takes and does."""
        pinned = f"{self._pool.num_bytes:,} bytes pinned for parameters and gradients"
        if self.early is None:
            return pinned
        if not self._num_begun:
            return f"{pinned}; no update began in the backward so far"
        return (
            f"{pinned}; {self._num_begun} updates began in the backward, {self._num_undone} of "
            "them were taken back, as gradients changed behind it"
        )

    def counters(self) -> dict[str, int]:
        """Return how many updates began in the backward, and how many of them were taken back."""
        if self.early is None:
            return {}
        return {
            "offload_updates_begun_early": self._num_begun,
            "offload_updates_taken_back": self._num_undone,
        }

    def copy(self, parameter: Tensor) -> nn.Parameter:
        """Return a parameter on the host, and memory for its gradient, to be updated here."""
        host, self.gradients[parameter] = self._like(parameter), self._like(parameter)
        if self.early is not None:
            self.early.watch([parameter])
        return nn.Parameter(host, requires_grad=parameter.requires_grad)

    def forget(self, parameter: Tensor) -> None:
        """Let go of a parameter."""
        self.gradients.pop(parameter, None)
        self._seen.pop(parameter, None)
        if self.early is not None:
            self.early.forget(parameter)

    def skip(self) -> None:
        """Take the gradients as thrown away."""
        if self.early is not None:
            self.early.drop_all()

    def refresh(self) -> None:
        """Take all parameters from the device in the next update."""
        self._seen.clear()

    def close(self) -> None:
        """Remove the hooks."""
        if self.early is not None:
            self.early.close()

    def __call__(self, inner: Optimizer) -> None:
        """Update, and enqueue the copies back.

        Args:
            inner: The optimizer of the copies.

        Raises:
            RuntimeError: A sparse gradient.
        """
        home, (out, back), early = self._side.current(), self.streams, self.early
        over = home.record_event()  # the backward, and what was done to the gradients
        out.wait_event(over)
        # A module of torch's that is private has the class in the package.
        is_torchs = f"{type(inner).__module__}.".startswith("torch.optim.") and not (
            inner._optimizer_step_pre_hooks
            or inner._optimizer_step_post_hooks
            or "step" in vars(inner)
        )
        found = self._with_gradients()
        own = {p: p.grad for p, host in self._hosts.items() if host is p}
        begun: list[Tensor] = []
        try:
            if early is not None:
                early.watch(found)  # what is no longer frozen
                if is_torchs:
                    begun = self._begin(inner, early, over)
                early.drop_changed()
                begun = self._judge(inner, early, begun)
            # All that goes to the host is enqueued first, so that the bus is never left waiting.
            done = set(begun)
            rest = [parameter for parameter in found if parameter not in done]
            buckets = _buckets(rest, self._bucket_bytes if is_torchs else None)
            behind = [self._copy_out(bucket) for bucket in buckets]
            back.wait_event(home.record_event())
            self._copy_back(begun)
            self._undo.forget()
            if any(g is not None for g in own.values()) and (is_torchs or not buckets):
                inner.step()  # what is on the host anyway, while the copies are made
                for there in own:
                    there.grad = None
            for bucket, copied in zip(buckets, behind, strict=True):
                copied.synchronize()
                self._update_bucket(inner, bucket)
                self._copy_back(bucket)
        except BaseException:
            # What an update that failed has made of the copies is on no device.
            self._undo.take_back(inner)
            self._seen.clear()
            raise
        finally:
            for parameter in self._hosts.values():
                parameter.grad = None
            for there, gradient in own.items():
                there.grad = gradient
            if early is not None:
                early.end_update()
            # Behind all copies: parameters are read by the next forward, gradients freed here.
            home.wait_event(out.record_event())
            home.wait_event(back.record_event())

    def _begin(self, inner: Optimizer, early: EarlyGradients, over: Any) -> list[Tensor]:
        """Update parameters whose gradients have come, until ``over``; return which."""
        if not self._undo.max_bytes:
            return []
        # What others have written is not on the host yet.
        come = [p for p in early.arrived() if self._seen.get(p) == _fingerprint(p)]
        begun: list[Tensor] = []
        own = [p for p, host in self._hosts.items() if host is p]
        gradients = [p.grad for p in own]
        for there in own:  # not in a bucket of others
            there.grad = None
        try:
            for bucket in _buckets(come, self._bucket_bytes):
                if over.query():
                    break
                early.wait_for(bucket[-1])
                hosts = [self._hosts[parameter] for parameter in bucket]
                if over.query() or not self._undo.keep(inner, hosts):
                    break
                begun += bucket
                self._update_bucket(inner, bucket)
        finally:
            for there, gradient in zip(own, gradients, strict=True):
                there.grad = gradient
        return begun

    def _judge(self, inner: Optimizer, early: EarlyGradients, begun: list[Tensor]) -> list[Tensor]:
        """Take back updates by gradients that were changed; return what is left."""
        wrong = [parameter for parameter in begun if parameter not in early]
        self._undo.take_back(inner, [self._hosts[parameter] for parameter in wrong])
        for parameter in wrong:
            del self._seen[parameter]  # the device still has what it was
        self._num_begun += bool(begun)
        self._num_undone += bool(wrong)
        return [parameter for parameter in begun if parameter in early]

    def _update_bucket(self, inner: Optimizer, bucket: list[Tensor]) -> None:
        for parameter in bucket:
            self._hosts[parameter].grad = self.gradients[parameter]
        inner.step()
        for parameter in bucket:
            self._hosts[parameter].grad = None

    def _copy_back(self, parameters: list[Tensor]) -> None:
        with self._side.on(self.streams[1]):
            for parameter in parameters:
                parameter.copy_(self._hosts[parameter], non_blocking=True)
                self._seen[parameter] = _fingerprint(parameter)

    def _with_gradients(self) -> list[Tensor]:
        """Return the parameters on the device that have gradients."""
        found = []
        for parameter, host in self._hosts.items():
            if parameter.grad is None or host is parameter:
                continue
            if parameter.grad.layout is not torch.strided:
                raise RuntimeError(
                    "a sparse gradient cannot be offloaded; leave this parameter to an optimizer "
                    "of its own"
                )
            found.append(parameter)
        return found

    def _copy_out(self, bucket: list[Tensor]) -> Any:
        """Begin to copy what the update needs; return the event behind it."""
        out, _ = self.streams
        with self._side.on(out):
            for parameter in bucket:
                if self._seen.get(parameter) != _fingerprint(parameter):
                    # The last update's copy to the device is done: the caller's stream waited.
                    self._hosts[parameter].detach().copy_(parameter, non_blocking=True)
                gradient = parameter.grad
                assert gradient is not None
                if self.early is None or parameter not in self.early:
                    self.gradients[parameter].copy_(gradient, non_blocking=True)
            return out.record_event()

    def _like(self, parameter: Tensor) -> Tensor:
        size = parameter.numel()
        taken = self._pool.take(max(1, size * parameter.element_size()))
        assert taken is not None
        flat = taken.memory[: size * parameter.element_size()].view(parameter.dtype)
        if parameter.is_contiguous():
            return flat.view(parameter.shape)
        dense = torch.empty_like(parameter, device="meta").stride()
        return flat.as_strided(parameter.shape, dense)


def _buckets(parameters: Iterable[Tensor], bucket_bytes: int | None) -> list[list[Tensor]]:
    """Return parameters in lists of about so many bytes; without a size in one."""
    buckets: list[list[Tensor]] = []
    room = 0
    for parameter in parameters:
        if not buckets or (bucket_bytes is not None and parameter.nbytes > room):
            buckets.append([])
            room = bucket_bytes or 0
        buckets[-1].append(parameter)
        room -= parameter.nbytes
    return buckets


def _fingerprint(parameter: Tensor) -> tuple[int, int]:
    """Return what changes when a parameter is written or replaced."""
    return parameter._version, parameter.data_ptr()
