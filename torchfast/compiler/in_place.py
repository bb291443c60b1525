"""Modules compiled where they stand.

A module is called by ``module(x)``, which looks for ``module._compiled_call_impl`` first. There
stands a `Region`: one attribute of the object, which torch leaves out of copies and files. The
object, its class, keys, hooks and ``repr`` stay, and `Region.undo` takes the attribute away, or
puts back what ``module.compile()`` had left there. What it runs is a `RegionKind`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, final

import torch
from torch import nn

from torchfast._core.stand_in import StandIn
from torchfast.compiler.copied import called_in, leave_copies_alone

if TYPE_CHECKING:
    from torchfast.compiler.region_kind import RegionKind

State: TypeAlias = Literal["not called", "compiled", "compiled as a part of what calls it", "eager"]
AS_A_PART: State = "compiled as a part of what calls it"


@final
class Region(StandIn):
    """A module that is compiled where it stands; it does not keep the module alive.

    Args:
        path: Where it stands, ``""`` for the model itself.
        module: The module; None if it only keeps the state of a function.
        kind: Whose code it shares.

    Attributes:
        state: ``"not called"``, or how the last call ran: ``"compiled"`` or ``"eager"``. A module
            that is a part of something larger that was compiled is not called itself.
    """

    __slots__ = ("kind", "path", "state")

    ATTRIBUTE = "_compiled_call_impl"

    def __init__(self, path: str, module: nn.Module | None, kind: RegionKind) -> None:
        super().__init__(module)
        self.path = path
        self.kind = kind
        self.state: State = "not called"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        module: Any = self._module()
        if torch.compiler.is_dynamo_compiling():
            # As a part of something larger it is compiled with that.
            leave_copies_alone()
            return module._call_impl(*args, **kwargs)
        called = called_in(sys._getframe(1), module)
        if called is module and not torch.compiler.is_compiling():
            return self.kind.run(self, module, args, kwargs)
        if called is not module:
            self.kind.note_copy()
        return called._call_impl(*args, **kwargs)

    @property
    def was_compiled_by_user(self) -> bool:
        """Whether ``module.compile()`` had been called before; that is set aside."""
        return bool(self._before) and self._before[0] is not None

    @property
    def status(self) -> str:
        """``"not called"``, ``"compiled"`` or ``"eager: "`` and why."""
        why = self.why_eager
        return self.state if why is None else f"eager: {why}"

    @property
    def why_eager(self) -> str | None:
        """Why it runs eagerly, at this moment or in its last call; None if it does not."""
        kind = self.kind
        if kind.eager_because is not None:
            return kind.eager_because
        if self.state == "eager":
            return kind.eager_for_now or "; ".join(kind.remarks)
        # Compiled code that nobody gets to run: no call may have come since.
        return kind.why_bypassed if self.is_compiled else None

    @property
    def is_compiled(self) -> bool:
        """Whether it has been compiled, by itself or as a part of what calls it."""
        return self.state in ("compiled", AS_A_PART)

    # Copies of a module that take all its attributes along would call this one's parameters.
    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def region_of(module: nn.Module) -> Region | None:
    """Return the region that stands in a module's way, if it is one of ours."""
    there = vars(module).get(Region.ATTRIBUTE)
    return there if isinstance(there, Region) else None


def note_part(module: nn.Module) -> None:
    """Note that a module was compiled as a part of what calls it."""
    region = region_of(module)
    # A shallow copy has the region of the module that it is of.
    if region is not None and region.module is module and region.state == "not called":
        region.state = AS_A_PART


def is_region(module: nn.Module) -> bool:
    """Whether a module is a region."""
    return region_of(module) is not None
