"""How many operations an operator does and how many bytes it moves at least, from its inputs.

A trace notes the shapes and types of an operator's inputs, and of numbers among them what they are.
For products, convolutions and attention that tells the arithmetic. An operation is a multiplication
or an addition. Bytes are those of inputs that are read once and results that are written once; a
kernel that is not perfect moves more.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from torchfast.profiling.trace import HostSpan

_BYTES: Final = {
    "float": 4,
    "double": 8,
    "c10::BFloat16": 2,
    "c10::Half": 2,
    "c10::Float8_e4m3fn": 1,
    "c10::Float8_e5m2": 1,
}
# c10::ScalarType by its number, as out_dtype is noted.
_BYTES_BY_NUMBER: Final = {"5": 2, "6": 4, "7": 8, "15": 2, "23": 1, "24": 1}
ATTENTION: Final = "aten::_scaled_dot_product_"

Shape = Sequence[int]
Shapes = Sequence[Shape]


class Cost(NamedTuple):
    """Operations, and bytes moved at least."""

    operations: float
    num_bytes: float


def cost_of(span: HostSpan) -> Cost | None:
    """Return the cost of an operator whose inputs tell it, else None.

    Example:
        >>> facts = {"Input Dims": [[2, 3], [3, 4]], "Input type": ["float", "float"]}
        >>> cost_of(HostSpan("aten::mm", "op", 0, 1, "1", facts))
        Cost(operations=48.0, num_bytes=104.0)
    """
    facts: Mapping[str, Any] = span.facts or {}
    try:
        shapes = shapes_of(facts)
        size = _BYTES.get(first_type(span), 4)
        if span.name == "aten::_scaled_mm":
            operations, num_bytes = _scaled_product(shapes, facts)
        elif span.name in ("aten::convolution", "aten::_convolution"):
            operations, elements = _convolution(shapes, facts)
            num_bytes = elements * size
        elif span.name == "aten::convolution_backward":
            operations, elements = _convolution_backward(shapes, facts)
            num_bytes = elements * size
        else:
            found = _by_shapes(span.name, shapes)
            if found is None:
                return None
            operations, num_bytes = found[0], found[1] * size
        return Cost(float(operations), float(num_bytes))
    except (KeyError, TypeError, ValueError, IndexError, OverflowError):
        return None


def shapes_of(facts: Mapping[str, Any]) -> list[list[int]]:
    """Return the shapes of the inputs that are tensors of some dimension."""
    return [[int(n) for n in s] for s in facts["Input Dims"] if is_shape(s)]


def is_shape(value: Any) -> bool:
    """Return whether an entry of the shapes is one."""
    return isinstance(value, list) and bool(value) and all(isinstance(n, int) for n in value)


def first_type(span: HostSpan) -> str:
    """Return the type of the first input that has a type of numbers."""
    types = [t for t in (span.facts or {}).get("Input type", []) if t in _BYTES]
    return str(types[0]) if types else "float"


def _by_shapes(name: str, shapes: Shapes) -> tuple[int, int] | None:
    """Return operations, and elements read and written."""
    if name in ("aten::addmm", "aten::baddbmm"):
        shapes = shapes[-2:]  # before them stands the bias
    if name in ("aten::mm", "aten::addmm"):
        (m, k), (_, n) = shapes[0], shapes[1]
        return 2 * m * n * k, m * k + k * n + m * n
    if name in ("aten::bmm", "aten::baddbmm"):
        (b, m, k), (_, _, n) = shapes[0], shapes[1]
        return 2 * b * m * n * k, b * (m * k + k * n + m * n)
    if name.startswith(ATTENTION):
        return _attention_backward(shapes) if "backward" in name else _attention(shapes[:3])
    return None


def _attention(shapes: Shapes) -> tuple[int, int]:
    query, key, value = shapes
    (*batch, queries, width), keys = query, key[-2]
    b = math.prod(batch)
    result = b * queries * value[-1]
    moved = math.prod(query) + math.prod(key) + math.prod(value) + result
    return 2 * b * queries * keys * (width + value[-1]), moved


def _attention_backward(shapes: Shapes) -> tuple[int, int]:
    """Return the cost of a backward pass that computes the scores again: five products."""
    gradient, query, key, value = shapes[:4]
    (*batch, queries, width), keys = query, key[-2]
    pairs = 2 * math.prod(batch) * queries * keys
    # Read: four inputs and the result; written: three gradients.
    moved = 2 * math.prod(gradient) + 2 * sum(math.prod(s) for s in (query, key, value))
    # Scores, and the gradients of query and key; of value, and of the scores.
    return pairs * (3 * width + 2 * value[-1]), moved


def _scaled_product(shapes: Shapes, facts: Mapping[str, Any]) -> tuple[int, int]:
    (m, k), (_, n) = shapes[0], shapes[1]
    written = [_BYTES_BY_NUMBER[v] for v in facts["Concrete Inputs"][5:7] if v in _BYTES_BY_NUMBER]
    return 2 * m * n * k, m * k + k * n + m * n * (written[0] if written else 2)


def _convolution(shapes: Shapes, facts: Mapping[str, Any]) -> tuple[int, int]:
    known = facts["Concrete Inputs"]
    given, weight = shapes[0], shapes[1]
    stride, padding, dilation, output_padding = (_whole(known[i]) for i in (3, 4, 5, 7))
    groups = int(known[8])
    kernel, transposed = weight[2:], _truth(known[6])
    positions = []
    for i, (n, k) in enumerate(zip(given[2:], kernel, strict=True)):
        by, pad, reach = _at(stride, i), _at(padding, i), _at(dilation, i) * (k - 1)
        if transposed:
            positions.append((n - 1) * by - 2 * pad + reach + _at(output_padding, i) + 1)
        else:
            positions.append((n + 2 * pad - reach - 1) // by + 1)
    channels = weight[1] * groups if transposed else weight[0]
    result = [given[0], channels, *positions]
    # Each weight is used at each position: of the result, or, transposed, of the input.
    at = given if transposed else result
    operations = 2 * given[0] * math.prod(at[2:]) * math.prod(weight)
    return operations, math.prod(given) + math.prod(weight) + math.prod(result)


def _convolution_backward(shapes: Shapes, facts: Mapping[str, Any]) -> tuple[int, int]:
    known = facts["Concrete Inputs"]
    gradient, given, weight = shapes[:3]
    at = given if _truth(known[7]) else gradient
    asked = [_truth(each) for each in known[10].strip("[]").split(",")][:2]
    once = 2 * given[0] * math.prod(at[2:]) * math.prod(weight)
    # The gradient of either needs the other, and is as large as it is itself.
    moved = math.prod(gradient) + any(asked) * (math.prod(given) + math.prod(weight))
    if all(asked):
        moved += math.prod(given) + math.prod(weight)
    return once * sum(asked), moved


def _whole(text: str) -> list[int]:
    return [int(n) for n in json.loads(text)]


def _at(values: Sequence[int], index: int) -> int:
    return values[index] if len(values) > 1 else values[0]


def _truth(text: str) -> bool:
    found = {"true": True, "false": False, "1": True, "0": False}[text.strip().lower()]
    return bool(found)
