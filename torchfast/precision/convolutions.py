"""Convolutions: 4-d tensors laid out as NHWC, and kernels that cuDNN has measured.

cuDNN's convolution kernels for 16-bit types and tf32 want NHWC; with NCHW they transpose around
every call. Worth it for convolutions, nothing for models without them. Shapes and indexing do not
change, only strides, so the model's code need not know.

Which of its kernels cuDNN takes is a guess by shapes, unless it is told to try them all the first
time that it meets a shape (``torch.backends.cudnn.benchmark``). That is a switch of the process; it
is on while gradients are computed, and what it was otherwise.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.optim import Optimizer

from torchfast._core.batches import tensors
from torchfast._core.building import optimized
from torchfast._core.decisions import Decision
from torchfast._core.local import local

# Of a batch's tensors more different shapes than this, and trying all kernels for each new one
# costs more than it gains.
MOST_SHAPES: Final = 8
_CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)
# What torch says, and what its compiler does, of a view of elements that do not lie in order.
_NO_VIEW: Final = ("view size is not compatible", "Cannot view a tensor with shape")

logger = logging.getLogger(__name__)


@final
class Convolutions:
    """Lays a model's 4-d parameters out as NHWC, and puts them back; has cuDNN measure its kernels.

    Sharded parameters stay as they are; batches are laid out for them too.

    Args:
        model: Changed in place: the parameter objects stay, their storage is laid out anew.
        device: Where it trains.
        channels_last: Whether the plan asks for NHWC.
        benchmark: Whether it asks for the measuring.

    Attributes:
        active: Whether batches are laid out as NHWC.
        is_on_trial: Whether no forward has run so yet.
        is_undone: Whether the first forward could not, and all is laid out as NCHW.
        followers: Called behind that: what is laid out as the model is, such as its average.

    Numerics: May differ by rounding: other kernels are chosen; by measuring not always the same.
    Synchronizes: Never; cuDNN does while it measures.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, *, channels_last: bool, benchmark: bool
    ) -> None:
        self._changed: list[Tensor] = []
        convolutions = sum(isinstance(module, _CONVOLUTIONS) for module in model.modules())
        self.active = self.is_on_trial = channels_last and convolutions > 0
        self.is_undone = False
        self.followers: list[Callable[[], object]] = []
        self._shapes: set[tuple[Any, ...]] = set()
        self._benchmark = _benchmark_decision(model, device, benchmark)
        num_sharded = 0
        if self.active:
            every = [*model.parameters(), *model.buffers()]
            # Shards are parts in the order of the whole, and gathered in it.
            tensors = [tensor for tensor in every if local(tensor) is tensor]
            num_sharded = sum(t.dim() == 4 and local(t) is not t for t in every)
            holders = Counter(tensor.untyped_storage().data_ptr() for tensor in tensors)
            for tensor in tensors:
                # Storage that others look into as well is theirs too: a new one would untie them.
                is_own = holders[tensor.untyped_storage().data_ptr()] == 1
                if is_own and tensor.dim() == 4 and not _is_nhwc(tensor):
                    tensor.data = tensor.data.contiguous(memory_format=torch.channels_last)
                    self._changed.append(tensor)
        self._layout = _layout_decision(
            channels_last, convolutions, len(self._changed), num_sharded
        )

    def decisions(self) -> list[Decision]:
        """Return what was done to layouts, and to the choice of kernels."""
        return [self._layout, self._benchmark]

    @contextmanager
    def measured(self, group: Sequence[Any]) -> Iterator[None]:
        """Let cuDNN try its kernels for shapes that it meets here, on these micro-batches.

        Not under deterministic algorithms: which kernel is fastest may be another one next time.
        """
        backend = torch.backends.cudnn
        if (
            self._benchmark.outcome != "applied"
            or backend.deterministic
            or torch.are_deterministic_algorithms_enabled()
        ):
            yield
            return
        self._shapes.update(tuple(t.shape for t in tensors(batch)) for batch in group)
        if len(self._shapes) > MOST_SHAPES:
            why = f"batches of more than {MOST_SHAPES} shapes: to try all kernels for each is dear"
            self._benchmark = _said("cudnn_benchmark", "stepped aside", why)
            yield
            return
        before = backend.benchmark
        backend.benchmark = True
        try:
            yield
        finally:
            backend.benchmark = before

    def cannot_bear(self, error: RuntimeError) -> bool:
        """Whether a forward failed for the layout: it asks for a view that NHWC does not give."""
        return self.active and any(sign in str(error) for sign in _NO_VIEW)

    def step_aside(self, optimizer: Optimizer) -> None:
        """Lay all of it out as NCHW again, for good."""
        self.close(optimizer)
        self.is_on_trial, self.is_undone = False, True
        for follow in self.followers:
            follow()
        why = "a view(...) in the forward needs NCHW; write reshape(...) for it to have NHWC"
        self._layout = _said("channels_last", "stepped aside", why)
        logger.warning(
            "channels_last: a view(...) in the forward needs NCHW; write reshape(...) for it to "
            "have NHWC"
        )

    def align(self, optimizer: Optimizer) -> None:
        """Lay optimizer state out as its parameters are; fused updates demand it."""
        _align(optimizer, [p for p in optimized(optimizer) if p.dim() == 4 and local(p) is p])

    def close(self, optimizer: Optimizer) -> None:
        """Put parameters and optimizer state back as they were."""
        for tensor in self._changed:
            tensor.data = tensor.data.contiguous()
        _align(optimizer, self._changed)
        self._changed = []
        self.active = False


def as_nchw(tensor: Tensor) -> Tensor:
    """Return a 4-d tensor that lies as NHWC as NCHW, any other as it is."""
    is_to_move = tensor.dim() == 4 and tensor.layout is torch.strided and _is_nhwc(tensor)
    return tensor.contiguous() if is_to_move else tensor


def _is_nhwc(tensor: Tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last)


def _align(optimizer: Optimizer, parameters: list[Tensor]) -> None:
    for parameter in parameters:
        state = optimizer.state.get(parameter, {})
        for key, value in state.items():
            is_moment = isinstance(value, Tensor) and value.shape == parameter.shape
            if is_moment and value.stride() != parameter.stride():
                state[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
        if parameter.grad is not None and parameter.grad.shape == parameter.shape:
            parameter.grad = torch.empty_like(parameter).copy_(parameter.grad)


def _layout_decision(wanted: bool, convolutions: int, changed: int, num_sharded: int) -> Decision:
    lever = "channels_last"
    if not wanted:
        return _said(lever, "left alone", "layouts as given")
    if not convolutions:
        why = "the model has no 2-d convolution, so there is nothing to gain"
        return _said(lever, "left alone", why)
    detail = f"{changed} tensors of {convolutions} convolutions, and 4-d batch tensors, as NHWC"
    if num_sharded:
        detail += f"; {num_sharded} sharded ones stay as they are, for cuDNN to lay out"
    return _said(lever, "applied", detail)


def _benchmark_decision(model: nn.Module, device: torch.device, wanted: bool) -> Decision:
    lever = "cudnn_benchmark"
    if not wanted:
        return _said(lever, "left alone", "the switch as given")
    if device.type != "cuda":
        return _said(lever, "left alone", f"there is no cuDNN on {device.type}")
    if not any(isinstance(module, _ConvNd) for module in model.modules()):
        return _said(lever, "left alone", "the model has no convolution")
    return _said(lever, "applied", "cuDNN tries its kernels where it meets a new shape")


def _said(lever: str, outcome: Any, detail: str) -> Decision:
    return Decision(lever=lever, outcome=outcome, detail=detail)
