"""Parameters of the host in the computation of a device: what autograd sees of them.

In a call of a block a tensor of the device stands for each parameter, made of it by two nodes:

- `_ToDevice` gives the computation the copy that is there, and in the backward begins to copy the
  gradient to the host;
- `_OnHost` is what autograd runs on the thread of the host, which has nothing else to do in a
  backward. It waits for that copy, and lets autograd add the gradient to ``.grad``, or do whatever
  else it does with the gradient of a parameter. The thread of the device runs on meanwhile.

Of what a call saves for its backward, parameters are left out: a `PackedParameter` says which one
it was, and it is brought again. So nothing in a graph keeps a block on the device. Results that
were computed from a parameter, and saved, are activations like others; except its cast by autocast,
which is made again.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import saved_tensors_hooks

from torchfast.memory.activation_offload import is_offloading
from torchfast.memory.packed_tensor import PackedTensor
from torchfast.memory.resident_blocks import DeviceCopy, Resident, ResidentBlocks

if TYPE_CHECKING:
    from torchfast.memory.host_block import HostBlock


@final
class _Landing:
    """The gradient of one parameter of one call, on its way."""

    __slots__ = ("block", "copied", "engine", "source")

    def __init__(self, engine: ResidentBlocks, block: HostBlock, source: Tensor) -> None:
        self.engine, self.block, self.source = engine, block, source
        self.copied: Any = None


class _OnHost(Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, landing: _Landing) -> Tensor:
        ctx.landing = landing
        return parameter.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        copied, ctx.landing.copied = ctx.landing.copied, None
        if copied is not None:
            copied.synchronize()
        return gradients[0], None


class _ToDevice(Function):
    @staticmethod
    def forward(ctx: Any, _: Tensor, copy: Tensor, landing: _Landing) -> Tensor:
        ctx.landing = landing
        ctx.set_materialize_grads(False)
        # An alias: the copy itself serves other calls, with graphs of their own.
        return copy.detach()

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Any) -> Any:
        landing: _Landing = ctx.landing  # type: ignore[attr-defined]
        (gradient,) = gradients
        if gradient is None:
            return None, None, None
        if torch.is_grad_enabled() or gradient.layout is not torch.strided:
            # A gradient that has a graph itself (create_graph), or no copy that could be ordered.
            return gradient.to(landing.source.device), None, None
        target, landing.copied = landing.engine.send_gradient(
            landing.block, landing.source, gradient
        )
        if torch.is_anomaly_enabled():  # which looks at each result
            landing.copied.synchronize()
        return target, None, None


def _stand_in(copy: DeviceCopy, landing: _Landing) -> Tensor:
    on_host: Any = _OnHost.apply(copy.source, landing)  # type: ignore[no-untyped-call]
    standing: Tensor = _ToDevice.apply(on_host, copy.tensor, landing)  # type: ignore[no-untyped-call]
    return standing


@final
class PackedParameter:
    """What autograd holds in place of a parameter, a view of it, or its cast."""

    __slots__ = (
        "_block", "_cast", "_engine", "_module", "_offset", "_size", "_source", "_stride",
        "_version",
    )  # fmt: skip

    def __init__(
        self,
        engine: ResidentBlocks,
        block: HostBlock,
        source: Tensor,
        view: Tensor,
        cast: torch.dtype | None,
    ) -> None:
        self._engine, self._block, self._source, self._cast = engine, block, source, cast
        self._version = source._version
        self._module = block.module()  # a graph outlives a model that nobody holds
        self._size, self._stride = view.size(), view.stride()
        self._offset = view.storage_offset()

    def unpack(self) -> Tensor:
        """Return it, brought to the device again."""
        PackedTensor(self._source.detach(), self._version).check()
        copy = self._engine.copy_for_backward(self._block, self._source)
        with torch.no_grad():
            if self._cast is not None:
                copy = copy.to(self._cast)
            return copy.as_strided(self._size, self._stride, self._offset)


@final
class BroughtParameters:
    """The tensors that stand for a block's parameters in one call.

    Args:
        engine: Where they come from.
        block: The block.
        resident: Its copies on the device.
    """

    def __init__(self, engine: ResidentBlocks, block: HostBlock, resident: Resident) -> None:
        self._engine, self._block = engine, block
        self._copies = resident.copies
        self._by_storage: dict[int, Tensor] = {}
        self._by_node: dict[Any, DeviceCopy] = {}
        self.standing: dict[int, Tensor] = {}
        for key, copy in resident.copies.items():
            self._by_storage[copy.tensor.untyped_storage()._cdata] = copy.source
            if not (torch.is_grad_enabled() and copy.source.requires_grad):
                self.standing[key] = copy.tensor.detach()
                continue
            landing = _Landing(engine, block, copy.source)
            standing = _stand_in(copy, landing)
            self._by_node[standing.grad_fn] = copy
            self.standing[key] = standing
        self._outer: Any = None

    def saving(self) -> AbstractContextManager[Any]:
        """Return the context of the forward, under which parameters are not saved."""
        if not torch.is_grad_enabled():
            return nullcontext()
        self._outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if self._outer is not None and not is_offloading(self._outer[0]):
            # Recompute, or hooks of the user: what is saved is theirs, and with recompute that is
            # saved only while the backward is at this block. Its two runs must save alike.
            self._block.is_needed_again = True
            return nullcontext()
        return saved_tensors_hooks(self._pack, self._unpack)

    def check_unwritten(self) -> None:
        """Raise if the forward has written to a parameter, which would be lost."""
        for copy in self._copies.values():
            if copy.tensor._version != copy.version:
                raise RuntimeError(
                    f"the forward of block {self._block.path!r} writes to its parameter of shape "
                    f"{tuple(copy.tensor.shape)}, but with its parameters on the host it computes "
                    "with a copy, whose changes are lost; make it a buffer, write to it outside "
                    "of the forward, or leave the block out of what is offloaded"
                )

    def end(self) -> None:
        """Let go of what is on the device: the hooks live as long as the graph."""
        self._copies = {}
        for held in (self._by_storage, self._by_node, self.standing):
            held.clear()

    def _pack(self, tensor: Tensor) -> Any:
        if type(tensor) is Tensor and tensor.layout is torch.strided:
            packed = self._packed_parameter(tensor)
            if packed is not None:
                self._block.is_needed_again = True
                return packed
        if self._outer is not None:
            return self._outer[0](tensor)
        with torch.no_grad():
            # Detached, since an output that its own node keeps would never go away.
            return PackedTensor(tensor.detach(), tensor._version)

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, PackedParameter):
            return packed.unpack()
        if self._outer is not None:
            unpacked: Tensor = self._outer[1](packed)
            return unpacked
        packed.check()
        kept: Tensor = packed.kept
        return kept

    def _packed_parameter(self, tensor: Tensor) -> PackedParameter | None:
        if tensor.is_conj() or tensor.is_neg():
            return None
        source = self._by_storage.get(tensor.untyped_storage()._cdata)
        if source is not None:
            if tensor.dtype != source.dtype:
                return None
            return PackedParameter(self._engine, self._block, source, tensor, None)
        base = tensor if tensor._base is None else tensor._base
        node = base.grad_fn
        if node is None or node.name() != "ToCopyBackward0" or base._version != 0:
            return None
        copy = self._by_node.get(node.next_functions[0][0])
        if copy is None or base.stride() != copy.tensor.stride() or base.dtype != tensor.dtype:
            return None
        return PackedParameter(self._engine, self._block, copy.source, tensor, base.dtype)
