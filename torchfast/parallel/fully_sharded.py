"""Fully sharded: each rank holds a part of every parameter, its gradient and its optimizer state.

torch's `fully_shard` does the work: a block is gathered before it runs and taken apart behind it,
and its gradients are reduced to the parts as they come. What stays in memory is one rank's share,
and a block or two.

Two things that go wrong by hand cannot here. The optimizer is built behind it, for sharding
replaces the parameters. And the whole loss function runs as a forward of the model, so that a loss
which calls a method of the model, or uses a weight by itself that belongs to no block, finds it
whole. A block's weights are whole in its forward only.
"""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Final, cast, final

import torch
import torch.distributed as dist
from torch import nn
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
from torchfast.parallel.asked_shards import asked_before
from torchfast.parallel.broken_pass import close_pass
from torchfast.parallel.buffers import Buffers
from torchfast.parallel.inner_backwards import InnerBackwards
from torchfast.parallel.meshes import check_mesh, mesh_for, num_replicas, reshard_for
from torchfast.parallel.meta_device import give_memory, is_on_meta, materialize
from torchfast.parallel.observed_shards import ObservedShards
from torchfast.parallel.options import DTYPES, ShardOptions
from torchfast.parallel.ranks import Ranks, send_from_first
from torchfast.parallel.used_parts import Number, Used
from torchfast.parallel.whole_parameters import WholeParameters

