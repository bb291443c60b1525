"""ParameterOffload: parameters of blocks wait on the host, and are on the device for their block.

A parameter is needed in the forward of its block and in its backward, and in a deep model, or one
with many experts, that is a small part of a step. Here the parameters of the blocks that the user
names are ordinary parameters of the host, in pinned memory:

- **In a call** of the block its parameters are copied to the device by a stream of its own, and
  tensors of the device stand in their places. Meanwhile the block that followed last time is
  brought. For the backward they are brought again. At most ``max_resident_blocks`` are there at a
  time. A block that is not called costs nothing.
- **Gradients** go to the host as they are made, and autograd adds them to ``.grad`` there: several
  micro-batches, hooks on parameters and ``torch.autograd.grad`` are as ever.
- **The optimizer** finds parameters of the host, so its state and its update are there, without
  another word. ``state_dict`` and files are as ever, too.

The same model trains, objects, keys and all; only the device of these parameters differs.

It is for models that do not fit: each step carries the parameters over the bus twice and their
gradients once, and what the host updates it updates slowly. It helps with many micro-batches an
update or large batches, whose computation the copies hide behind; with experts and adapters that
most steps do not use; and with towers that are frozen, which have no update.

Forbidden: parameters of a block that are used outside of it (tied weights: name both), a forward
that writes to its parameters, ``torch.compile`` and CUDA graphs around such a block, shards.
Buffers are on the device always.

Why not torch's own: ``fully_shard`` with ``CPUOffloadPolicy`` needs a process group and DTensors
for one rank too (for several it is ``ShardOptions(offload=True)``); ``save_on_cpu`` copies what a
forward saves, parameters included, both ways and without a stream of its own; a parametrization
changes keys and classes, and its results stay on the device until the backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from torchfast._core.arguments import check_int, explain_keywords
from torchfast._core.blocks import abbreviated
from torchfast._core.closing import Closing
from torchfast._core.decisions import Decision
from torchfast._core.device import resolve_device
from torchfast._core.errors import PlanError
from torchfast._core.selection import checked_regions, named_blocks
from torchfast._core.stand_in import ForwardStandIn
from torchfast.memory.copy_streams import copy_streams_for
from torchfast.memory.host_block import HostBlock, HostForward, ModelForward, host_forward_of
from torchfast.memory.recompute_options import Regions
from torchfast.memory.resident_blocks import ResidentBlocks

_NOT_CALLED: Final = (nn.ParameterList, nn.ParameterDict, nn.ModuleList, nn.ModuleDict)


@final
class ParameterOffload(Closing):
    """Keep parameters of blocks on the host, in place, and bring them for each call.

    Build it before or behind the optimizer: parameters stay the objects that they are. An optimizer
    that has state already must load its own ``state_dict()`` once, which moves that to the host.

    Args:
        model: The model; it stays the same object.
        parameters: ``"blocks"``, the blocks that the model repeats, or modules by name: paths, in
            which ``*`` stands for one name (``("layers.*.experts.*",)``), and classes.
        device: Where to compute, to which all else is moved; None means where the first parameter
            is, and moves nothing.
        max_resident_blocks: The most blocks on the device at a time. With 1 nothing is brought
            ahead.

    Raises:
        TypeError: An argument of the wrong kind.
        ValueError: A path or class that the model does not have, or no block that repeats; a
            parameter that is used outside of the blocks as well, or is no ordinary dense one.

    Numerics: Gradients are bitwise those of the model on the device. Norms of them and updates are
        those of the host.
    Synchronizes: With its copies, in each call of a block, behind its computation; and in the
        backward with those of gradients.

    Example:
        >>> block = lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> model = nn.Sequential(block(), block(), nn.Linear(8, 1))
        >>> with ParameterOffload(model) as offload:
        ...     model(torch.ones(2, 4, 8)).sum().backward()
        ...     print(offload.paths)
        ...     print(offload.decision.outcome)  # on the CPU there is nowhere to go
        ('0', '1')
        stepped aside
    """

    @explain_keywords
    def __init__(
        self,
        model: nn.Module,
        parameters: Regions = "blocks",
        *,
        device: torch.device | str | int | None = None,
        max_resident_blocks: int = 2,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        check_int("max_resident_blocks", max_resident_blocks, minimum=1)
        self._max_blocks = max_resident_blocks
        self._name = type(model).__name__
        self._device = resolve_device(device, model)
        chosen = offloaded_blocks(model, parameters)
        self._paths = tuple(path for path, _ in chosen)
        self._side = copy_streams_for(self._device)
        self._engine: ResidentBlocks | None = None
        self._forwards: list[ForwardStandIn] = []
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        # What was moved, with where it was: closing puts it back.
        self._moved: list[tuple[weakref.ref[Tensor], torch.device]] = []
        self._pinned: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._is_closed = False
        if self._side is None:
            return
        self._engine = ResidentBlocks(self._side, self._device, max_resident_blocks)
        while isinstance(there := vars(model).get("forward"), ModelForward) and there.is_abandoned:
            there.undo()
        _check(model, chosen, None if device is not None else self._device)
        self._move([module for _, module in chosen])
        if device is not None:
            self._move_rest(model, [module for _, module in chosen])
        # A loop may call parts of the model alone; and of a fused update torch keeps no count.
        handle = register_optimizer_step_post_hook(_behind_update(weakref.ref(self._engine)))
        self._unhook = weakref.finalize(self._engine, handle.remove)
        self._install(model)

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the blocks, ``""`` for the whole model."""
        return self._paths

    @property
    def is_closed(self) -> bool:
        """Whether the model is without it again."""
        return self._is_closed

    @property
    def decision(self) -> Decision:
        """What is on the host."""
        names = abbreviated(path or self._name for path in self._paths)
        if self._side is None:
            detail = f"parameters of {names} are on {self._device} anyway, where they are used"
            return Decision(lever="offload", outcome="stepped aside", detail=detail)
        parameters = [found for ref, _ in self._pinned.values() if (found := ref()) is not None]
        num_bytes = sum(p.numel() * p.element_size() for p in parameters)
        ahead = "" if self._max_blocks == 1 else ", the next one ahead of its call"
        detail = (
            f"{len(parameters)} parameters of {names} ({num_bytes:,} bytes) are in pinned memory "
            f"of the host, and on the device for calls of their block, at most {self._max_blocks} "
            f"of {len(self._paths)} blocks at a time{ahead}; gradients, optimizer state and update "
            "of these are on the host"
        )
        return Decision(lever="offload", outcome="applied", detail=detail)

    def counters(self) -> dict[str, int]:
        """Return what was copied so far.

        ``offload_fetched_blocks``, and ``offload_unused_blocks`` of them, brought ahead in vain;
        ``offload_fetched_bytes``; ``offload_gradient_bytes``; ``offload_most_resident_blocks``.
        """
        engine = self._engine
        if engine is None:
            return {}
        counts = {f"offload_{name}": count for name, count in engine.counts.items()}
        return {**counts, "offload_most_resident_blocks": engine.most_at_once}

    def on_device(self) -> dict[str, list[Tensor]]:
        """Return the tensors that are on the device for now, by what they are."""
        return {} if self._engine is None else self._engine.on_device()

    @torch.no_grad()
    def settle(self) -> None:
        """Pin parameters that were given other memory since, such as another layout."""
        for key, (reference, address) in list(self._pinned.items()):
            parameter = reference()
            if parameter is not None and parameter.data_ptr() != address:
                self._pin(key, parameter)

    def begin_forward(self) -> None:
        """Let no forward from here on find what an earlier one has left on the device.

        A call of the model does so by itself. Call it before parts of the model are called alone,
        where parameters were written in ways that leave no trace.
        """
        if self._engine is not None:
            self._engine.begin_forward()

    def also(self, model: nn.Module) -> None:
        """Bring parameters for calls of a copy of the model, too; those that are on the host."""
        if self._engine is not None and not self._is_closed and model not in self._models:
            self._install(model)

    def close(self) -> None:
        """Give the model its own forwards back, and parameters to the device where they were.

        Parameters that were on the host stay there: ``model.to(device)`` moves them. A second call
        does nothing.
        """
        if self._is_closed:
            return
        self._is_closed = True
        for forward in reversed(self._forwards):
            forward.undo()
        self._forwards.clear()
        if self._engine is not None:
            self._unhook()
            self._engine.drop_all()
        for reference, device in self._moved:
            parameter = reference()
            if parameter is not None and parameter.device != device:
                _put(parameter, parameter.detach().to(device))
        self._moved.clear()
        self._pinned.clear()

    def __repr__(self) -> str:
        """Return the model's class and what is offloaded of it."""
        names = "closed" if self._is_closed else abbreviated(self._paths)
        return f"ParameterOffload({self._name}: {names}, max_resident_blocks={self._max_blocks})"

    # ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _move(self, blocks: list[nn.Module]) -> None:
        """Bring the blocks' parameters to the host."""
        for block in blocks:
            for parameter in block.parameters():
                if id(parameter) not in self._pinned:
                    self._moved.append((weakref.ref(parameter), parameter.device))
                    self._pin(id(parameter), parameter)

    @torch.no_grad()
    def _move_rest(self, model: nn.Module, blocks: list[nn.Module]) -> None:
        """Bring all else to the device."""
        inside = {id(module) for block in blocks for module in block.modules()}
        for module in model.modules():
            if id(module) not in inside:
                module._apply(lambda tensor: tensor.to(self._device), recurse=False)
                continue
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(self._device)

    def _pin(self, key: int, parameter: Tensor) -> None:
        assert self._engine is not None
        pinned = self._engine.host_memory(parameter)
        pinned.copy_(parameter)
        _put(parameter, pinned)
        self._pinned[key] = (weakref.ref(parameter), parameter.data_ptr())

    def _install(self, model: nn.Module) -> None:
        assert self._engine is not None
        self._models.add(model)
        forwards: dict[int, HostForward] = {}
        modules = dict(model.named_modules())
        for path in self._paths:
            block = HostBlock(path, modules[path], self._engine)
            for module in modules[path].modules():
                has_own = any(p is not None for p in module._parameters.values())
                is_called = not isinstance(module, _NOT_CALLED)
                if module is not modules[path] and not (has_own and is_called):
                    continue
                forward = forwards.get(id(module))
                if forward is None:
                    forward = forwards[id(module)] = HostForward(module)
                    forward.install(self)
                    self._forwards.append(forward)
                forward.blocks.append(block)
        whole = ModelForward(model, self._engine)
        whole.install(self)
        self._forwards.append(whole)


