"""How a layer comes to compute in float8, and back.

It stays the object that it is and changes its class, between ``nn.Linear`` and torchao's with our
forward. So what is bound to the object stays with it, whenever it was put there: its parameters and
buffers, hooks of any kind, attributes, the shards that were made of it, and whoever holds it
besides its parent.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable
from functools import cache, partial
from typing import Any, Final, final

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from torchfast.precision.float8_layers import is_float8

# In the attributes of a layer that is in float8: its form, and whether an autocast is around it.
_FORM: Final = "_torchfast_form"
UNDER_AUTOCAST: Final = "_torchfast_under_autocast"


@final
class Form:
    """A layer in two forms. While it is in float8 the layer itself holds it, whoever else does.

    Args:
        name: The layer's name in the model.
        plain: The layer as it is.
        converted: What torchao has made of it, whose class and settings it takes.
        under_autocast: Whether it trains under autocast, so that it is left in fp32 where not.
    """

    def __init__(
        self, name: str, plain: nn.Linear, converted: nn.Module, *, under_autocast: bool
    ) -> None:
        self.name = name
        self.was_in_fp32 = False  # in a forward of training
        self.module: nn.Module = plain
        self._kind = type(converted)
        self._settings = {k: v for k, v in vars(converted).items() if k not in vars(plain)}
        # Copies and pickles are plain layers: they need neither torchao nor this device.
        self._settings |= {_FORM: self, UNDER_AUTOCAST: under_autocast}
        names = frozenset((*self._settings, "__reduce_ex__", "__deepcopy__"))
        self._settings["__reduce_ex__"] = partial(_reduced_as_plain, plain, names)
        # Parametrized later its class has a way of its own, which would take all of these along.
        self._settings["__deepcopy__"] = partial(_copied_as_plain, plain, names)
        # Either class by the other: what was compiled for one finds it again.
        self._other: dict[type, type] = {}

    @property
    def is_in(self) -> bool:
        """Whether the layer computes in float8 by this form."""
        return form_of(self.module) is self

    def enter(self) -> None:
        """Compute in float8."""
        if not is_float8(self.module):
            vars(self.module).update(self._settings)
            self._become(self._kind)

    def leave(self) -> None:
        """Be an ``nn.Linear`` again."""
        if is_float8(self.module):
            self._become(nn.Linear)
        for key in self._settings:
            vars(self.module).pop(key, None)

    def _become(self, kind: type) -> None:
        old = type(self.module)
        if old not in self._other:
            new = _with_base(self.module, kind)
            self._other.update({old: new, new: old})
        self.module.__class__ = self._other[old]


def leave_with(owner: object, forms: Iterable[Form]) -> None:
    """Have layers be plain again when their owner is dropped without having seen to it.

    None of them is kept alive by it: the model may hold its owner.
    """
    references = [weakref.ref(form) for form in forms]
    # At the end of the process there is nobody left to see it.
    weakref.finalize(owner, _leave, references).atexit = False


def _leave(references: list[weakref.ref[Form]]) -> None:
    for reference in references:
        form = reference()
        if form is not None and form.is_in:  # not another owner's by now
            form.leave()


def form_of(module: nn.Module) -> Form | None:
    """Return the form by which a layer computes in float8; None for others, and for torchao's."""
    form: Form | None = vars(module).get(_FORM)
    return form


def _with_base(module: nn.Module, kind: Any) -> Any:
    """Return a layer's class with another kind of layer below what was built on it."""
    old: Any = type(module)
    if _is_piece(old):
        return _piece_class(old, kind)
    if is_parametrized(module):  # since it became what it is: a class of its own, with properties
        return type(f"Parametrized{kind.__name__}", (kind,), dict(vars(old)))
    return kind


@cache  # what was compiled for a class, or asks for it, finds the same one again
def _piece_class(old: Any, kind: Any) -> Any:
    """Return the class of pieces of a kind: that of ``fully_shard``, if it has made one."""
    bases = old.__bases__[0], kind
    known = next((c for c in bases[0].__subclasses__() if c.__bases__ == bases), None)
    # It refuses copies, since shards are bound to the object.
    kept = {name: value for name, value in vars(old).items() if name == "__deepcopy__"}
    return known or type(f"FSDP{kind.__name__}", bases, kept)


def _is_piece(kind: type) -> bool:
    """Whether ``fully_shard`` has made the class of a layer."""
    return len(kind.__bases__) > 1 and kind.__bases__[0].__name__ == "FSDPModule"


def _copied_as_plain(module: nn.Module, names: frozenset[str], memo: dict[int, Any]) -> Any:
    old: Any = type(module)
    if _is_piece(old):
        return old.__deepcopy__(module, memo)  # which says that shards are not copied
    memo[id(module)] = copied = object.__new__(_with_base(module, nn.Linear))
    state = {name: value for name, value in vars(module).items() if name not in names}
    vars(copied).update(copy.deepcopy(state, memo))
    return copied


def _reduced_as_plain(module: nn.Module, names: frozenset[str], _: Any) -> Any:
    state = {name: value for name, value in vars(module).items() if name not in names}
    # Python's own way to say "a new one of its class" insists on the class of the module copied.
    return object.__new__, (nn.Linear,), state
