"""Values that a step copies from the host to the device each time, and that never change.

``torch.tensor(0.5, device=x.device)`` in a forward is a copy from pageable memory, which makes the
host wait and cannot be captured. Mostly the value is a constant. So where a capture fails for such
a copy, the next step is run with an eye on these copies, and the values are kept on the device; in
the capture after it they stand in for the copies, if each is the same again.

A constant is made of what the host holds: numbers, attributes, small tensors. If one of these
changes, that is noticed as it is for any number that a graph has frozen, by
`torchfast.graphs.attributes`, which looks at the content of what has up to `LONGEST` entries. So of
more than that, only what the step makes itself (a mask of ``torch.ones``) is taken for a constant,
unless the user vouches for it.

Only what passes through torch's Python functions is seen, and compiled code does not pass through
them: there the step stays eager.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from torchfast._core.batches import tensors
from torchfast._core.compare import same_bits
from torchfast._core.errors import CaptureError
from torchfast.graphs.holders import LONGEST

ANOTHER_VALUE = (
    "a tensor that the step copies from the host has another value each time; pass it to the step "
    "as an input"
)
_MAKERS = (torch.tensor, torch.as_tensor, torch.scalar_tensor, Tensor.new_tensor)
_MOVERS = (Tensor.to, Tensor.cuda)
_WRITERS = (Tensor.copy_, Tensor.__setitem__)
_INDEXING = (Tensor.__getitem__, Tensor.__setitem__)
_INDICES = frozenset((torch.int8, torch.int16, torch.int32, torch.int64))


class _Constant(NamedTuple):
    """A value that is copied.

    Attributes:
        on_host: As the step copies it.
        on_device: What stands in for the copy.
        is_noticed: Whether somebody would notice that it has changed.
    """

    on_host: Tensor
    on_device: Tensor
    is_noticed: bool


@final
class HostConstants:
    """The values that a step copied to a device, in their order.

    Args:
        device: Where the step runs.
        vouched_for: Take values of which a change would not be noticed, too.
    """

    def __init__(self, device: torch.device, *, vouched_for: bool = False) -> None:
        self._device, self._vouched_for = device, vouched_for
        self._values: list[_Constant] = []
        self._num_steps = 1

    def __len__(self) -> int:
        """Return how many there are in a step."""
        return len(self._values)

    def of_steps(self, number: int) -> HostConstants:
        """Return what so many steps copy one after the other: each of them what one copies now."""
        several = HostConstants(self._device, vouched_for=self._vouched_for)
        several._values, several._num_steps = self._values, number
        return several

    @contextmanager
    def recording(self, inputs: Iterable[Tensor] = ()) -> Iterator[None]:
        """Keep the values that the body copies.

        Args:
            inputs: Of the step: none of them is a constant, and in a capture they are on the device
                before it begins.
        """
        self._values.clear()  # also of those who do several such steps
        of_call = set(map(id, inputs))
        origins = _Origins()

        def keep(value: Tensor, source: object) -> Tensor:
            on_device = value.to(self._device)
            if id(source) in of_call:
                return on_device
            is_noticed = self._vouched_for or origins.are_noticed(value, source)
            self._values.append(_Constant(value.clone(), on_device, is_noticed))
            return on_device.clone()

        with _Copies(self._device, keep, origins):
            yield

    def standing_in(self) -> TorchFunctionMode:
        """Return a context in which the values that were kept stand in for those copies.

        Raises:
            CaptureError: From its body, where a value is another than before, or might become
                another one and nobody would notice.
        """
        values = iter(self._values * self._num_steps)

        def stand_in(value: Tensor, _source: object) -> Tensor:
            known = next(values, None)
            # By their bits: a NaN is the same NaN.
            if known is None or not _same(known.on_host, value):
                raise CaptureError(ANOTHER_VALUE)
            if not known.is_noticed:
                raise CaptureError(
                    f"it copies {value.numel():,} numbers from the host, too many for a change of "
                    "them to be noticed; make them on the device, or once, as a buffer; or, if "
                    "they are the same each time, set host_constants=True"
                )
            return known.on_device.clone()  # the step may write to it

        return _Copies(self._device, stand_in)


def has_compiled_code() -> bool:
    """Whether torch.compile has compiled anything here: a mode would have it compile anew."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["stats"]["unique_graphs"])


