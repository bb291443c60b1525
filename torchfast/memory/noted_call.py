"""A call of a layer that a second run leaves out, or feeds with what has been kept.

A linear layer, a convolution or a norm makes its result from its input and its parameters, and
these are also what autograd saves in the call: as they are, seen with other dimensions, or cast
where autocast is on. So the second run has no need of the call: the input stands there again, the
parameters still do, and from them come the tensors that the first run saved, by the same casts.
What else autograd saved, such as the statistics of a norm, is kept.
"""

from __future__ import annotations

from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from torchfast._core.autocast import autocast_as, autocast_state
from torchfast._core.rng import DrawnFrom
from torchfast.memory.caller_mode import is_transformed
from torchfast.memory.deferred import Deferred, Like, Waiting, in_graph
from torchfast.memory.kept_norms import BATCH_NORMS, NORMS
from torchfast.memory.left_out_statistics import LeftOutStatistics
from torchfast.memory.saved_tensor import Saved
from torchfast.memory.second_run import TwiceRun

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, *NORMS, *BATCH_NORMS)
_NAMES = {"weight", "bias"}


def can_be_noted(module: nn.Module, args: Any, kwargs: Any) -> bool:
    """Whether a call is of a layer that is known, with plain tensors."""
    return (
        type(module) in _LAYERS
        and len(args) == 1
        and not kwargs
        and type(args[0]) in (Tensor, Deferred)
        # One that makes its weight of other parameters, by norm or mask, does not read these.
        and _NAMES.issuperset(module._parameters)
        and all(type(p) in (nn.Parameter, Tensor, type(None)) for p in module._parameters.values())
        and not is_transformed()
        and not torch.is_inference_mode_enabled()  # in which no writes are counted
    )


class _Recipe(NamedTuple):
    """How to make what autograd saved: cast one of the sources, look at it with other dimensions.

    Attributes:
        source: Its number: the input is 0, the parameters follow.
        dtype: To cast to; None to take it as it is.
        layout: Shape, stride and offset; None where they are the source's.
    """

    source: int
    dtype: torch.dtype | None
    layout: tuple[torch.Size, tuple[int, ...], int] | None

    def made_from(self, sources: list[Tensor]) -> Tensor:
        source = sources[self.source].detach()
        made = source if self.dtype is None else source.to(self.dtype)
        if self.layout is None:
            return made
        shape, stride, offset = self.layout
        return made.as_strided(shape, stride, made.storage_offset() + offset)


@final
class NotedCall:
    """A call of the first run.

    Args:
        sources: What it is made from: the input, and the parameters; of attention, its inputs.
        result: What it returned.
        position: How many tensors autograd had saved before.
        taken: What autograd saved in it.
        keeps: Whether the result is kept.
        keeps_inputs: Whether all that autograd saved is kept, the inputs too.
        waits: Whether a second run puts what is computed when somebody looks in the result's place.
        is_norm: Whether the block may write to that.
        holds: What other readers of its input have kept of it; None if it is not to be kept.
        drawn: Where the generators stand behind it, if it draws.

    Attributes:
        keeps: Whether the result is kept.
        keeps_inputs: Whether the inputs are.
    """

    __slots__ = (
        "_drawn", "_dtype", "_held", "_is_in_place", "_is_norm", "_like", "_position", "_recipes",
        "_requires_grad", "_result", "_shape", "_stride", "_version", "keeps", "keeps_inputs",
    )  # fmt: skip

    def __init__(
        self,
        sources: list[Tensor],
        result: Tensor,
        position: int,
        taken: list[tuple[Saved, Tensor]],
        *,
        keeps: bool,
        keeps_inputs: bool = False,
        waits: bool = False,
        is_norm: bool = False,
        holds: list[Tensor] | None = None,
        drawn: DrawnFrom | None = None,
    ) -> None:
        self._drawn = drawn
        self._result = result.detach()
        if not keeps:  # the count of writes, and no memory
            self._result.data = result.new_empty(0)
        self.keeps, self.keeps_inputs, self._is_norm = keeps, keeps_inputs, is_norm
        self._version = result._version
        self._like = Like.of(result) if waits else None
        self._requires_grad = result.requires_grad
        self._position = position
        x = sources[0]
        self._shape, self._stride, self._dtype = x.shape, x.stride(), x.dtype
        self._held: Tensor | None = None
        storages = [source.untyped_storage()._cdata for source in sources]
        made = result.untyped_storage()._cdata
        self._is_in_place = made == storages[0]
        self._recipes: list[_Recipe | None] = []
        for saved, tensor in taken:
            # Attention saves what it returns, which can be of the size and dtype of a cast of one.
            is_made = tensor.layout is torch.strided and tensor.untyped_storage()._cdata == made
            recipe = None if is_made or keeps_inputs else _recipe(tensor, sources, storages)
            if recipe is None:
                saved.keep(tensor)
            elif recipe.source == 0 and holds is not None:
                self._held = _shared(tensor, holds)
                saved.keep(self._held)
                recipe = None
            self._recipes.append(recipe)

    @property
    def holds(self) -> bool:
        """Whether what autograd saves of the input is kept."""
        return self._held is not None

    def fits(self, twice: TwiceRun, x: Tensor) -> bool:
        """Whether the second run has come to this call, and nobody has written to what it kept."""
        return (
            twice.position == self._position
            and (self._is_norm or self._result._version == self._version)
            and self._shape == x.shape
            and self._dtype is x.dtype
            and self._stride == x.stride()
        )

    def given(self, twice: TwiceRun, sources: list[Tensor]) -> Tensor:
        """Give autograd's places what they wait for, and return the result."""
        self._give(twice, sources)
        if self._drawn is not None:
            self._drawn.restore()
        if self._is_in_place and type(sources[0]) is Deferred:
            sources[0].become(self._result)
        return self._result.requires_grad_(self._requires_grad)

    def deferred(
        self,
        twice: TwiceRun,
        module: nn.Module,
        x: Tensor,
        run: Any,
        waiting: Waiting | None = None,
    ) -> Deferred:
        """Give autograd's places what they wait for, and return what will be the result.

        Args:
            twice: The second run.
            module: The layer.
            x: Its input.
            run: Calls it.
            waiting: What operations on the result belong to, if they are to wait as well.
        """
        self._give(twice, sources_of(module, x))
        assert self._like is not None
        # Without its cache: what is cast here has no graph, and is nobody else's.
        autocast = autocast_state(x.device.type)[0], False
        fed = self.fed(x)

        def compute() -> Any:
            with autocast_as(autocast):  # whoever looks may have turned it off
                return run(module, fed)

        if waiting is not None:
            made = waiting.deferred(compute, [fed], self._like, is_grad=self._requires_grad)
        elif type(module) in BATCH_NORMS and module.training:
            statistics = LeftOutStatistics(module, compute)
            made = self._made_later(statistics.result)
            for statistic in statistics.stand():
                twice.waits(statistic)
        else:
            made = self._made_later(compute)
        twice.waits(made)
        return made

    def _made_later(self, compute: Any) -> Deferred:
        assert self._like is not None
        if self._requires_grad:
            return in_graph(compute, self._like)
        return Deferred(compute, self._like, requires_grad=False)

    def fed(self, x: Tensor) -> Tensor:
        """Return what is kept of the input in its place."""
        if self._held is None or not self._held.is_contiguous():
            return x
        return self._held.view(x.shape).detach().requires_grad_(x.requires_grad)

    def _give(self, twice: TwiceRun, sources: list[Tensor]) -> None:
        twice.give([None if r is None else r.made_from(sources) for r in self._recipes])


