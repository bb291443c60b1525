"""Which parts of a model are compiled, each in one piece.

Whole: the compiler sees everything, also what stands between the blocks, the embedding and, where a
loss function is compiled with the model, the loss. It compiles every block again, though, so the
time that it takes grows with the depth, and a model with hundreds of experts in a Python loop may
never finish.

By blocks: the block that a deep model repeats is compiled once and that code serves all of them.
What stands around them is compiled in pieces where a loss function is given, see
`torchfast.compiler.around`, and runs eagerly otherwise. Loops by hand on an H200, with what stands
around the blocks eager (``benchmarks/results/baseline_h200.json``, "by hand: graph + compile ..."):
GPT-2 took 63.2 ms a step whole and 72.5 by blocks, ViT-B 37.8 and 37.9; they were ready after 13.7
and 4.8 s, and after 20.1 and 6.7. A mixture of 6 layers with 192 experts was ready after 20.9 s by
blocks, and not done in 60 s whole.

``"auto"`` therefore takes whole up to `WHOLE_LIMIT` layers, and blocks beyond.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from torchfast._core.blocks import abbreviated, count_layers, equal_kinds, find_blocks
from torchfast._core.selection import select_modules

# Leaf modules that are compiled whole in reasonable time. GPT-2 of 12 blocks, BERT-base and
# ResNet-50 lie below, in the low hundreds, and take a minute or two; what has several hundred takes
# many minutes, and by blocks no longer than a small one.
WHOLE_LIMIT = 250


@dataclass(frozen=True)
class ChosenKind:
    """Equal modules that share compiled code.

    Attributes:
        class_name: Their class.
        regions: The modules with their paths; ``""`` is the model itself.
    """

    class_name: str
    regions: tuple[tuple[str, nn.Module], ...]

    @property
    def paths(self) -> tuple[str, ...]:
        """Where they stand."""
        return tuple(path for path, _ in self.regions)

    @property
    def names(self) -> str:
        """Where they stand, for a person."""
        return abbreviated(self.paths) if self.paths != ("",) else "the whole model"

    def __str__(self) -> str:
        if self.paths == ("",):
            return f"the whole model ({self.class_name})"
        if len(self.paths) == 1:
            return f"{self.class_name} {self.names}"
        return (
            f"{len(self.paths)} blocks of {self.class_name}, compiled once and reused: {self.names}"
        )


@dataclass(frozen=True)
class RegionChoice:
    """What is compiled, and why that.

    Attributes:
        kinds: What is compiled.
        reason: Why it was chosen, in words.
    """

    kinds: tuple[ChosenKind, ...]
    reason: str

    @property
    def is_whole(self) -> bool:
        """Whether the model is compiled in one piece."""
        return [kind.paths for kind in self.kinds] == [("",)]

    def __str__(self) -> str:
        return f"{'; '.join(map(str, self.kinds))} ({self.reason})"


def choose_regions(model: nn.Module, regions: Any = "auto") -> RegionChoice:
    """Return what to compile of a model.

    Args:
        model: The model; it is not changed.
        regions: What `CompileOptions` accepts.

    Raises:
        ValueError: A path or class that is not in the model, or cannot be called.

    Example:
        >>> blocks = nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 16) for _ in range(3)))
        >>> str(choose_regions(blocks, "blocks"))
        '3 blocks of TransformerEncoderLayer, compiled once and reused: 0 to 2 (by repeated blocks)'
    """
    if regions == "whole":
        return _whole(model, "as asked")
    if regions in ("auto", "blocks"):
        num_layers = count_layers(model)
        if regions == "auto" and num_layers <= WHOLE_LIMIT:
            return _whole(model, f"{num_layers} layers, small enough to be compiled in one piece")
        chosen = _by_blocks(model)
        if chosen is None:
            return _whole(model, "no blocks repeat in it")
        why = f"{num_layers} layers, too many to be compiled in one piece: "
        return RegionChoice(chosen.kinds, (why if regions == "auto" else "") + chosen.reason)
    return _named(model, regions)


def _whole(model: nn.Module, reason: str) -> RegionChoice:
    return RegionChoice((ChosenKind(type(model).__name__, (("", model),)),), reason)


def _by_blocks(model: nn.Module) -> RegionChoice | None:
    groups = find_blocks(model)
    if not groups:
        return None
    modules = dict(model.named_modules(remove_duplicate=False))
    kinds = tuple(
        ChosenKind(group.class_name, tuple((path, modules[path]) for path in group.paths))
        for group in groups
    )
    nested = dict.fromkeys(name for group in groups for name in group.nested)
    inside = f", with the {', '.join(nested)} inside them" if nested else ""
    return RegionChoice(kinds, f"by repeated blocks{inside}")


def _named(model: nn.Module, regions: tuple[Any, ...]) -> RegionChoice:
    outermost, inside = select_modules(model, regions, "regions")
    kinds = tuple(
        ChosenKind(type(members[0][1]).__name__, tuple(members))
        for members in equal_kinds(outermost.items())
    )
    note = f", {abbreviated(inside)} as parts of what they stand in" if inside else ""
    return RegionChoice(kinds, f"as named{note}")