_METHOD = "_torchfast_call"
# Forwards of which it is known what they used: few hosts are so far ahead of their device.
_NUM_KNOWN: Final = 64
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
        ask: Called before collectives; see `SharedTry.ask`.

    Attributes:
        is_noted: Whether to note that of the steps that come.
        noted: Which pieces a forward has run, and which parameters in shards got no gradient.

    Raises:
        PlanError: It is sharded already, or cannot be.

    Numerics: Sums in the order of the collective; in ``gather_dtype`` where that is another.
    Synchronizes: When it is built.
    """

    _numbers = itertools.count()  # all ranks shard the same models in the same order

    def __init__(
        self,
        model: nn.Module,
        options: ShardOptions,
        ranks: Ranks,
        device: torch.device,
        gather_dtype: torch.dtype | None,
        ask: Callable[[], None],
    ) -> None:
        self._ask = ask
        if isinstance(model, FSDPModule):
            raise PlanError(
                f"{type(model).__name__} is sharded already, so shard={options.strategy!r} cannot "
                "shard it; leave it out of the plan, or build the model anew"
            )
        self._model, self._options, self._ranks, self._device = model, options, ranks, device
        self._paths = _paths_of_blocks(model, options)
        _check_pieces(model, self._paths)
        check_mesh(options, ranks, device)
        self._is_on_meta = is_on_meta(model)
        if options.gather_dtype != "auto":
            gather_dtype = DTYPES[options.gather_dtype]
        self._policy = options.mp_policy or MixedPrecisionPolicy(
            param_dtype=gather_dtype,
            reduce_dtype=DTYPES[options.reduce_dtype],
            cast_forward_inputs=False,  # the batch is the user's: autocast casts what it must
        )
        self._whole = WholeParameters(
            model,
            options,
            self._policy.reduce_dtype,
            None if options.mp_policy else self._policy.param_dtype,
        )
        _check_dtypes(model, self._paths, self._whole.names)
        self._replicas = num_replicas(options, ranks)
        self._reshard = reshard_for(options, ranks.world_size // self._replicas)
        self._twins: list[nn.Module] = []
        self._number: Number = (next(self._numbers), 0, 0)
        self._begun_at = 0  # of what torch has gathered, where the last forward began
        self._ran: list[Any] | None = None  # what has run in it, once it is through
        self._before: deque[tuple[Number, list[Any]]] = deque(maxlen=_NUM_KNOWN)
        self._is_known = True  # whether the ranks count forwards alike
        self.is_noted = False
        self.noted: list[str] = []
        # Given where to note when collectives run, and None when that is over.
        self.observe = ObservedShards(model, is_replicated=options.strategy == "hsdp").observe

    def apply(self) -> None:
        """Shard the model, from the inside out."""
        model = self._model
        if not self._is_on_meta:
            # What is sharded is each rank's part of its own copy: they must be copies of one.
            send_from_first(self._ranks.group, [*model.parameters(), *model.buffers()])
        self._mesh = mesh_for(self._options, self._ranks, self._device)
        self._shard(model)
        if self._is_on_meta:
            self._materialize()
        self._whole.move(model, self._device)
        self._buffers = Buffers(model, device=self._device)
        modules = dict(model.named_modules(remove_duplicate=False))
        self._backwards = InnerBackwards(dict.fromkeys(modules[path] for path in self._paths))

    def shard_twin(self, twin: nn.Module) -> None:
        """Shard a copy that was made of the model before `apply` in the same way."""
        self._shard(twin)
        self._twins.append(twin)
        if self._is_on_meta:
            give_memory(twin, self._where)
        self._whole.move(twin, self._device)

    def run(self, call: Callable[[], Any], *, is_last: bool) -> Any:
        """Call with the model whole; only the ``is_last`` one reduces gradients.

        The model begins with the buffers of the first rank, as under replicas.
        """
        self.reduce_gradients(is_last)
        self._buffers.send_from_first(self._ask)
        model, step, forward = self._number
        self._begin_forward((model, step, forward + 1))
        with self._backwards.seen():
            result = self.whole(call, self._model)
        ran = self._gathered()[self._begun_at :]
        if self.is_noted:
            self.noted = _names(ran)
        if not self._backwards.any_ran:
            self._ran = ran
        return result

    def number(self) -> Number:
        """Return the number of the forward that was begun last; see `UsedParts`."""
        return self._number

    def used(self) -> list[Used]:
        """Return what the latest forwards have run in their steps, the last one first.

        Asked from another thread, while this one may wait for other ranks, or shards the model.
        """
        if not isinstance(self._model, FSDPModule):
            return []
        number, ran, before, begun_at = self._number, self._ran, list(self._before), self._begun_at
        running = self._gathered()[begun_at:]
        found = [Used(each, _names(parts), True) for each, parts in reversed(before)]
        # Of a forward that is none yet, or whose beginning torch has forgotten, nothing is known.
        if number[2] and not self._backwards.any_ran:
            own = _names(running if ran is None else ran)
            found.insert(0, Used(number, own, ran is not None))
        return found if number is self._number and self._is_known else []

    def begin_step(self, number: int) -> None:
        """Count forwards from the beginning: ranks that have counted otherwise agree again."""
        self._begin_forward((self._number[0], number, 0))
        self._is_known = True

    def forget_used(self) -> None:
        """Forget what forwards used, behind an error: each rank may have come to another place.

        Those up to the next step are not compared, since they may have other numbers on each.
        """
        self._is_known = False
        self.noted = []
        self._before.clear()
        self._ran = None

    def _begin_forward(self, number: Number) -> None:
        if self._ran is not None and self._is_known:
            self._before.append((self._number, self._ran))
        self._ran = None  # before the number: another thread reads both
        self._begun_at = len(self._gathered()) if isinstance(self._model, FSDPModule) else 0
        self._number = number

    def _gathered(self) -> list[Any]:
        """Return the pieces that were gathered since the last backward, as torch keeps them."""
        state = cast("FSDPModule", self._model)._get_fsdp_state()
        return getattr(state._comm_ctx, "post_forward_order", [])

    def reduce_gradients(self, yes: bool = True) -> None:
        """Say whether the backward that comes reduces gradients, as the last one of a step does."""
        model = cast("FSDPModule", self._model)
        model.set_requires_gradient_sync(yes)
        model.set_is_last_backward(yes)

    def end_backward(self) -> None:
        """Bring the gradients together of what is not sharded, behind the last backward."""
        if self.is_noted:
            # Not of what is left whole: there a rank without a gradient gives zeros, below.
            whole = self._whole.names
            self.noted += [
                f"no {name}"
                for name, p in self._model.named_parameters()
                if name not in whole and p.requires_grad and p.grad is None
            ]
        self._whole.reduce(self._ask)

    def shared(self, ask: Callable[[], None]) -> AbstractContextManager[None]:
        """Return the context of a shared try; see `Shared`."""
        return asked_before(self._model, ask)

    def drop_try(self) -> None:
        """End a shared try, which each rank may have left in another place."""
        self.close_pass()
        self.forget_used()

    def close_pass(self) -> None:
        """Make it as between steps, where one has ended in the middle."""
        for model in (self._model, *self._twins):
            close_pass(model, self._device)

    def check_scaled(self) -> None:
        """Raise if gradients cannot be scaled; see `WholeParameters.check_scaled`."""
        self._whole.check_scaled()

    def whole_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that every rank has whole."""
        return self._whole.replicas()

    def mixed(self) -> AbstractContextManager[Any]:
        """Return the context in which whole and sharded tensors may stand in one list."""
        return self._whole.mixed()

    def whole(self, call: Callable[[], Any], model: nn.Module) -> Any:
        """Call with what belongs to no block gathered, as in a forward of the model or its twin."""
        state = model._get_fsdp_state() if isinstance(model, FSDPModule) else None
        try:
            return getattr(model, _METHOD, _call)(lambda: _kept_whole(call, model))
        finally:
            if state is not None:
                state._mp_policy = self._policy
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
        gathered = self._policy.param_dtype
        dtype = "" if gathered is None else f", gathered in {gathered}"
        whole = f", {self._whole}" if self._whole.names else ""
        return f"{pieces}, over {over}{dtype}{whole}"

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
        send_from_first(self._ranks.group, [*model.buffers(), *self._whole.plain(model)])
        if self._replicas > 1:
            group = self._mesh.get_group(0)
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
            "offload_policy": self._offload_policy(),
            "ignored_params": self._whole.of(model),
        }
        modules = dict(model.named_modules(remove_duplicate=False))
        blocks = list(dict.fromkeys(modules[path] for path in self._paths))
        # What a block returns goes to another block, of the dtype in which both compute.
        policy = dataclasses.replace(self._policy, output_dtype=None)
        for block in blocks:
            fully_shard(block, mp_policy=policy, reshard_after_forward=self._reshard, **shared)
        fully_shard(model, mp_policy=self._policy, **shared)  # whatever no block holds
        depth = DEPTHS[0] if options.prefetch == "auto" else options.prefetch
        self._prefetch(cast("list[FSDPModule]", blocks), depth)
        vars(model)[_METHOD] = _call
        register_fsdp_forward_method(model, _METHOD)

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