def sources_of(module: nn.Module, x: Tensor) -> list[Tensor]:
    """Return what a layer makes its result from."""
    return [x, *(p for p in module._parameters.values() if p is not None)]


def _shared(tensor: Tensor, holds: list[Tensor]) -> Tensor:
    """Return what another reader of the same norm has kept: equal, so once is enough."""
    like = Like.of(tensor)
    for held in holds:
        if Like.of(held) == like:
            return held
    holds.append(tensor.detach())
    return holds[-1]


def _recipe(saved: Tensor, sources: list[Tensor], storages: list[int]) -> _Recipe | None:
    """Return how to make what was saved in a call; None if that is not known."""
    if type(saved) not in (Tensor, nn.Parameter) or saved.layout is not torch.strided:
        return None
    storage = saved.untyped_storage()
    if storage._cdata in storages:
        there = [n for n, one in enumerate(storages) if one == storage._cdata]
        # Views of one memory, such as the queries and keys of one product: take it as it is seen.
        same = (n for n in there if Like.of(sources[n]) == Like.of(saved))
        at = saved.storage_offset()
        number = next((n for n in same if sources[n].storage_offset() == at), there[0])
        dtype: torch.dtype | None = None
        offset = int(saved.storage_offset() - sources[number].storage_offset())
    else:
        # A cast of the one that has its size, and of nothing else.
        of_its_size = [n for n, one in enumerate(sources) if one.numel() == saved.numel()]
        if len(of_its_size) != 1 or storage.nbytes() != saved.nbytes:
            return None
        number, dtype, offset = of_its_size[0], saved.dtype, int(saved.storage_offset())
        cast = sources[number]
        if dtype is cast.dtype or not cast.is_floating_point() or not _lies_as(saved, cast):
            return None
    source = sources[number]
    if dtype is None and saved.dtype is not source.dtype:
        return None
    if offset == 0 and saved.shape == source.shape and saved.stride() == source.stride():
        return _Recipe(number, dtype, None)
    return _Recipe(number, dtype, (saved.shape, saved.stride(), offset))


def _lies_as(saved: Tensor, source: Tensor) -> bool:
    """Whether all that a cast of one need be is the other: the same elements in the same order.

    Of a size there is more: the statistics of a norm, or a copy that lies in another order.
    """
    shape, stride = saved.shape, saved.stride()
    if shape == source.shape and stride == source.stride():
        return True
    if saved.dim() != 2:
        return False
    if source.dim() == 2:
        return shape == source.shape[::-1] and stride == source.stride()[::-1]
    is_flat = source.dim() > 2 and shape[1] == source.shape[-1]
    return is_flat and saved.is_contiguous() and source.is_contiguous()
