"""OffloadedOptimizer: the state of an optimizer on the host, and its update there.

AdamW keeps two numbers for each parameter, in a bf16 model with float32 state the larger part of
all memory. Here an optimizer of torch's works on copies of the parameters in pinned memory, so its
state lies there too (`HostUpdate`).

The device computes nothing meanwhile, and the bus carries two copies of the model in each update.
So it pays where the state does not fit otherwise, with few and large steps: many micro-batches in
each.

Take a fused form of the optimizer (``fused=True``), which torch has for the CPU too; the others
take several times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from torchfast._core.arguments import check_callable, check_flag, check_int, explain_keywords
from torchfast._core.decisions import Decision
from torchfast._core.errors import UnsupportedOptimizerError
from torchfast.memory.copy_streams import copy_streams_for
from torchfast.memory.host_update import HostUpdate
from torchfast.memory.mirrored_optimizer import Mirrored
from torchfast.memory.undo import UNDO_BYTES

_BUCKET_BYTES: Final = 1 << 26

MakeOptimizer = Callable[[Iterable[Any]], Optimizer]


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
        overlap: Copy gradients in the backward, and begin the update there, by an optimizer of
            torch's. It uses hooks, which a graph does not replay, so there it does nothing.
        max_undo_bytes: The most memory of the host, not pinned, for taking back what began in the
            backward; with 0 nothing begins there.

    Raises:
        TypeError: An argument of the wrong kind.
        UnsupportedOptimizerError: The optimizer holds other parameters than it was given, needs a
            closure or has a scheduler already; or a parameter is no ordinary dense tensor
            (``DTensor``), or on another device than the others.

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
        overlap: bool = False,
        max_undo_bytes: int = UNDO_BYTES,
    ) -> None:
        check_callable("make", make, "make(parameters)")
        if isinstance(parameters, nn.Module):
            raise TypeError(
                "parameters must be parameters or groups of them, got the module "
                f"{type(parameters).__name__}; write model.parameters()"
            )
        self._hosts: dict[Tensor, nn.Parameter] = {}
        self._inner: Optimizer | None = None
        self._update: HostUpdate | None = None  # None as long as no parameter is on a device
        self._overlaps = self._has_overlap = check_flag("overlap", overlap)
        self._make_update = partial(
            HostUpdate,
            hosts=self._hosts,
            bucket_bytes=check_int("bucket_bytes", bucket_bytes, minimum=1),
            overlaps=overlap,
            max_undo_bytes=check_int("max_undo_bytes", max_undo_bytes, minimum=0),
        )
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
        if self._update is None:
            detail = f"the state of {inner} is on the host anyway, where its parameters are"
            return Decision(lever="offload", outcome="stepped aside", detail=detail)
        detail = (
            f"{inner} updates copies of the parameters on the host, where its state is; no graph "
            f"can hold that ({self._update})"
        )
        return Decision(lever="offload", outcome="applied", detail=detail)

    @property
    def overlap(self) -> bool:
        """Whether the next backward copies gradients, and has updates begin.

        To be set at any time where the optimizer was made with ``overlap=True``; updates are the
        same either way. Off is for a time in which gradients are changed in every step.

        Raises:
            RuntimeError: It is set to True, and the optimizer was made without.
        """
        return self._overlaps

    @overlap.setter
    def overlap(self, overlap: bool) -> None:
        if check_flag("overlap", overlap) and not self._has_overlap:
            raise RuntimeError(
                "overlap cannot be True: this OffloadedOptimizer was made without; make it with "
                "overlap=True"
            )
        self._overlaps = overlap
        self._switch()

    def counters(self) -> dict[str, int]:
        """Return how many updates began in the backward, and how many of them were taken back."""
        return {} if self._update is None else self._update.counters()

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
        if self._update is None:
            inner.step()
        else:
            self._update(inner)
        self._mirrored.take_over()
        self._mirrored.show_state()
        return result

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as for other optimizers."""
        if self._update is not None:
            self._update.skip()
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the parameters as they are on the device for those to be updated.

        Synchronizes: At the next ``step()``.
        """
        if self._update is not None:
            self._update.refresh()

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
        if self._update is not None:
            self._update.close()

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
        if self._update is None:
            self._update, self._device = self._make_update(side), parameter.device
            self._switch()
        if parameter.device != self._device:
            raise UnsupportedOptimizerError(
                f"an OffloadedOptimizer has the parameters of one device, got some on "
                f"{parameter.device} beside {self._device}; make one for each device"
            )
        self._hosts[parameter] = self._update.copy(parameter)

    def _switch(self) -> None:
        if self._update is not None and self._update.early is not None:
            self._update.early.is_on = self._overlaps

    def _forget(self, parameters: Iterable[Tensor]) -> None:
        """Let go of all that there is for parameters that are not updated here."""
        for parameter in parameters:
            self._hosts.pop(parameter, None)
            if self._update is not None:
                self._update.forget(parameter)

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


def _listed(group: dict[str, Any]) -> list[Any]:
    """Return the parameters of a group as they are given without one: with names, if they have."""
    names = group.get("param_names")
    return group["params"] if names is None else list(zip(names, group["params"], strict=True))


def offloaded(make: MakeOptimizer, **options: Any) -> MakeOptimizer:
    """Return a callable that makes an offloaded optimizer where ``make`` makes an ordinary one."""
    return partial(OffloadedOptimizer, make=make, **options)
