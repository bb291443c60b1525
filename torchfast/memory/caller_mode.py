"""Attention and ReLUs, seen where they are called and not where they are computed.

A dispatch mode sees each operation below autograd, which costs more host time than the operation.
A function mode sees the call of ``scaled_dot_product_attention`` or ``relu`` itself, at a fifth of
that for each call beside it. It stands only between two layers, and only as long as nothing has
been compiled in this process: the compiler looks at function modes, and would compile anew for
them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from torchfast.memory.deferred import Deferred

_NAMES = ("query", "key", "value")
_RELUS = frozenset((F.relu, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_))


def has_compiled() -> bool:
    """Whether torch has compiled anything in this process, or nobody can tell."""
    frames = sys.modules.get("torch._dynamo.convert_frame")
    return frames is not None and getattr(frames, "FRAME_COUNTER", 1) != 0


def is_transformed() -> bool:
    """Whether ``vmap`` or another of torch's transforms of functions is under way.

    What a layer gets there is a view on several tensors, and has no memory of its own to know.
    """
    return torch._C._functorch.peek_interpreter_stack() is not None


@final
class AtCalls(TorchFunctionMode):
    """Lets calls of attention and ReLU in its body go through a function with their arguments."""

    def __init__(self, around: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()
        self._around = around

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_attention(func) or func in _RELUS:
            return self._around(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def is_attention(func: Any) -> bool:
    """Whether a function is torch's attention."""
    return func is F.scaled_dot_product_attention


def inputs_of(args: Any, kwargs: Any) -> list[Tensor] | None:
    """Return the tensors that attention is called with; None if some are of other classes."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    is_known = tensors and all(type(tensor) in (Tensor, Deferred) for tensor in tensors)
    return tensors if is_known else None


def queries_keys_values(args: Any, kwargs: Any) -> list[Tensor] | None:
    """Return the three tensors that attention is called with at least; None if not as such."""
    given = [*args[:3], *(kwargs.get(name) for name in _NAMES[len(args) :])]
    return given if all(type(tensor) is Tensor for tensor in given) else None


def is_in_parts(inputs: list[Tensor], result: Tensor, saved_bytes: int) -> bool:
    """Whether attention was computed in parts, of which each saves something, by what it saved."""
    return saved_bytes > sum(tensor.nbytes for tensor in inputs) + 2 * result.nbytes


def draws(args: Any, kwargs: Any) -> bool:
    """Whether attention draws random numbers."""
    dropout = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
    return bool(dropout != 0)
