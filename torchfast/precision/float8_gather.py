"""Weights of a sharded model that are gathered in float8: half the bytes of bf16 between ranks.

A layer in float8 casts its weight before each product. Where the weight is sharded, each rank can
cast its own part instead and the ranks gather the result: 1 byte a value in place of 2, and the
cast is done once by all ranks together. The numbers are those of the cast behind the gather,
since the scale of a tensor is found over all of its parts. With a scale for each row it would not
be so in the product that gives the gradient of the input, so this is for one scale a tensor.

The largest values of all weights are found at the beginning of a step and brought together in one
reduction, not layer by layer; a forward outside of a step finds them as it goes. So nothing is
remembered that a loaded state, a restored one or a hand on the weights could make stale, and a
captured step holds the reduction.

It is told to `fully_shard` through the methods that it looks for on a shard. They are put on the
plain tensor that is there, so weights, optimizer state and files know nothing of it.

When it helps: where gathering is what a step waits for. When it does not: within one node whose
links are faster than the layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from typing_extensions import override

from torchfast._core.closing import Closing
from torchfast._core.errors import PlanError
from torchfast._core.fsdp_pieces import pieces_of
from torchfast._core.phases import COMMUNICATION, phase
from torchfast.precision.torchao_modules import torchao_module

_METHODS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")


@final
class Float8Gather(Closing):
    """Gathers weights in float8 until `close`.

    Args:
        model: Sharded by ``fully_shard``.
        layers: Its layers in float8, by name, with one scale a tensor.

    Raises:
        PlanError: The model is not sharded.

    Numerics: None beside those of the layers.
    Synchronizes: Never.
    """

    def __init__(self, model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
        if not any(isinstance(module, FSDPModule) for module in model.modules()):
            raise PlanError(
                f"this {type(model).__name__} is not sharded, so it has nothing to gather; call "
                "gather() behind fully_shard"
            )
        self._model = model
        tensors = torchao_module(
            "torchao.float8.float8_training_tensor",
            "all_gather=True",
            "Float8TrainingTensor",
            "GemmInputRole",
            "hp_tensor_and_scale_to_float8",
        )
        scales = torchao_module("torchao.float8.float8_utils", "all_gather=True", "amax_to_scale")
        self._weights = [
            _Weight(layers[name], param, tensors, scales.amax_to_scale)
            for name, param in _shards_of(model, layers).items()
        ]
        self._hooks: list[Any] = []
        self.num_layers = len(self._weights)
        if not self._weights:
            return
        # Written in place: a captured step reads where it has written.
        self._scales = torch.ones(self.num_layers, device=self._weights[0].part.device)
        # FSDP's own hook comes first and may have found other tensors.
        self._hooks = [
            weight.module.register_load_state_dict_post_hook(lambda *_: self._settle())
            for weight in self._weights
        ]
        self._arm()

    @contextmanager
    def scaled(self) -> Iterator[None]:
        """Find all scales in one reduction, and gather by them in the body.

        For a body that does not write weights, as a forward and backward.
        """
        if not self._weights:
            yield
            return
        self._settle()
        with torch.no_grad():
            largest = torch._foreach_norm([weight.part for weight in self._weights], math.inf)
            amax = torch.stack([value.float() for value in largest])
            with phase(COMMUNICATION):
                dist.all_reduce(amax, dist.ReduceOp.MAX, group=self._weights[0].group)
            self._scales.copy_(self._weights[0].scale_of(amax))
        for weight, scale in zip(self._weights, self._scales.unbind(), strict=True):
            weight.scale = scale
        try:
            yield
        finally:
            for weight in self._weights:
                weight.scale = None

    @contextmanager
    def left(self) -> Iterator[None]:
        """Gather as without it in the body."""
        self._disarm()
        try:
            yield
        finally:
            self._arm()

    @override
    def close(self) -> None:
        """Gather as without it from now on; a second call does nothing."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._disarm()
        self._weights = []

    def _settle(self) -> None:
        """Take over shards that were replaced, as by ``load_state_dict(assign=True)``."""
        if not all(weight.is_armed for weight in self._weights):
            self._arm()

    def _arm(self) -> None:
        self._take_apart()
        for weight in self._weights:
            weight.arm()

    def _disarm(self) -> None:
        if self._weights:
            self._take_apart()
        for weight in self._weights:
            weight.disarm()

    def _take_apart(self) -> None:
        """Leave nothing gathered in one way that would be used in the other."""
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