def _names(pieces: list[Any]) -> list[str]:
    return [piece._module_fqn or "the rest" for piece in pieces]


def _kept_whole(call: Callable[[], Any], model: nn.Module) -> Any:
    """Call; leave what belongs to no block whole for the backward, which begins with it.

    So torch does behind the forward of a model. If ``call`` is around one, it finds that over
    already, takes that for no forward, and would have the backward wait for another gather.
    """
    result = call()
    state = getattr(model, "_get_fsdp_state", lambda: None)()
    if state is not None and state._mp_policy.output_dtype is not None:
        # What the model returns has been cast. This is a loss, its metrics and its weight.
        state._mp_policy = dataclasses.replace(state._mp_policy, output_dtype=None)
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


def _check_dtypes(model: nn.Module, paths: list[str], whole: set[str]) -> None:
    """Raise unless what is trained in one piece is of one dtype, as torch reduces it at once.

    Raises:
        PlanError: It is not.
    """
    first: dict[str, tuple[str, torch.dtype]] = {}
    for name, parameter in model.named_parameters():
        if name in whole or not parameter.requires_grad:
            continue
        piece = next((path for path in paths if name.startswith(f"{path}.")), "")
        known, dtype = first.setdefault(piece, (name, parameter.dtype))
        if dtype != parameter.dtype:
            raise PlanError(
                f"{known!r} is {dtype} and {name!r} is {parameter.dtype}, and what is sharded in "
                "one piece must be of one dtype; name blocks= that part them, leave one whole "
                "with ignored=, or convert the model"
            )
