"""Values that a step copies from the host to the device each time, and that never change.

``torch.tensor(0.5, device=x.device)`` in a forward is a copy from pageable memory, which makes the
host wait and cannot be captured. Mostly the value is a constant. So where a capture fails for such
a copy, the next step is run with an eye on these copies, and the values are kept on the device; in
the capture after it they stand in for the copies, if each is the same again.

A constant is made of Python's numbers: literals, attributes, short lists. If one of these changes,
that is noticed as it is for any number that a graph has frozen, by `torchfast.graphs.attributes`. A
tensor that was on the host before the step, or an array, is another thing: it may be written to
through views and storages, and replaced by the step itself. So what is made of one, or of anything
else that is no plain number, is no constant unless the user vouches for it; and where the step has
read a number out of such a tensor, nothing is, since that number may be in any.

Only what passes through torch's Python functions is seen, and compiled code does not pass through
them: there the step stays eager.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, final

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
_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_PLAIN = frozenset((bool, int, float, complex, str, type(None), type(...), *_OF_TORCH))
# What takes numbers out of a tensor, so that nobody can follow them.
_READERS = frozenset(
    getattr(holder, name)
    for holder, names in {
        Tensor: "item tolist equal allclose is_nonzero numpy __array__ __bool__ __int__ __float__ "
        "__complex__ __index__ __contains__ __format__ __repr__",
        torch: "equal allclose is_nonzero",
    }.items()
    for name in names.split()
)
# What makes tensors of as many entries as the values say.
_SIZED_BY_VALUES = frozenset(
    getattr(holder, name)
    for holder in (Tensor, torch)
    for name in ("nonzero", "argwhere", "unique", "masked_select", "bincount")
    if hasattr(holder, name)
)
# Under another count of versions.
_ASIDE: tuple[Any, ...] = (Tensor.data.__get__, Tensor.data.__set__)  # type: ignore[attr-defined]
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

    Attributes:
        is_recorded: Whether a step was recorded to its end.
    """

    def __init__(self, device: torch.device, *, vouched_for: bool = False) -> None:
        self._device, self._vouched_for = device, vouched_for
        self._values: list[_Constant] = []
        self.is_recorded = False

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._values)

    def of_steps(self, number: int) -> HostConstants:
        """Return what so many steps copy one after the other, each of them the same."""
        several = HostConstants(self._device, vouched_for=self._vouched_for)
        several._values = self._values * number
        several.is_recorded = self.is_recorded
        return several

    @contextmanager
    def recording(self, inputs: Iterable[Tensor] = ()) -> Iterator[None]:
        """Keep the values that the body copies.

        Args:
            inputs: Of the step: none of them is a constant, and in a capture they are on the device
                before it begins.
        """
        self._values, self.is_recorded = [], False
        of_call = set(map(id, inputs))
        origins = _Origins()

        def keep(value: Tensor, source: object) -> Tensor:
            on_device = value.to(self._device)
            if id(source) in of_call:
                return on_device
            is_noticed = self._vouched_for or origins.are_known(source)
            self._values.append(_Constant(value.clone(), on_device, is_noticed))
            return on_device.clone()

        with _Copies(self._device, keep, origins):
            yield
        if origins.are_mixed and not self._vouched_for:
            self._values = [value._replace(is_noticed=False) for value in self._values]
        self.is_recorded = True  # and not where the step has raised

    def standing_in(self) -> TorchFunctionMode:
        """Return a context in which the values that were kept stand in for those copies.

        Raises:
            CaptureError: From its body, where a value is another than before, or might become
                another one and nobody would notice.
        """
        values = iter(self._values)

        def stand_in(value: Tensor, _source: object) -> Tensor:
            known = next(values, None)
            # By their bits: a NaN is the same NaN.
            if known is None or not _same(known.on_host, value):
                raise CaptureError(ANOTHER_VALUE)
            if not known.is_noticed:
                raise CaptureError(
                    "it copies a tensor from the host of which a change might not be noticed; make "
                    "it on the device, or once, as a buffer; or, if it is the same each time, set "
                    "host_constants=True"
                )
            return known.on_device.clone()  # the step may write to it

        return _Copies(self._device, stand_in)


def has_compiled_code() -> bool:
    """Whether torch.compile has compiled anything here: a mode would have it compile anew."""
    if "torch._dynamo" not in sys.modules:
        return False
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    # Anybody may clear the former, and a reset clears the latter, with what was compiled. Among
    # these is None, of what torch itself, in its optimizers too, has told Dynamo to leave alone.
    backends = getattr(sys.modules.get("torch._dynamo.eval_frame"), "cached_backends", {})
    return bool(counters.get("stats", {}).get("unique_graphs")) or any(
        callable(backend) for backend in backends.values()
    )


