"""A block whose parameters lie on the host, and what stands in its forward to bring them.

In ``module.forward`` of the block, and of each module inside that has parameters of its own, stands
a `HostForward`: see `BlockForward` for why there. The outermost call brings the parameters of the
block and puts tensors of the device in their places, until it returns. Calls inside find them
there. A call of a module inside alone, from elsewhere in the model or from a second run that a
backward asks for, brings the block as well. In the forward of the model itself stands a
`ModelForward`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

from torch import Tensor, nn

from torchfast._core.stand_in import ForwardStandIn
from torchfast.memory.brought_parameters import BroughtParameters
from torchfast.memory.resident_blocks import ResidentBlocks


@final
class HostBlock:
    """A block with its parameters on the host.

    Args:
        path: Where it stands in the model.
        module: The block, which is not kept alive.
        engine: What brings them to the device.

    Attributes:
        module: Returns the block; None when it is gone.
        num_active: Calls that are under way.
        num_bytes: Of its parameters, once they were brought.
        is_needed_again: Whether a backward needs its parameters.
    """

    def __init__(self, path: str, module: nn.Module, engine: ResidentBlocks) -> None:
        self.path = path
        self.module = weakref.ref(module)
        self._engine = engine
        self.num_active = self.num_bytes = 0
        self.is_needed_again = False

    def sources(self) -> list[Tensor]:
        """Return the parameters that are on the host, each once."""
        return list({id(parameter): parameter for _, _, parameter in self._places()}.values())

    def run(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a forward with the parameters on the device."""
        engine = self._engine
        resident = engine.begin(self)
        try:
            brought = BroughtParameters(engine, self, resident)
            try:
                with self._in_place(brought.standing), brought.saving():
                    result = forward(*args, **kwargs)
                brought.check_unwritten()
            finally:
                brought.end()
        finally:
            engine.end(self, resident)
        return result

    @contextmanager
    def _in_place(self, standing: dict[int, Tensor]) -> Iterator[None]:
        places = self._places()
        try:
            for module, name, parameter in places:
                module._parameters[name] = standing[id(parameter)]  # type: ignore[assignment]
            yield
        finally:
            for module, name, parameter in places:
                if module._parameters.get(name) is standing[id(parameter)]:
                    module._parameters[name] = parameter
            for module in dict.fromkeys(module for module, _, _ in places):
                if isinstance(module, nn.RNNBase):  # keeps its weights in a list, too
                    module._init_flat_weights()

    def _places(self) -> list[tuple[nn.Module, str, nn.Parameter]]:
        block = self.module()
        if block is None:
            return []
        return [
            (module, name, parameter)
            for module in block.modules()
            for name, parameter in module._parameters.items()
            # Not what stands there during a call, nor what was moved to the device since.
            if isinstance(parameter, nn.Parameter) and parameter.device.type == "cpu"
        ]


@final
class HostForward(ForwardStandIn):
    """Stands as ``forward`` of a block or of a module in it.

    Args:
        module: The module.

    Attributes:
        blocks: The block in which it is; several, where blocks share the module.
    """

    __slots__ = ("blocks",)

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.blocks: list[HostBlock] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward with the block's parameters on the device."""
        if any(block.num_active for block in self.blocks):
            return self._plain(*args, **kwargs)
        return self.blocks[0].run(self._plain, args, kwargs)


@final
class ModelForward(ForwardStandIn):
    """Stands as ``forward`` of a model with such blocks: each call of it is another forward.

    Args:
        module: The model.
        engine: What brings blocks.
    """

    __slots__ = ("_engine",)

    def __init__(self, module: nn.Module, engine: ResidentBlocks) -> None:
        super().__init__(module)
        self._engine = engine

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward with parameters as they are now."""
        self._engine.begin_forward()
        return self._plain(*args, **kwargs)


def host_forward_of(module: nn.Module) -> HostForward | None:
    """Return what stands in a module's way, if it is one of ours."""
    there = vars(module).get(HostForward.ATTRIBUTE)
    while isinstance(there, ForwardStandIn) and not isinstance(there, HostForward):
        there = there.behind
    return there if isinstance(there, HostForward) else None
