"""Marking a dimension of a batch as one that changes.

torch compiles for the sizes that it meets. At the second size of a dimension it compiles anew with
that dimension dynamic, unless it was told not to (``dynamic=False``); a mark on the tensor tells it
from the first batch on. The mark is an attribute of the tensor object: it has to be put on each
batch, before the call, outside of compiled code.

A dimension whose size is 0 or 1 is not marked: torch compiles those sizes apart without a word, and
the mark would do nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor


class DynamicDimension(NamedTuple):
    """A dimension that changed.

    Attributes:
        source: The tensor, as an expression over the arguments: ``"batch['ids']"``.
        dimension: Which of its dimensions.
    """

    source: str
    dimension: int


def mark_dimension(tensor: Tensor, dimension: int) -> bool:
    """Mark one dimension of a tensor that a compiled function is given as dynamic.

    Returns:
        Whether it was marked: False if there is no such dimension, or if its size is 0 or 1, which
        torch compiles apart anyway.

    Example:
        >>> import torch
        >>> mark_dimension(torch.zeros(8, 16), 0)
        True
        >>> mark_dimension(torch.zeros(1, 16), 0)
        False
    """
    from torch._dynamo import maybe_mark_dynamic

    if not 0 <= dimension < tensor.dim() or tensor.shape[dimension] < 2:
        return False
    # The weak mark: where the code itself needs a fixed size it is compiled for that size, which
    # the strong one makes an error.
    maybe_mark_dynamic(tensor, dimension)
    return True


def argument(arguments: Mapping[str, Any], source: str) -> Tensor | None:
    """Return a tensor in the arguments of a compiled function; None if there is none such.

    Args:
        arguments: The arguments by name, as the compiled function names them; what it takes as
            ``*args`` is one entry, the tuple.
        source: The tensor, as a recompile names it: ``"batch['ids']"``, ``"args[0]"``.
    """
    found = _resolved(arguments, source)
    return found if isinstance(found, Tensor) else None


def _resolved(arguments: Mapping[str, Any], source: str) -> Any:
    """Return what an expression of names, attributes and constant subscripts stands for."""
    try:
        return _value(ast.parse(source, mode="eval").body, arguments)
    except (SyntaxError, LookupError, AttributeError, TypeError):
        return None  # another function's argument, or a batch of another structure


def _value(node: ast.expr, arguments: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return arguments[node.id]
    if isinstance(node, ast.Attribute):
        return getattr(_value(node.value, arguments), node.attr)
    if isinstance(node, ast.Subscript):
        return _value(node.value, arguments)[ast.literal_eval(node.slice)]
    raise TypeError  # no path to a tensor; `argument` answers None
