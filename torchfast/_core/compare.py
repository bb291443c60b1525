"""State against state: which entries differ, where, and by how much."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One entry that differs.

    Attributes:
        key: Its path in the state, such as ``"blocks.0.weight"``.
        detail: What was expected and what was found, with the place and the distance.
        distance: The largest absolute difference; infinity where it cannot be measured.
    """

    key: str
    detail: str
    distance: float

    def __str__(self) -> str:
        return f"{self.key!r}: {self.detail}"


def differences(expected: Any, actual: Any) -> list[Difference]:
    """Return every entry of two nested states that is not equal, bit for bit.

    Mappings, lists and tuples are walked; tensors must agree in dtype, shape and value (two NaNs
    of the same bits are equal), wherever they lie; all else is compared by ``==``.
    """
    old, new = dict(_leaves(expected, "")), dict(_leaves(actual, ""))
    found = [_lacking(key, "missing") for key in old if key not in new]
    found += [_lacking(key, "unexpected") for key in new if key not in old]
    for key in old:
        if key in new:
            difference = _difference(key, old[key], new[key])
            if difference is not None:
                found.append(difference)
    return found


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, list | tuple) and not all(isinstance(v, int) for v in value):
        items = list(enumerate(value))
    else:
        yield path, value
        return
    for key, item in items:
        yield from _leaves(item, f"{path}.{key}" if path else str(key))


def _lacking(key: str, what: str) -> Difference:
    return Difference(key=key, detail=what, distance=float("inf"))


def _difference(key: str, old: Any, new: Any) -> Difference | None:
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        return _tensor_difference(key, old, new)
    if isinstance(old, Tensor) or isinstance(new, Tensor):
        detail = f"expected {type(old).__name__}, got {type(new).__name__}"
        return Difference(key=key, detail=detail, distance=float("inf"))
    if old == new or (old != old and new != new):
        return None
    number = isinstance(old, int | float) and isinstance(new, int | float)
    distance = abs(old - new) if number else float("inf")
    shown = [text if len(text) <= 60 else text[:57] + "..." for text in (repr(old), repr(new))]
    return Difference(key=key, detail=f"expected {shown[0]}, got {shown[1]}", distance=distance)


def _tensor_difference(key: str, old: Tensor, new: Tensor) -> Difference | None:
    if old.dtype != new.dtype or old.shape != new.shape:
        detail = (
            f"expected {old.dtype} of shape {tuple(old.shape)}, "
            f"got {new.dtype} of shape {tuple(new.shape)}"
        )
        return Difference(key=key, detail=detail, distance=float("inf"))
    old, new = (t.detach().to_dense() if t.is_sparse else t.detach() for t in (old, new))
    new = new.to(old.device)
    if same_bits(old, new):
        return None
    before, after = parts(old), parts(new)
    # Zeros of both signs are equal. Not asked of integers, since large ones are rounded here.
    is_exact = old.is_floating_point() or old.is_complex()
    if is_exact and torch.equal(before, after):
        return None
    gap = (after - before).abs()
    if old.is_complex():
        gap = torch.hypot(*gap.unbind(-1))
    gap = torch.where(gap.isnan(), torch.inf, gap)
    flat = int(gap.argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), old.shape))
    count = int((gap > 0).sum())
    detail = (
        f"max |difference| {float(gap.max()):.3g} at {index} "
        f"(expected {old[index].item():.9g}, got {new[index].item():.9g}), "
        f"{count} of {old.numel()} elements differ"
    )
    return Difference(key=key, detail=detail, distance=float(gap.max()))


def same_objects(now: Collection[Any], then: Collection[Any]) -> bool:
    """Whether two collections hold the very same objects in one order; no value is compared."""
    return len(now) == len(then) and all(map(operator.is_, now, then))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two dense tensors of one dtype and shape agree in every bit; so equal NaNs do."""
    return torch.equal(as_integers(a), as_integers(b))


def parts(tensor: Tensor) -> Tensor:
    """Return the tensor's values in float64, the two of a complex one along a last dimension."""
    return _real(tensor).to(torch.float64)


def as_integers(tensor: Tensor) -> Tensor:
    """Return the tensor's bits as integers, the two of a complex one along a last dimension."""
    tensor = _real(tensor)
    return tensor.contiguous().view(_INTEGERS[tensor.element_size()])


def _real(tensor: Tensor) -> Tensor:
    """Return a complex tensor's two parts along a last dimension, and any other as it is.

    No complex number is computed with: CUDA compiles such kernels when they are first used, which
    takes seconds and a cache on the disk.
    """
    tensor = tensor.resolve_conj().resolve_neg()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
