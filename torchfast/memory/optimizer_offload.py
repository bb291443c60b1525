"""OffloadedOptimizer: the state of an optimizer on the host, and its update there.

AdamW keeps two numbers for each parameter, in a bf16 model with float32 state the larger part of
all memory. Here an optimizer of torch's works on copies of the parameters in pinned memory, so its
state lies there too. An update goes through the parameters in buckets:

- gradients to the host, by a stream of their own, all buckets one after another;
- the update of a bucket as soon as its gradients are there, by the optimizer as it is: it skips
  parameters without a gradient, so it is given those of one bucket at a time;
- its parameters back to the device, by another stream, while the next bucket is updated.

An optimizer that is not torch's own may count its steps, or look at all gradients at once, and so
may hooks of ``step()`` or another in its place, so its update is one bucket.

The device computes nothing meanwhile, and the bus carries two copies of the model in each update.
So it pays where the state does not fit otherwise, with few and large steps: many micro-batches in
each. Under ``copy_early`` gradients go in the backward already, which is right only where nobody
changes them behind it: clipping, a loss scale, other ranks and further micro-batches do, so what is
no longer what was copied is copied again. The count of writes does not tell: collectives and the
kernel of a loss scale leave it as it is. So the bits are added up on the device, when a gradient is
copied and once more before the update.

Take a fused form of the optimizer (``fused=True``), which torch has for the CPU too; the others
take several times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from torchfast._core.arguments import check_callable, check_flag, check_int, explain_keywords
from torchfast._core.decisions import Decision
from torchfast._core.errors import UnsupportedOptimizerError
from torchfast.memory.copy_streams import CopyStreams, copy_streams_for
from torchfast.memory.host_pool import HostPool
from torchfast.memory.mirrored_optimizer import Mirrored

_BUCKET_BYTES: Final = 1 << 26
_INTEGERS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

MakeOptimizer = Callable[[Iterable[Any]], Optimizer]


class _Early(NamedTuple):
    """A gradient that was copied in the backward."""

    gradient: Tensor
    checksum: Tensor
    copied: Any


@final
class OffloadedOptimizer(Optimizer):
    """An optimizer whose state and update are on the host.

    It is used as the optimizer that it is made of: ``param_groups`` hold the parameters on the
    device, schedulers change them, and ``state_dict()`` is that of the optimizer itself, so it
    loads into one without offloading and the other way round. On the CPU it is just that optimizer.

    Parameters that are changed in place by others (``load_state_dict`` of the model) are noticed.
    A change through ``.data`` is not: call `refresh` after it. Parameters that are on the host
    anyway, such as those of `ParameterOffload`, are updated where they are.

    Args:
        parameters: Parameters or groups of them, as for any optimizer.
        make: Makes the optimizer, such as ``functools.partial(AdamW, lr=1e-3, fused=True)``. It is
            given copies on the host of what is given here, and may leave some out or group them.
        bucket_bytes: How much is updated at a time, by an optimizer of torch's.
        copy_early: Copy gradients in the backward. It uses hooks, which a graph does not replay.

    Raises:
        TypeError: An argument of the wrong kind.
        UnsupportedOptimizerError: The optimizer holds other parameters than it was given, needs a
            closure or has a scheduler already; or a parameter is no ordinary dense tensor
            (``DTensor``).

    Numerics: Bitwise the optimizer on the CPU; close to it on the device.
    Synchronizes: In ``step()``, which waits for the gradients.

    Example:
        >>> from functools import partial
        >>> model = nn.Linear(4, 1)
        >>> make = partial(torch.optim.AdamW, lr=0.1, fused=True)
        >>> optimizer = OffloadedOptimizer(model.parameters(), make)
        >>> model(torch.ones(2, 4)).sum().backward()
        >>> optimizer.step()
        >>> sorted(optimizer.state_dict()["state"][0])
        ['exp_avg', 'exp_avg_sq', 'step']
    """

    @explain_keywords
    def __init__(
        self,
        parameters: Iterable[Any],
        make: MakeOptimizer,
        *,
        bucket_bytes: int = _BUCKET_BYTES,
        copy_early: bool = False,
    ) -> None:
        check_callable("make", make, "make(parameters)")
        self._bucket_bytes = check_int("bucket_bytes", bucket_bytes, minimum=1)
        self._copies_early = check_flag("copy_early", copy_early)
        self._hosts: dict[Tensor, nn.Parameter] = {}
        self._gradients: dict[Tensor, Tensor] = {}
        self._seen: dict[Tensor, tuple[int, int]] = {}
        self._early: dict[Tensor, _Early] = {}
        self._hooks: dict[Tensor, Any] = {}
        self._inner: Optimizer | None = None
        self._side: CopyStreams | None = None
        self._pool: HostPool | None = None
        self._streams: tuple[Any, Any] = (None, None)
        # torch refuses a tensor, which would be a list of its rows.
        given = parameters if isinstance(parameters, Tensor) else list(parameters)
        try:
            super().__init__(given, {})
            hosts = [self._on_host(group) for group in self.param_groups]
            # As it was given: a callable may look at parameters and group them.
            inner = make(hosts if any(isinstance(p, dict) for p in given) else _listed(hosts[0]))
            self._check(inner)
        except BaseException:
            self.close()  # or what nobody has would be told of each backward
            raise
        self._group_as(inner)
        self._inner = inner
        self._torchfast_inner = inner  # for `at_work`
        self.defaults = inner.defaults
        self._mirrored = Mirrored(self, inner, self._hosts)
        self._mirrored.take_over()

    @property
    def decision(self) -> Decision:
        """Where the state is."""
        inner = type(self._inner).__name__
        if self._side is None:
            detail = f"the state of {inner} is on the host anyway, where its parameters are"
            return Decision(lever="offload", outcome="stepped aside", detail=detail)
        num_bytes = 0 if self._pool is None else self._pool.num_bytes
        detail = (
            f"{inner} updates copies of the parameters on the host, where its state is "
            f"({num_bytes:,} bytes pinned for parameters and gradients); no graph can hold that"
        )
        return Decision(lever="offload", outcome="applied", detail=detail)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters.

        Args:
            closure: As for other optimizers: computes the loss anew, before the update.

        Returns:
            What the closure returned; None without one.

        Raises:
            RuntimeError: A sparse gradient, or parameters that were replaced in their groups.
        """
        inner, result = self._inner, None
        assert inner is not None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self._mirrored.hand_over()
        if self._side is None:
            inner.step()
        else:
            self._update(inner, self._side)
        self._mirrored.take_over()
        self._mirrored.show_state()
        return result

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the parameters as they are on the device for those to be updated.

        Synchronizes: At the next ``step()``.
        """
        self._seen.clear()

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return what the optimizer itself would; its tensors are on the host."""
        assert self._inner is not None
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        self._mirrored.hand_over()
        state = self._inner.state_dict()
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, state)
            state = state if changed is None else changed
        return state

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, here or of the optimizer itself."""
        assert self._inner is not None
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        self._inner.load_state_dict(state_dict)
        self._mirrored.take_over()
        self.state.clear()
        self._mirrored.show_state()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    @override
    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "an OffloadedOptimizer cannot be copied or pickled, as its parameters are on two "
            "sides; make one for the copy of the model, and load state_dict() into it"
        )

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as for other optimizers."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            for parameter in group["params"]:
                self._add(parameter)
            if self._inner is not None:
                self._inner.add_param_group(self._on_host(group))
                self._mirrored.take_over()
        except BaseException:
            self.param_groups.pop()  # or the two would not be of the same groups any more
            self._forget(group["params"])
            raise

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    # -- Parameters on both sides ------------------------------------------------------------------

    def _add(self, parameter: Tensor) -> None:
        side = copy_streams_for(parameter.device)
        if side is None:
            assert isinstance(parameter, nn.Parameter | Tensor)
            self._hosts[parameter] = parameter  # type: ignore[assignment]
            return
        if type(parameter) not in (Tensor, nn.Parameter) or parameter.layout is not torch.strided:
            raise UnsupportedOptimizerError(
                f"the update of a {type(parameter).__name__} cannot be offloaded, only that of "
                "ordinary dense parameters; for FSDP use "
                "fully_shard(offload_policy=CPUOffloadPolicy())"
            )
        if self._side is None:
            self._side = side
            self._pool = HostPool(side.pinned, 1 << 62)
            self._streams = side.new(), side.new()
        host, self._gradients[parameter] = self._like(parameter), self._like(parameter)
        self._hosts[parameter] = nn.Parameter(host, requires_grad=parameter.requires_grad)
        if self._copies_early:
            self._hooks[parameter] = parameter.register_post_accumulate_grad_hook(self._copy_now)

    def _forget(self, parameters: Iterable[Tensor]) -> None:
        """Let go of all that there is for parameters that are not updated here."""
        for parameter in parameters:
            for table in (self._hosts, self._gradients, self._seen, self._early):
                table.pop(parameter, None)
            if (hook := self._hooks.pop(parameter, None)) is not None:
                hook.remove()

    def _like(self, parameter: Tensor) -> Tensor:
        assert self._pool is not None
        size = parameter.numel()
        taken = self._pool.take(max(1, size * parameter.element_size()))
        assert taken is not None
        flat = taken.memory[: size * parameter.element_size()].view(parameter.dtype)
        if parameter.is_contiguous():
            return flat.view(parameter.shape)
        dense = torch.empty_like(parameter, device="meta").stride()
        return flat.as_strided(parameter.shape, dense)

    def _on_host(self, group: dict[str, Any]) -> dict[str, Any]:
        return {**group, "params": [self._hosts[p] for p in group["params"]]}

    def _check(self, inner: Optimizer) -> None:
        if not isinstance(inner, Optimizer):
            raise TypeError(
                "make must return a torch.optim.Optimizer for the parameters that it is given, "
                f"got {type(inner).__name__}"
            )
        name = type(inner).__name__
        if hasattr(inner.step, "_wrapped_by_lr_sched"):
            raise UnsupportedOptimizerError(
                f"the update of {name} cannot be offloaded with a scheduler that make() builds: "
                "learning rates are those of the OffloadedOptimizer, which it would not change; "
                "build the scheduler on that, in Trainer(lr_scheduler=...) by a callable"
            )
        given = {id(host) for host in self._hosts.values()}
        held = {id(p) for group in inner.param_groups for p in group["params"]}
        if not held <= given or isinstance(inner, torch.optim.LBFGS):
            raise UnsupportedOptimizerError(
                f"the update of {name} cannot be offloaded: it must hold the parameters that "
                "make() was given, all or some of them, and update each by its own gradient"
            )

    def _group_as(self, inner: Optimizer) -> None:
        """Have the parameters that an optimizer holds, in its groups."""
        of = {id(host): parameter for parameter, host in self._hosts.items()}
        self.param_groups = [
            {"params": [of[id(host)] for host in group["params"]]} for group in inner.param_groups
        ]
        held = {parameter for group in self.param_groups for parameter in group["params"]}
        self._forget([parameter for parameter in self._hosts if parameter not in held])

    # -- An update ---------------------------------------------------------------------------------

    def _update(self, inner: Optimizer, side: CopyStreams) -> None:
        home, (out, back) = side.current(), self._streams
        out.wait_event(home.record_event())
        # All that goes to the host is enqueued first, so that the bus is never left waiting.
        is_torchs = type(inner).__module__.startswith("torch.optim.") and not (
            inner._optimizer_step_pre_hooks
            or inner._optimizer_step_post_hooks
            or "step" in vars(inner)
        )
        found = self._buckets(self._bucket_bytes if is_torchs else None)
        self._forget_changed(out)
        buckets = [(bucket, self._copy_out(bucket, side)) for bucket in found]
        back.wait_event(home.record_event())
        own = {p: p.grad for p, host in self._hosts.items() if host is p}
        try:
            if any(g is not None for g in own.values()) and (is_torchs or not buckets):
                inner.step()  # what is on the host anyway, while the copies are made
                for there in own:
                    there.grad = None
            for bucket, copied in buckets:
                copied.synchronize()
                for parameter in bucket:
                    self._hosts[parameter].grad = self._gradients[parameter]
                inner.step()
                with side.on(back):
                    for parameter in bucket:
                        self._hosts[parameter].grad = None
                        parameter.copy_(self._hosts[parameter], non_blocking=True)
                        self._seen[parameter] = _fingerprint(parameter)
        except BaseException:
            # What an update that failed has made of the copies is on no device.
            self._seen.clear()
            raise
        finally:
            for parameter in self._hosts.values():
                parameter.grad = None
            for there, gradient in own.items():
                there.grad = gradient
            self._early.clear()
            # Behind all copies: parameters are read by the next forward, gradients freed here.
            home.wait_event(out.record_event())
            home.wait_event(back.record_event())

    def _buckets(self, bucket_bytes: int | None) -> list[list[Tensor]]:
        """Return the parameters that have gradients; without a size as one bucket."""
        buckets: list[list[Tensor]] = []
        room = 0
        for parameter in self._hosts:
            if parameter.grad is None or self._hosts[parameter] is parameter:
                continue
            if parameter.grad.layout is not torch.strided:
                raise RuntimeError(
                    "a sparse gradient cannot be offloaded; leave this parameter to an optimizer "
                    "of its own"
                )
            size = parameter.numel() * parameter.element_size()
            if not buckets or (bucket_bytes is not None and size > room):
                buckets.append([])
                room = bucket_bytes or 0
            buckets[-1].append(parameter)
            room -= size
        return buckets

    def _copy_out(self, bucket: list[Tensor], side: CopyStreams) -> Any:
        """Begin to copy what the update needs; return the event behind it."""
        out, _ = self._streams
        with side.on(out):
            for parameter in bucket:
                if self._seen.get(parameter) != _fingerprint(parameter):
                    # The last update's copy to the device is done: the caller's stream waited.
                    self._hosts[parameter].detach().copy_(parameter, non_blocking=True)
                gradient = parameter.grad
                assert gradient is not None
                if parameter not in self._early:
                    self._gradients[parameter].copy_(gradient, non_blocking=True)
            return out.record_event()

    def _copy_now(self, parameter: Tensor) -> None:
        """Copy a gradient that the backward has just made."""
        side, gradient = self._side, parameter.grad
        if side is None or gradient is None or gradient.layout is not torch.strided:
            return
        if side.is_capturing():
            return
        out, home = self._streams[0], side.current()
        before = self._early.pop(parameter, None)
        if before is not None:  # its memory may be given out again
            home.wait_event(before.copied)
        out.wait_event(home.record_event())
        with side.on(out), torch.no_grad():
            # Before the copy: the caller's stream goes on meanwhile, and a write that comes between
            # the two must not be in the sum alone.
            checksum = _checksum(gradient)
            self._gradients[parameter].copy_(gradient, non_blocking=True)
        self._early[parameter] = _Early(gradient, checksum, out.record_event())

    def _forget_changed(self, out: Any) -> None:
        """Keep of the gradients that were copied in the backward those that are what they were."""
        early = self._early
        kept = {p: copy for p, copy in early.items() if copy.gradient is p.grad}
        if kept:
            assert self._side is not None
            with self._side.on(out):
                now = torch.stack([_checksum(copy.gradient) for copy in kept.values()])
                then = torch.stack([copy.checksum for copy in kept.values()])
                is_same = now == then
                out.record_event().synchronize()  # as the host would for the first copies anyway
            pairs = zip(kept.items(), is_same.tolist(), strict=True)
            kept = {p: copy for (p, copy), same in pairs if same}
        self._early = kept


def _listed(group: dict[str, Any]) -> list[Any]:
    """Return the parameters of a group as they are given without one: with names, if they have."""
    names = group.get("param_names")
    return group["params"] if names is None else list(zip(names, group["params"], strict=True))


def _checksum(gradient: Tensor) -> Tensor:
    """Return the sum of a gradient's bits, as whole numbers of its width."""
    real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    return real.detach().view(_INTEGERS[real.element_size()]).sum(dtype=torch.int64)


def _fingerprint(parameter: Tensor) -> tuple[int, int]:
    """Return what changes when a parameter is written or replaced."""
    return parameter._version, parameter.data_ptr()


def offloaded(make: MakeOptimizer, **options: Any) -> MakeOptimizer:
    """Return a callable that makes an offloaded optimizer where ``make`` makes an ordinary one."""
    return partial(OffloadedOptimizer, make=make, **options)
