"""A call of a layer whose result is kept, and which a second run leaves out.

A linear layer or a convolution makes its result from its input and its weight, and these are also
what autograd saves in the call: as they are, seen with other dimensions, or cast where autocast is
on. So the second run has no need of the call: the input stands there again, the weight still does,
and from them come the tensors that the first run saved, by the same casts. What else autograd saved
is kept.
"""

from __future__ import annotations

from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from torchfast.memory.second_run import Saved, TwiceRun

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def can_be_noted(module: nn.Module, args: Any, kwargs: Any) -> bool:
    """Whether a call is of a layer that is known, with plain tensors."""
    return (
        type(module) in _LAYERS
        and len(args) == 1
        and not kwargs
        and type(args[0]) is Tensor
        and type(module.weight) in (nn.Parameter, Tensor)
        and torch._C._functorch.peek_interpreter_stack() is None
    )


class _Layout(NamedTuple):
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> _Layout:
        return cls(tensor.shape, tensor.stride(), tensor.dtype)


class _Recipe(NamedTuple):
    """How to make what autograd saved: cast one of the sources, look at it with other dimensions.

    Attributes:
        is_weight: Whether it is of the weight; else of the input.
        dtype: To cast to; None to take it as it is.
        layout: Shape, stride and offset; None where they are the source's.
    """

    is_weight: bool
    dtype: torch.dtype | None
    layout: tuple[torch.Size, tuple[int, ...], int] | None

    def made_from(self, source: Tensor) -> Tensor:
        made = source.detach() if self.dtype is None else source.detach().to(self.dtype)
        if self.layout is None:
            return made
        shape, stride, offset = self.layout
        return made.as_strided(shape, stride, made.storage_offset() + offset)


@final
class NotedCall:
    """A call of the first run.

    Args:
        result: What it returned.
        x: Its input.
        weight: Of the layer.
        position: How many tensors autograd had saved before.
        taken: What autograd saved in it.
    """

    __slots__ = ("_layouts", "_position", "_recipes", "_requires_grad", "_result", "_version")

    def __init__(
        self,
        result: Tensor,
        x: Tensor,
        weight: Tensor,
        position: int,
        taken: list[tuple[Saved, Tensor]],
    ) -> None:
        self._result, self._requires_grad = result.detach(), result.requires_grad
        self._version = result._version
        self._position = position
        self._layouts = _Layout.of(x), _Layout.of(weight)
        self._recipes = [_recipe(tensor, x, weight) for _, tensor in taken]
        for (saved, tensor), recipe in zip(taken, self._recipes, strict=True):
            if recipe is None:
                saved.kept = tensor.detach()

    def fits(self, twice: TwiceRun, x: Tensor, weight: Tensor) -> bool:
        """Whether the second run has come to this call, and nobody has written to its result."""
        return (
            twice.position == self._position
            and self._result._version == self._version
            and self._layouts == (_Layout.of(x), _Layout.of(weight))
        )

    def given(self, twice: TwiceRun, x: Tensor, weight: Tensor) -> Tensor:
        """Give autograd's places what they wait for, and return the result."""
        twice.give(
            [
                None if recipe is None else recipe.made_from(weight if recipe.is_weight else x)
                for recipe in self._recipes
            ]
        )
        return self._result.requires_grad_(self._requires_grad)


def _recipe(saved: Tensor, x: Tensor, weight: Tensor) -> _Recipe | None:
    """Return how to make what was saved in a call; None if that is not known."""
    if type(saved) not in (Tensor, nn.Parameter) or saved.layout is not torch.strided:
        return None
    storage = saved.untyped_storage()
    for is_weight, source, other in ((False, x, weight), (True, weight, x)):
        if saved.dtype is source.dtype:
            if storage._cdata != source.untyped_storage()._cdata:
                continue
            dtype, offset = None, int(saved.storage_offset() - source.storage_offset())
        # A cast of this one, by its size, and of nothing else.
        elif saved.numel() == source.numel() != other.numel() and source.is_floating_point():
            if storage.nbytes() != saved.nbytes:
                continue
            dtype, offset = saved.dtype, int(saved.storage_offset())
        else:
            continue
        if offset == 0 and saved.shape == source.shape and saved.stride() == source.stride():
            return _Recipe(is_weight, dtype, None)
        return _Recipe(is_weight, dtype, (saved.shape, saved.stride(), offset))
    return None
