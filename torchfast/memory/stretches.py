"""The stretches of a block: the calls of its leaves, and what it does between one and the next.

A leaf is a module without children. Its calls go through a function for as long as one looks, by an
attribute ``forward`` of each that is gone afterwards.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, final

from torch import Tensor, nn

from torchfast._core.compiled_code import is_wrapped_by_torch
from torchfast.memory.caller_mode import (
    AtCalls,
    has_compiled,
    inputs_of,
    is_attention,
    is_transformed,
    queries_keys_values,
)
from torchfast.memory.kept_inputs import Inputs, InputWatch
from torchfast.memory.kept_norms import Norm, NormWatch


class Stretch(NamedTuple):
    """A part of a block's run.

    Attributes:
        leaf: The path in the block of the leaf that was called last; ``""`` before the first one.
        number: Of that call, among those of this leaf.
        is_inside: Whether that call is under way.
    """

    leaf: str = ""
    number: int = 0
    is_inside: bool = False


def leaves_of(block: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a block that have no children, by path; none if it has compiled parts.

    What has a ``forward`` of its own is left as it is.
    """
    leaves = {}
    for path, module in block.named_modules():
        parts = vars(module).values()
        if module._compiled_call_impl is not None or any(map(is_wrapped_by_torch, parts)):
            return {}
        if path and not module._modules and "forward" not in vars(module):
            leaves[path] = module
    return leaves


@contextmanager
def in_the_way(
    leaves: dict[str, nn.Module], around: Callable[[str, nn.Module, Any, Any, Any], Any]
) -> Iterator[None]:
    """Let calls of leaves, on this thread, go through a function."""
    thread = threading.get_ident()

    def standing_in(path: str, module: nn.Module) -> Callable[..., Any]:
        # By the class of now: sharding gives a module another one.
        run: Any = type(module).forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return run(module, *args, **kwargs)
            return around(path, module, run, args, kwargs)

        return forward

    changed = []
    try:
        for path, module in leaves.items():
            attributes = vars(module)
            if "forward" not in attributes:
                attributes["forward"] = standing_in(path, module)
                changed.append(attributes)
        yield
    finally:
        for attributes in changed:
            attributes.pop("forward", None)


@final
class Stretches:
    """Notes the stretches of a call.

    Attributes:
        now: The one that is under way.
        order: All so far.
        is_in_attention: Whether a call of torch's attention is under way.
    """

    def __init__(self) -> None:
        self.now = Stretch()
        self.order = [self.now]
        self._numbers: dict[str, int] = {}
        self._norms = NormWatch(batch_norms=not has_compiled())
        self._inputs = InputWatch()
        self.is_in_attention = False

    def saves(self, tensor: Tensor, storages: dict[int, int]) -> None:
        """Note what autograd saves now."""
        self._norms.saves(self.now, storages)
        self._inputs.saves(tensor, storages, may_save=self.is_in_attention)

    def runs(self, tensors: list[Tensor]) -> None:
        """Note what an operation reads that runs now."""
        self._norms.runs(self.now, tensors)

    def ran(self, func: Any, tensors: list[Tensor], out: list[Tensor]) -> None:
        """Note an operation, what it read and what it made."""
        self._inputs.ran(
            func, tensors, out, may_read=self.is_in_attention, may_wait=not self.now.is_inside
        )

    def norms(self, num_waited: int, returned: Collection[int]) -> list[Norm]:
        """Return the norms that can be left out; see `NormWatch.found`."""
        return self._norms.found(num_waited, returned)

    def inputs(self) -> list[Inputs]:
        """Return the inputs of attention that can be kept."""
        return self._inputs.found()

    @contextmanager
    def noting(self, block: nn.Module) -> Iterator[None]:
        """Note those of the call in the body."""
        leaves = leaves_of(block)
        looks = bool(leaves) and not has_compiled()
        with (
            in_the_way(leaves, self._around),
            AtCalls(self._at_call) if looks else nullcontext(),
        ):
            yield

    def _at_call(self, func: Any, args: Any, kwargs: Any) -> Any:
        if is_transformed():
            return func(*args, **kwargs)
        if is_attention(func):
            return self._at_attention(func, args, kwargs)
        if self.now.is_inside or not args or type(args[0]) is not Tensor:
            return func(*args, **kwargs)
        self._norms.activates(self.now, args[0])
        result = func(*args, **kwargs)
        self._norms.activated(args[0], result)
        return result

    def _at_attention(self, func: Any, args: Any, kwargs: Any) -> Any:
        inputs = inputs_of(args, kwargs)
        self.is_in_attention = inputs is not None
        self._inputs.enters(self.now, queries_keys_values(args, kwargs))
        try:
            result = func(*args, **kwargs)
            if inputs is not None:
                self._inputs.leaves(inputs, result)
            return result
        finally:
            self.is_in_attention = False

    def _around(self, path: str, module: nn.Module, run: Any, args: Any, kwargs: Any) -> Any:
        number = self._numbers.get(path, 0)
        self._numbers[path] = number + 1
        inside = Stretch(path, number, is_inside=True)
        self._is_in(inside)
        if is_transformed():
            result = run(module, *args, **kwargs)
        else:
            self._norms.enters(inside, module, args)
            result = run(module, *args, **kwargs)
            self._norms.returned(inside, module, args, result)
            self._inputs.returned(inside, module, args, result)
        self._is_in(Stretch(path, number))
        return result

    def _is_in(self, stretch: Stretch) -> None:
        self.now = stretch
        self.order.append(stretch)