@final
class _Origins:
    """Which large tensors on the host the step has made itself, of nothing that is large.

    What was there before it may be changed in ways that nobody sees: through an array of NumPy that
    shares its memory.
    """

    def __init__(self) -> None:
        self._made: dict[int, Tensor] = {}  # held, so that an address stays its own

    def are_noticed(self, value: Tensor, source: object) -> bool:
        """Whether a change of what is copied would be noticed."""
        return value.numel() <= LONGEST or self._is_made(source)

    def saw(self, arguments: object, result: object) -> None:
        """Note what a function has returned."""
        read = [tensor for tensor in tensors(arguments) if tensor.device.type == "cpu"]
        is_known = [tensor.numel() <= LONGEST or self._is_made(tensor) for tensor in read]
        is_shared = bool(read) and isinstance(result, np.ndarray)
        if is_shared or not all(is_known) or _has_large_data(arguments):
            if any(map(self._is_made, read)):  # it may have been written to, by a view of another
                self._made.clear()
            return
        for tensor in tensors(result):
            if tensor.device.type == "cpu":
                self._made[id(tensor)] = tensor

    def _is_made(self, source: object) -> bool:
        return id(source) in self._made


@final
class _Copies(TorchFunctionMode):
    """Hands what comes from the host to a function, with what it was made of."""

    def __init__(
        self,
        device: torch.device,
        bring: Callable[[Tensor, object], Tensor],
        origins: _Origins | None = None,
    ) -> None:
        super().__init__()
        self._device = device
        self._bring = bring
        self._origins = origins

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
                return self._bring(made, data) if made.device.type == "cpu" else made
        elif func in _MOVERS and self._comes_from_host(args[0]):
            place, dtype = _target(func, args[1:], kwargs, self._device)
            if self._is_ours(place):
                value = args[0].to(dtype) if dtype is not None else args[0]
                return self._bring(value, args[0])
        elif func in (*_WRITERS, *_INDEXING) and self._is_ours(args[0].device):
            if func in _INDEXING:
                args = (args[0], self._index(args[1]), *args[2:])
            if func in _WRITERS and self._comes_from_host(args[-1]):
                args = (*args[:-1], self._bring(args[-1], args[-1]))
        result = func(*args, **kwargs)
        if self._origins is not None:
            self._origins.saw((args, kwargs), result)
        return result

    def _index(self, index: Any) -> Any:
        """Return an index whose numbers are on the device: ``x[:, [0, 2]]`` copies two."""
        if isinstance(index, tuple):
            return tuple(map(self._index, index))
        if isinstance(index, list) and index and all(type(number) is int for number in index):
            return self._bring(torch.tensor(index, device="cpu"), index)
        # One of no dimension is read on the host, and a mask counted there.
        if self._comes_from_host(index) and index.dim() and index.dtype in _INDICES:
            return self._bring(index, index)
        return index

    def _is_ours(self, place: Any) -> bool:
        return place is not None and torch.device(place).type == self._device.type

    @staticmethod
    def _comes_from_host(value: Any) -> bool:
        return (
            isinstance(value, Tensor)
            and value.device.type == "cpu"
            and not (value.requires_grad or value.is_pinned())
        )


def _has_large_data(arguments: object) -> bool:
    """Whether there is an array or a list of more entries than are looked at for a change."""
    if isinstance(arguments, np.ndarray):
        return arguments.size > LONGEST
    if isinstance(arguments, dict):
        return any(map(_has_large_data, arguments.values()))
    if isinstance(arguments, list | tuple):
        return len(arguments) > LONGEST or any(map(_has_large_data, arguments))
    return False


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