@final
class _Weight:
    """A sharded weight and how `fully_shard` is to gather it."""

    def __init__(self, module: Any, param: Any, tensors: Any, amax_to_scale: Any) -> None:
        self.module = module
        self.scale: Tensor | None = None  # of a step
        self._param, self._tensors, self._amax_to_scale = param, tensors, amax_to_scale
        self._dtype: torch.dtype = module.config.cast_config_weight.target_dtype
        self._products = module.linear_mm_config

    @property
    def part(self) -> Tensor:
        """This rank's rows, with those that make the parts of all ranks equally long."""
        rows: Tensor = self._param._sharded_param_data.view(self._param.padded_sharded_param_size)
        return rows

    @property
    def group(self) -> Any:
        """The ranks whose parts make the whole."""
        return self._param.mesh_info.shard_process_group

    def scale_of(self, amax: Tensor) -> Tensor:
        """Return the scales that largest values ask for."""
        scales: Tensor = self._amax_to_scale(amax, self._dtype)
        return scales

    @property
    def _shard(self) -> Any:
        return self._param.sharded_param._local_tensor

    @property
    def is_armed(self) -> bool:
        """Whether the shard that there is now is gathered so."""
        return all(name in vars(self._shard) for name in _METHODS)

    def arm(self) -> None:
        """Put the methods on the shard."""
        for name, method in zip(_METHODS, (self._before, self._after), strict=True):
            setattr(self._shard, name, method)
        self._begin_anew()
        self._param._init_extensions()

    def disarm(self) -> None:
        """Take them off."""
        for name in _METHODS:
            vars(self._shard).pop(name, None)
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Drop what was made for gathering in one format: it is made again at the next."""
        self._param.all_gather_outputs = []
        self._param._unsharded_inner_tensors = []
        vars(self._param).pop("_unsharded_param", None)

    def _before(self, mesh: Any) -> tuple[tuple[Tensor], tuple[Tensor]]:
        """Return what is gathered, and what the whole needs besides. See `fully_shard`."""
        part, scale = self.part, self.scale
        if scale is None:
            amax = part.abs().max()
            dist.all_reduce(amax, dist.ReduceOp.MAX, group=mesh.get_group())
            scale = self.scale_of(amax)
        role = self._tensors.GemmInputRole.WEIGHT
        cast = self._tensors.hp_tensor_and_scale_to_float8
        values: Tensor = cast(part, scale, self._dtype, self._products, role)._data
        return (values.view(torch.uint8),), (scale,)  # not every backend sends float8

    def _after(
        self,
        gathered: tuple[Tensor, ...],
        metadata: tuple[Tensor],
        dtype: torch.dtype,
        *,
        out: Any = None,
    ) -> tuple[Tensor, tuple[Tensor]] | None:
        """Return the whole weight and where its values lie; or bring ``out`` up to date."""
        (values,), (scale,) = gathered, metadata
        if out is not None:  # its values have been written
            out._scale = scale
            return None
        if self.scale is None and scale.is_cuda:
            # Made on the stream that copies shards in, and read on this one.
            scale.record_stream(torch.cuda.current_stream(scale.device))
        values = values.view(self._dtype)
        role = self._tensors.GemmInputRole.WEIGHT
        whole: Tensor = self._tensors.Float8TrainingTensor(
            values, scale, dtype, self._products, gemm_input_role=role
        )
        return whole, (values,)


def _shards_of(model: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Return what `fully_shard` holds of the weight of each layer.

    Not of one that an embedding, or another module, uses too: it is looked up, not multiplied.
    """
    names = {module: name for name, module in layers.items()}
    found = {}
    for piece in pieces_of(model):
        for param in piece.fsdp_params:
            info = param._module_info
            users = [info.module, *info.shared_modules]
            if info.param_name == "weight" and all(user in names for user in users):
                found[names[info.module]] = param
    return found