def _behind_update(engine: weakref.ref[ResidentBlocks]) -> Callable[..., None]:
    def hook(*_: object) -> None:
        found = engine()
        if found is not None:
            found.begin_forward()

    return hook


def offloaded_blocks(model: nn.Module, parameters: Any) -> list[tuple[str, nn.Module]]:
    """Return the modules that are named, with their paths.

    Raises:
        TypeError: Something that names no modules.
        ValueError: A path or class that is not in the model, or no blocks that repeat.
    """
    regions = checked_regions(parameters, ("blocks",), "None", "parameters")
    chosen = named_blocks(model, regions, "parameters")
    if not chosen:
        raise PlanError(
            f"parameters='blocks' names the blocks that a model repeats, and "
            f"{type(model).__name__} has none; name modules: parameters=('encoder', 'decoder')"
        )
    return chosen


def _check(
    model: nn.Module, chosen: list[tuple[str, nn.Module]], device: torch.device | None
) -> None:
    """Raise where parameters cannot be on the host.

    Args:
        model: Where the blocks stand.
        chosen: The blocks, with their paths.
        device: Where parameters must be, if not on the host; None where they are moved.

    Raises:
        ValueError: Why, and what to do.
    """
    owners: dict[int, str] = {}
    inside: set[int] = set()
    for path, block in chosen:
        for name, module in block.named_modules(prefix=path):
            inside.add(id(module))
            if isinstance(module, torch.jit.ScriptModule):
                raise ValueError(
                    f"parameters of module {name!r} cannot be on the host: it is TorchScript, "
                    "whose forward is compiled; name others"
                )
            there = host_forward_of(module)
            if there is not None and not there.is_abandoned:
                raise ValueError(
                    f"another ParameterOffload has the parameters of module {name!r} on the host "
                    "already; close that, or the Trainer that made it, first"
                )
            if there is not None:
                there.undo()
            for key, parameter in module._parameters.items():
                if parameter is None:
                    continue
                full = f"{name}.{key}" if name else key
                owners.setdefault(id(parameter), full)
                is_plain = type(parameter) is nn.Parameter and parameter.layout is torch.strided
                if not is_plain or parameter.is_meta:
                    kind = "on the meta device" if parameter.is_meta else "not an ordinary dense"
                    raise ValueError(
                        f"parameter {full!r} cannot be on the host: it is {kind} one "
                        f"({type(parameter).__name__}); materialize it first, or name other modules"
                    )
                if device is not None and parameter.device not in (device, torch.device("cpu")):
                    raise ValueError(
                        f"parameter {full!r} is on {parameter.device}, but blocks are brought to "
                        f"{device}; name blocks of one device only, or pass device="
                    )
    for name, module in model.named_modules():
        if id(module) in inside:
            continue
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in owners:
                other = f"{name}.{key}" if name else key
                raise ValueError(
                    f"parameter {owners[id(parameter)]!r} is tied to {other!r}, which stays on "
                    "the device, so it cannot be on the host; name both modules, or neither"
                )


def _put(parameter: Tensor, values: Tensor) -> None:
    """Give a parameter other memory, and its gradient the same device."""
    gradient, parameter.grad = parameter.grad, None
    parameter.data = values
    if gradient is not None:
        parameter.grad = gradient.to(values.device)
