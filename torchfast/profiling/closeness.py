"""Whether two functions compute the same, as far as rounding goes: results and gradients.

What is compared is the largest difference over the largest magnitude of a tensor. Element by
element, a sum of many products that ends near zero would be called wrong for the rounding of its
large terms, and versions that add in another order are what one wants to compare.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import torch
from torch import Tensor

from torchfast._core.batches import tensors

# The largest difference over the largest magnitude that rounding makes, by dtype.
_TOLERANCES: Final = {
    torch.float64: 1e-7,
    torch.complex128: 1e-7,
    torch.float32: 1e-3,
    torch.complex64: 1e-3,
    torch.float16: 1e-2,
    torch.bfloat16: 1e-2,
}
_NARROW_TOLERANCE: Final = 0.1  # of 8 bits and fewer


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one call of a function computed.

    Attributes:
        outputs: The tensors that it returned, in order.
        gradients: Leaves of its graph, and their gradients; None where one is not used.
    """

    outputs: list[Tensor]
    gradients: list[tuple[Tensor, Tensor | None]]


def differentiable(result: object) -> list[Tensor]:
    """Return the tensors of a nested result that a backward can begin at."""
    return [tensor for tensor in tensors(result) if tensor.requires_grad]


def leaves_below(roots: list[Tensor]) -> list[Tensor]:
    """Return every leaf that tensors depend on, found in the graph; each once.

    So parameters are found that a function holds by its closure, which no argument names.
    """
    found: dict[int, Tensor] = {id(t): t for t in roots if t.grad_fn is None}
    # By object, and kept: a node that is gone would give its id to another.
    nodes: set[Any] = {t.grad_fn for t in roots if t.grad_fn is not None}
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            found[id(leaf)] = leaf
        for below, _ in node.next_functions:
            if below is not None and below not in nodes:
                nodes.add(below)
                waiting.append(below)
    return list(found.values())


def check_close(first: Outcome, second: Outcome, *, tolerance: float | None) -> float | None:
    """Return the largest difference of two outcomes, over the largest magnitude of the first.

    Args:
        first: What the one computed.
        second: What the other computed.
        tolerance: The largest that is accepted; None for what the dtypes round to.

    Returns:
        None if there is no tensor to compare.

    Raises:
        ValueError: They differ by more, or in how many tensors there are, or in a shape.

    Synchronizes: Once for each pair of tensors.
    """
    if len(first.outputs) != len(second.outputs):
        _fail(f"the one returns {len(first.outputs)} tensors, the other {len(second.outputs)}")
    largest = None
    for name, one, other in _pairs(first, second):
        if one.shape != other.shape:
            _fail(f"{name} has shape {tuple(one.shape)} and {tuple(other.shape)}")
        distance, part = _distance(one, other.to(one.device))
        accepted = max(map(_tolerance, (one, other))) if tolerance is None else tolerance
        # Written so that NaN fails too.
        if not part <= accepted:
            _fail(
                f"{name} differs by up to {distance:.3g}, which is {part:.3g} of its largest "
                f"magnitude and more than {accepted:.3g}"
            )
        largest = part if largest is None else max(largest, part)
    return largest


def _pairs(first: Outcome, second: Outcome) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield results by position, and gradients of the leaves that both depend on."""
    outputs = zip(first.outputs, second.outputs, strict=True)
    for position, (one, other) in enumerate(outputs):
        yield f"result {position}", one, other
    others = {id(leaf): gradient for leaf, gradient in second.gradients}
    for leaf, gradient in first.gradients:
        if id(leaf) not in others:
            continue  # a parameter of the one alone
        counterpart = others[id(leaf)]
        name = f"the gradient of a leaf of shape {tuple(leaf.shape)}"
        if gradient is not None and counterpart is not None:
            yield name, gradient, counterpart
        elif gradient is not counterpart:
            _fail(f"only one of them computes {name}")


def _tolerance(tensor: Tensor) -> float:
    if tensor.is_floating_point() or tensor.is_complex():
        return _TOLERANCES.get(tensor.dtype, _NARROW_TOLERANCE)
    return 0.0


def _distance(one: Tensor, other: Tensor) -> tuple[float, float]:
    """Return the largest absolute difference, and its part of the largest magnitude."""
    if one.numel() == 0:
        return 0.0, 0.0
    wide = _wide(one), _wide(other)
    # Infinities and NaNs at the same places are equal; their difference would be NaN.
    equal = (wide[0] == wide[1]) | (wide[0].isnan() & wide[1].isnan())
    gap = torch.where(equal, 0.0, (wide[0] - wide[1]).abs())
    finite = torch.where(wide[0].isfinite(), wide[0].abs(), 0.0)
    distance, magnitude = torch.stack([gap.max(), finite.max()]).tolist()
    if distance == 0:
        return 0.0, 0.0
    return distance, distance / magnitude if magnitude > 0 else float("inf")


def _wide(tensor: Tensor) -> Tensor:
    """Return values that can be subtracted without more rounding than they have."""
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    is_narrow = tensor.is_floating_point() and tensor.element_size() <= 4
    return tensor.to(torch.float32 if is_narrow else torch.float64)


def _fail(how: str) -> NoReturn:
    raise ValueError(
        f"first and second do not compute the same: {how}; compare functions that do the same, "
        "or pass a larger tolerance, or check=False"
    )