@final
class _Origins:
    """Which tensors on the host the step has made itself, of plain numbers and of each other.

    Attributes:
        are_mixed: Whether a number was read out of another one, or memory of one was shared with
            something that is no tensor; then nothing is known of anything.
    """

    def __init__(self) -> None:
        # Held, so that an address stays its own; with the version, as not all that writes is seen.
        self._made: dict[int, tuple[Tensor, int]] = {}
        self.are_mixed = False

    def are_known(self, value: object) -> bool:
        """Whether a value, a nested one too, is made of plain numbers alone."""
        kind = type(value)
        if kind in _PLAIN:
            return True
        if kind in (list, tuple, torch.Size):
            return len(value) <= LONGEST and all(map(self.are_known, value))  # type: ignore[arg-type, call-overload]
        if kind is dict:
            return self.are_known([*value.values()])  # type: ignore[attr-defined]
        if kind is slice:
            return self.are_known([value.start, value.stop, value.step])  # type: ignore[attr-defined]
        return isinstance(value, Tensor) and self._is_made(value)

    def saw(self, func: object, arguments: object, result: object, *, is_known: bool) -> None:
        """Note what a function has returned.

        Args:
            func: Which.
            arguments: Of it.
            result: What it returned.
            is_known: Whether its arguments were, before it may have written to them.
        """
        read = [tensor for tensor in tensors(arguments) if tensor.device.type == "cpu"]
        found = [tensor for tensor in tensors(result) if tensor.device.type == "cpu"]
        if is_known:
            for tensor in read:
                self._follow(tensor)
            self._made |= {id(t): (t, t._version) for t in found if _can_be_followed(t)}
        elif read:
            by_mask = func in _INDEXING and any(t.dtype is torch.bool for t in read[1:])
            self.are_mixed |= func in _READERS or func in _SIZED_BY_VALUES or by_mask
        if read and not found:
            self.are_mixed |= not self.are_known(result)
        self.are_mixed |= bool(read) and func in _ASIDE

    def _follow(self, written: Tensor) -> None:
        """Take the version of a tensor that may just have been written to, and of its views."""
        _, before = self._made[id(written)]
        now = written._version
        if now == before:
            return
        place = written.untyped_storage().data_ptr()
        for key, (tensor, version) in self._made.items():
            if version == before and tensor.untyped_storage().data_ptr() == place:
                self._made[key] = tensor, now

    def _is_made(self, tensor: Tensor) -> bool:
        known = self._made.get(id(tensor))
        return known is not None and known[1] == tensor._version


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
            given = args[1:] if func is Tensor.new_tensor else args
            data = given[0] if given else kwargs.get("data", kwargs.get("s"))
            on_host = not isinstance(data, Tensor) or data.device.type == "cpu"
            if self._is_ours(place) and on_host and not kwargs.get("requires_grad"):
                made = func(*args, **{**kwargs, "device": "cpu"})
                return self._bring(made, data) if made.device.type == "cpu" else made
        elif func in _MOVERS and self._comes_from_host(args[0]):
            place, dtype, memory_format = _target(func, args[1:], kwargs, self._device)
            if self._is_ours(place):
                value = args[0].to(dtype) if dtype is not None else args[0]
                if memory_format is not None:
                    value = value.contiguous(memory_format=memory_format)
                return self._bring(value, args[0])
        elif func in (*_WRITERS, *_INDEXING) and self._is_ours(args[0].device):
            if func in _INDEXING:
                args = (args[0], self._index(args[1]), *args[2:])
            if func in _WRITERS and self._comes_from_host(args[-1]):
                args = (*args[:-1], self._bring(args[-1], args[-1]))
        if self._origins is None:
            return func(*args, **kwargs)
        is_known = self._origins.are_known((args, kwargs))
        result = func(*args, **kwargs)
        self._origins.saw(func, (args, kwargs), result, is_known=is_known)
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
        if place is None or torch.device(place).type != self._device.type:
            return False
        index = torch.device(place).index
        # Without a number it is the current one, which is the step's.
        return index is None or self._device.index is None or index == self._device.index

    @staticmethod
    def _comes_from_host(value: Any) -> bool:
        return (
            isinstance(value, Tensor)
            and value.device.type == "cpu"
            and not (value.requires_grad or value.is_pinned())
        )


def _can_be_followed(tensor: Tensor) -> bool:
    """Whether it has one memory, and counts how often that is written to."""
    return tensor.layout is torch.strided and not tensor.is_inference()


def _target(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], default: torch.device
) -> tuple[Any, torch.dtype | None, torch.memory_format | None]:
    """Return where a move leads to, in what type and order; None where it keeps them."""
    if func is Tensor.cuda:
        place = (args[0] if args else kwargs.get("device")) or default
        return place, None, _reordering(kwargs.get("memory_format"))
    if (args and isinstance(args[0], Tensor)) or "other" in kwargs:
        other = args[0] if args else kwargs["other"]
        return other.device, other.dtype, _reordering(kwargs.get("memory_format"))
    place, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
    return place, dtype, _reordering(memory_format)


def _reordering(memory_format: torch.memory_format | None) -> torch.memory_format | None:
    return None if memory_format is torch.preserve_format else memory_format


def _same(a: Tensor, b: Tensor) -> bool:
    is_dense = a.layout is b.layout is torch.strided  # of others nobody compares the bits
    return is_dense and a.dtype == b.dtype and a.shape == b.shape and same_bits(a, b)
