"""Objects that stand in a module's own attribute, until they are taken away again.

A module is changed by one attribute of the object: its class, keys, parameter names and ``repr``
stay. Only what stands there now takes itself away, and it puts back what it found.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

from torch import nn


class StandIn:
    """Stands in an attribute of a module, which it does not keep alive.

    A subclass names the attribute, is called in its place, and says in ``__reduce__`` what a copy
    of the module gets. It is active from `install` to `undo`.

    Args:
        module: The module; None if there is none to stand in.
    """

    __slots__ = ("__weakref__", "_before", "_is_active", "_module", "_owner")

    ATTRIBUTE: ClassVar[str]

    def __init__(self, module: nn.Module | None) -> None:
        self._module: Callable[[], nn.Module | None] = (
            weakref.ref(module) if module is not None else _nothing
        )
        self._owner: Callable[[], object] = _nothing
        # Who has wrapped it since calls it also after it was taken away.
        self._is_active = False
        # What the object itself had there, which may be None.
        self._before: tuple[Any, ...] = ()

    def install(self, owner: object) -> None:
        """Take the place, on behalf of an owner that is to give it back."""
        self._owner = weakref.ref(owner)
        self._is_active = True
        module = self._module()
        assert module is not None
        attributes = vars(module)
        there = self.ATTRIBUTE in attributes
        self._before = (attributes[self.ATTRIBUTE],) if there else ()
        attributes[self.ATTRIBUTE] = self

    def undo(self) -> None:
        """Put back what was there, unless something else stands there by now."""
        self._is_active = False
        module = self._module()
        if module is None or not self.is_in_place:
            return
        if self._before:
            vars(module)[self.ATTRIBUTE] = self._before[0]
        else:
            del vars(module)[self.ATTRIBUTE]

    @property
    def module(self) -> nn.Module | None:
        """The module; None if it is gone."""
        return self._module()

    @property
    def behind(self) -> Any:
        """What the object itself had there; None if nothing."""
        return self._before[0] if self._before else None

    @property
    def is_in_place(self) -> bool:
        """Whether it stands where it was put."""
        module = self._module()
        return module is not None and vars(module).get(self.ATTRIBUTE) is self

    @property
    def is_abandoned(self) -> bool:
        """Whether nobody is left who could take it away."""
        return self._owner() is None


class ForwardStandIn(StandIn):
    """Stands as ``forward`` of a module; what stood there before may be another of its kind."""

    __slots__ = ()

    ATTRIBUTE = "forward"

    def _plain(self, *args: Any, **kwargs: Any) -> Any:
        """Run what stands behind."""
        if self._before:
            return self._before[0](*args, **kwargs)
        module: Any = self._module()
        # By the class of now: sharding gives a module another one.
        return type(module).forward(module, *args, **kwargs)

    # A copy of the module computes by its class, or by what the user had put there.
    def __reduce__(self) -> tuple[Any, ...]:
        if self._before:
            return operator.getitem, ([self._before[0]], 0)
        module = self._module()
        return (type(None), ()) if module is None else (getattr, (module, self.ATTRIBUTE))


def _nothing() -> None:
    return None
