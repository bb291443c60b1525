"""Fully sharded: each rank holds a part of every parameter, its gradient and its optimizer state.

torch's `fully_shard` does the work: a block is gathered before it runs and taken apart behind it,
and its gradients are reduced to the parts as they come. What stays in memory is one rank's share,
and a block or two.

Two things that go wrong by hand cannot here. The optimizer is built behind it, for sharding
replaces the parameters. And the whole loss function runs as a forward of the model, so that a loss
which uses a weight of the model by itself, or calls a method of it, finds it whole.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final, cast, final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from torchfast._core.blocks import find_blocks
from torchfast._core.errors import PlanError
from torchfast._core.fsdp_pieces import own_pieces
from torchfast._core.local import local
from torchfast._core.selection import select_modules
from torchfast.parallel.meta_device import check_initialization, is_on_meta, materialize
from torchfast.parallel.observed_shards import ObservedShards
from torchfast.parallel.options import DTYPES, ShardOptions
from torchfast.parallel.ranks import Ranks, send_from_first

_METHOD = "_torchfast_call"
# What is tried where the depth is to be measured; the usual one first.
DEPTHS: Final = (1, 2, 3)


@final
class ShardedModel:
    """Shards a model over the ranks, and runs calls that use it.

    Args:
        model: Changed in place: its class becomes one that `fully_shard` derives from it, its
            parameters become `DTensor`. The keys of its state stay.
        options: How.
        ranks: Over which.
        device: Where it trains.
        gather_dtype: What ``"auto"`` means; None is the parameters' own.

    Raises:
        PlanError: It is sharded already, or cannot be.

    Numerics: Sums in the order of the collective; in ``gather_dtype`` where that is another.
    Synchronizes: When it is built.
    """

    def __init__(
        self,
        model: nn.Module,
        options: ShardOptions,
        ranks: Ranks,
        device: torch.device,
        gather_dtype: torch.dtype | None,
    ) -> None:
        if isinstance(model, FSDPModule):
            raise PlanError(
                f"{type(model).__name__} is sharded already, so shard={options.strategy!r} cannot "
                "shard it; leave it out of the plan, or build the model anew"
            )
        self._model, self._options, self._ranks, self._device = model, options, ranks, device
        self._paths = _paths_of_blocks(model, options)
        _check_pieces(model, self._paths)
        self._ignored = _ignored_names(model, options)
        self._is_on_meta = is_on_meta(model)
        if self._is_on_meta:
            check_initialization(model, options.initialize)
        if options.gather_dtype != "auto":
            gather_dtype = DTYPES[options.gather_dtype]
        self._gather_dtype = gather_dtype
        self._replicas = _num_replicas(options, ranks)
        # Given where to note when collectives run, and None when that is over.
        self.observe = ObservedShards(model, is_replicated=options.strategy == "hsdp").observe

    def apply(self) -> None:
        """Shard the model, from the inside out."""
        model = self._model
        if not self._is_on_meta:
            # What is sharded is each rank's part of its own copy: they must be copies of one.
            send_from_first([*model.parameters(), *model.buffers()])
        self._mesh = self._new_mesh()
        self._shard(model)
        if self._is_on_meta:
            self._materialize()

    def shard_twin(self, twin: nn.Module) -> None:
        """Shard a copy that was made of the model before `apply` in the same way."""
        self._shard(twin)
        if self._is_on_meta:
            twin.to_empty(device=self._where)

    def run(self, call: Callable[[], Any], *, is_last: bool) -> Any:
        """Call with the model whole; only the ``is_last`` one reduces gradients."""
        self.reduce_gradients(is_last)
        return self.whole(call, self._model)

    def reduce_gradients(self, yes: bool = True) -> None:
        """Say whether the backward that comes reduces gradients, as the last one of a step does."""
        model = cast("FSDPModule", self._model)
        model.set_requires_gradient_sync(yes)
        model.set_is_last_backward(yes)

    def whole(self, call: Callable[[], Any], model: nn.Module) -> Any:
        """Call with what belongs to no block gathered, as in a forward of the model or its twin."""
        try:
            return getattr(model, _METHOD, _call)(lambda: _kept_whole(call, model))
        finally:
            if not torch.is_grad_enabled():
                # No backward takes it apart again. What stays whole would be what a later forward
                # uses, though an average has moved on meanwhile.
                for module in model.modules():
                    if isinstance(module, FSDPModule):
                        module.reshard()

    def __str__(self) -> str:
        pieces = f"{len(self._paths)} blocks and the rest" if self._paths else "in one piece"
        over = f"{self._ranks.world_size // self._replicas} ranks"
        if self._replicas > 1:
            over += f", in {self._replicas} replicas"
        dtype = "" if self._gather_dtype is None else f", gathered in {self._gather_dtype}"
        return f"{pieces}, over {over}{dtype}"

    def _materialize(self) -> None:
        """Give every rank's shards memory, and fill them: alike where they are replicas."""
        model = self._model
        with ExitStack() as stack:
            if self._device.type == "cpu":
                # On a GPU torch draws what the whole would have; here each rank would draw the
                # same numbers for another part of it.
                stack.enter_context(torch.random.fork_rng(devices=[]))
                torch.manual_seed((torch.initial_seed() + 1 + self._ranks.rank) % 2**63)
                stack.enter_context(warnings.catch_warnings())
                warnings.filterwarnings("ignore", "DTensor random operators", UserWarning)
            materialize(model, self._where, self._options.initialize)
        send_from_first(model.buffers())
        if self._replicas > 1:
            group = self._mesh["replicate"].get_group()
            source = dist.get_global_rank(group, 0)
            for parameter in model.parameters():
                dist.broadcast(local(parameter.detach()), src=source, group=group)

    @property
    def _where(self) -> torch.device:
        """Where this rank's shards lie."""
        return torch.device("cpu") if self._options.offload else self._device

    def _shard(self, model: nn.Module) -> None:
        options = self._options
        shared: dict[str, Any] = {
            "mesh": self._mesh,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=self._gather_dtype,
                reduce_dtype=DTYPES[options.reduce_dtype],
                cast_forward_inputs=False,  # the batch is the user's: autocast casts what it must
            ),
            "offload_policy": self._offload_policy(),
            "ignored_params": {p for n, p in model.named_parameters() if n in self._ignored},
        }
        modules = dict(model.named_modules(remove_duplicate=False))
        blocks = list(dict.fromkeys(modules[path] for path in self._paths))
        for block in blocks:
            fully_shard(block, reshard_after_forward=options.reshard_after_forward, **shared)
        fully_shard(model, **shared)  # whatever no block holds
        depth = DEPTHS[0] if options.prefetch == "auto" else options.prefetch
        self._prefetch(cast("list[FSDPModule]", blocks), depth)
        vars(model)[_METHOD] = _call
        register_fsdp_forward_method(model, _METHOD)

    def _new_mesh(self) -> DeviceMesh:
        kind, world = self._device.type, self._ranks.world_size
        if self._options.strategy == "fsdp":
            return init_device_mesh(kind, (world,), mesh_dim_names=("shard",))
        shape = (self._replicas, world // self._replicas)
        return init_device_mesh(kind, shape, mesh_dim_names=("replicate", "shard"))

    def _offload_policy(self) -> OffloadPolicy:
        if not self._options.offload:
            return OffloadPolicy()
        return CPUOffloadPolicy(pin_memory=self._device.type == "cuda")

    def use_depth(self, depth: int) -> None:
        """Gather so many blocks ahead from now on."""
        modules = dict(self._model.named_modules(remove_duplicate=False))
        self._prefetch([cast("FSDPModule", modules[path]) for path in self._paths], depth)

    def _prefetch(self, blocks: list[FSDPModule], depth: int) -> None:
        """Gather several blocks ahead. One is what torch does by itself."""
        for index, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + depth])
            before = blocks[max(0, index - depth) : index]
            if depth == 1:
                block.set_modules_to_forward_prefetch([])
                before = []
            block.set_modules_to_backward_prefetch(before[::-1])


