"""Values that a step copies from the host to the device each time, and that never change.

``torch.tensor(0.5, device=x.device)`` in a forward is a copy from pageable memory, which makes the
host wait and cannot be captured. Mostly the value is a constant. So where a capture fails for such
a copy, the next step is run with an eye on these copies, and the values are kept on the device; in
the capture after it they stand in for the copies, if each is the same again.

Only what passes through torch's Python functions is seen, and compiled code does not pass through
them: there the step stays eager.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from torchfast._core.compare import same_bits
from torchfast._core.errors import CaptureError

_MAKERS = (torch.tensor, torch.as_tensor, torch.scalar_tensor, Tensor.new_tensor)
_MOVERS = (Tensor.to, Tensor.cuda)
_WRITERS = (Tensor.copy_, Tensor.__setitem__)


@final
class HostConstants:
    """The values that a step copied to a device, in their order.

    Args:
        device: Where the step runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._values: list[tuple[Tensor, Tensor]] = []  # on the host and on the device

    def of_steps(self, number: int) -> HostConstants:
        """Return what so many steps copy one after the other, each of them the same."""
        several = HostConstants(self._device)
        several._values = self._values * number
        return several

    def recording(self) -> TorchFunctionMode:
        """Return a context that keeps the values that its body copies."""
        self._values = []

        def keep(value: Tensor) -> Tensor:
            on_device = value.to(self._device)
            self._values.append((value.clone(), on_device))
            return on_device.clone()

        return _Copies(self._device, keep)

    def standing_in(self) -> TorchFunctionMode:
        """Return a context in which the values that were kept stand in for those copies.

        Raises:
            CaptureError: From its body, where a value is another than before.
        """
        values = iter(self._values)

        def stand_in(value: Tensor) -> Tensor:
            known = next(values, None)
            # By their bits: a NaN is the same NaN.
            if known is None or not _same(known[0], value):
                raise CaptureError(
                    "a tensor that the step copies from the host has another value each time; "
                    "pass it to the step as an input"
                )
            return known[1].clone()  # the step may write to it

        return _Copies(self._device, stand_in)


@final
class _Copies(TorchFunctionMode):
    """Hands what comes from the host to a function."""

    def __init__(self, device: torch.device, bring: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._device = device
        self._bring = bring

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _MAKERS:
            place = kwargs.get("device")
            if place is None and func is Tensor.new_tensor:
                place = args[0].device
            data = args[1 if func is Tensor.new_tensor else 0]
            on_host = not isinstance(data, Tensor) or data.device.type == "cpu"
            if self._is_ours(place) and on_host and not kwargs.get("requires_grad"):
                made = func(*args, **{**kwargs, "device": "cpu"})
                return self._bring(made) if made.device.type == "cpu" else made
        elif func in _MOVERS and self._comes_from_host(args[0]):
            place, dtype = _target(func, args[1:], kwargs, self._device)
            if self._is_ours(place):
                return self._bring(args[0].to(dtype) if dtype is not None else args[0])
        elif func in _WRITERS and self._is_ours(args[0].device) and self._comes_from_host(args[-1]):
            args = (*args[:-1], self._bring(args[-1]))
        return func(*args, **kwargs)

    def _is_ours(self, place: Any) -> bool:
        return place is not None and torch.device(place).type == self._device.type

    @staticmethod
    def _comes_from_host(value: Any) -> bool:
        return (
            isinstance(value, Tensor)
            and value.device.type == "cpu"
            and not (value.requires_grad or value.is_pinned())
        )


def _target(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], default: torch.device
) -> tuple[Any, torch.dtype | None]:
    """Return the device and the type that a move leads to, None where it keeps them."""
    if func is Tensor.cuda:
        return (args[0] if args else kwargs.get("device")) or default, None
    if (args and isinstance(args[0], Tensor)) or "other" in kwargs:
        other = args[0] if args else kwargs["other"]
        return other.device, other.dtype
    place, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    return place, dtype


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and same_bits(a, b)
