"""How a layer comes to compute in float8, and back.

Where each process has the whole model, what holds the layer holds torchao's in its place: a new
object with the same parameters. Shards are bound to the object that had the parameter when they
were made, so the layers of a sharded model stay what they are and change their class, which can be
done before or behind the sharding.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any, Protocol, final

from torch import nn

from torchfast.precision.float8_layers import Layer


class Form(Protocol):
    """A layer in two forms."""

    @property
    def module(self) -> nn.Module:
        """What computes in float8."""

    def enter(self) -> None:
        """Let it compute in float8."""

    def leave(self) -> None:
        """Let it be plain."""


@final
class Replaced:
    """Another object stands in the layer's place.

    Args:
        layer: The plain layer, and where it stands.
        new: What torchao has made of it.
    """

    def __init__(self, layer: Layer, new: nn.Module) -> None:
        self._layer, self.module = layer, new
        plain = layer.module
        new.train(plain.training)
        # What the user has put on the layer beside its weight is found on the new one too.
        for key, value in vars(plain).items():
            if key not in vars(new):
                setattr(new, key, value)
        # Copies and pickles hold the plain layer: they need neither torchao nor this device.
        vars(new)["__reduce_ex__"] = partial(_reduced_as_plain, plain, new)

    def enter(self) -> None:
        """Let what holds the plain layer hold the other."""
        self._move(self._layer.module, self.module)

    def leave(self) -> None:
        """The other way round."""
        self._move(self.module, self._layer.module)

    def _move(self, old: nn.Module, new: nn.Module) -> None:
        """Let what holds ``old`` hold ``new``, with the parameters and the mode it has now."""
        new._parameters.update(old._parameters)
        new.training = old.training
        for parent, attribute in self._layer.places:
            # What the user has put in its place meanwhile stays.
            if parent._modules.get(attribute) is old:
                parent._modules[attribute] = new


@final
class InPlace:
    """The same object, of another class.

    Args:
        layer: The plain layer.
        new: What torchao has made of it, whose class and settings it takes.
    """

    def __init__(self, layer: Layer, new: nn.Module) -> None:
        self.module: nn.Module = layer.module
        self._kind = type(new)
        self._settings = {k: v for k, v in vars(new).items() if k not in vars(layer.module)}

    def enter(self) -> None:
        """Take the class of a converted layer."""
        vars(self.module).update(self._settings)
        _change_class(self.module, self._kind)

    def leave(self) -> None:
        """Be an ``nn.Linear`` again."""
        _change_class(self.module, nn.Linear)
        for key in self._settings:
            vars(self.module).pop(key, None)


def _change_class(module: nn.Module, kind: Any) -> None:
    old: Any = type(module)
    # Where the layer is a piece of its own, its class says so.
    is_piece = old.__bases__[0].__name__ == "FSDPModule"
    module.__class__ = _piece_class(old, kind) if is_piece else kind


@cache  # what was compiled for a class, or asks for it, finds the same one again
def _piece_class(old: Any, kind: Any) -> Any:
    """Return the class of pieces of a kind: that of ``fully_shard``, if it has made one."""
    bases = old.__bases__[0], kind
    known = next((c for c in bases[0].__subclasses__() if c.__bases__ == bases), None)
    # It refuses copies, since shards are bound to the object.
    kept = {name: value for name, value in vars(old).items() if name == "__deepcopy__"}
    return known or type(f"FSDP{kind.__name__}", bases, kept)


def _reduced_as_plain(plain: nn.Module, new: nn.Module, protocol: Any) -> Any:
    plain._parameters.update(new._parameters)
    plain.training = new.training
    reduced = plain.__reduce_ex__(protocol)
    # Python's own way to say "a new one of its class" insists on the class of the module copied.
    return object.__new__, (type(plain),), *reduced[2:]