def _call(call: Callable[[], Any]) -> Any:
    return call()


def _kept_whole(call: Callable[[], Any], model: nn.Module) -> Any:
    """Call; leave what belongs to no block whole for the backward, which begins with it.

    So torch does behind the forward of a model. If ``call`` is around one, it finds that over
    already, takes that for no forward, and would have the backward wait for another gather.
    """
    result = call()
    if torch.is_grad_enabled():
        for piece in own_pieces(model):
            states = type(piece._training_state)
            if piece._training_state == states.IDLE:
                piece._training_state = states.FORWARD
    return result


def _paths_of_blocks(model: nn.Module, options: ShardOptions) -> list[str]:
    """Return where the blocks stand, in the order of the model."""
    if options.blocks != "auto":
        return list(select_modules(model, options.blocks, "blocks")[0])
    found = {path for group in find_blocks(model) for path in group.paths}
    return [path for path, _ in model.named_modules(remove_duplicate=False) if path in found]


def _check_pieces(model: nn.Module, paths: list[str]) -> None:
    """Raise unless each parameter lies in one piece.

    Sharded twice, what was tied would become two parameters, which some torch refuse and others
    train apart.

    Raises:
        PlanError: One does not.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    pieces = [modules[path] for path in paths]
    first: dict[int, tuple[str, nn.Module]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        parts = name.split(".")
        around = [modules[".".join(parts[:depth])] for depth in range(1, len(parts))]
        piece = next((module for module in around if module in pieces), model)
        known, known_piece = first.setdefault(id(parameter), (name, piece))
        if known_piece is not piece:
            raise PlanError(
                f"{known!r} and {name!r} are one parameter and would be sharded in two pieces; "
                "name blocks= that hold both or neither, or () for one piece"
            )


def _ignored_names(model: nn.Module, options: ShardOptions) -> set[str]:
    """Return the names of the parameters that are to be left alone."""
    names = [name for name, _ in model.named_parameters()]
    chosen = {item for item in options.ignored if item in names}
    rest = [item for item in options.ignored if item not in chosen]
    paths = tuple(f"{path}." for path in select_modules(model, rest, "ignored")[0]) if rest else ()
    return {name for name in names if name in chosen or name.startswith(paths or "\0")}


def _num_replicas(options: ShardOptions, ranks: Ranks) -> int:
    if options.strategy == "fsdp":
        return 1
    count = options.num_replicas
    if count is None:
        count = ranks.num_machines
    if ranks.world_size % count:
        raise PlanError(
            f"num_replicas={count} does not divide the {ranks.world_size} ranks; take a divisor"
        )
    return count
