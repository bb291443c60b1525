"""Repeated blocks of a model: what is worth compiling, recomputing or sharding by the piece.

A deep model is the same block over and over: the layers of a transformer, the residual blocks of a
ResNet, the experts of a mixture. `find_blocks` finds them by what they are and not by their names:
modules of one class that stand side by side in a ``ModuleList``, ``Sequential`` or ``ModuleDict``.
Blocks are *equal* if they also have the same submodules, the same shapes and dtypes of parameters
and buffers, and the same plain attributes (a dropout rate, a number of heads, an epsilon). Equal
blocks form a group. An int that only counts the blocks, such as ``layer_idx``, does not split a
group; the group says that it is there.

Where lists stand within lists, the outermost list in which equal blocks repeat is the one: the
layers of a mixture and not the experts inside each. A list whose members all differ, such as the
stages of a Swin transformer, is passed through to the blocks inside. Only if there are none are its
members taken, each a group of its own.

Not blocks: single layers of ``torch.nn`` (a list of ``Linear``) and of classes derived from them,
which are too small to be handled by the piece, and lists themselves, which cannot be called.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

_Key: TypeAlias = tuple[Any, ...]

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
# Attributes whose value steers the forward; others, such as a config, are taken to be shared.
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype)
# `layer_idx`, `layer_id`, `block_index`, `layer_number`, `i`: not `dilation` nor `num_heads`.
_COUNTER = re.compile(r"(^|_)(idx|index|id|number|i)$")


@dataclass(frozen=True, kw_only=True)
class BlockGroup:
    """Equal blocks of a model.

    Attributes:
        class_name: The class of the blocks.
        paths: Where they stand, in the order of ``named_modules``.
        counters: Int attributes that only count the blocks, such as ``"layer_idx"``.
        num_uses: Places at which they stand; more than the paths where one object stands at
            several places.
        nested: Classes of the repeated blocks inside each block, which are part of it.
    """

    class_name: str
    paths: tuple[str, ...]
    counters: tuple[str, ...] = ()
    num_uses: int = 0
    nested: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the group in words."""
        number = f"{len(self.paths)} blocks of" if len(self.paths) > 1 else "one"
        return f"{number} {self.class_name}: {abbreviated(self.paths)}"


def find_blocks(model: nn.Module) -> tuple[BlockGroup, ...]:
    """Return the groups of equal blocks, in the order of their first members.

    Args:
        model: Any module; it is not changed.

    Returns:
        No group if nothing repeats.

    Example:
        >>> block = lambda: nn.TransformerEncoderLayer(8, 2, 16)
        >>> [str(group) for group in find_blocks(nn.Sequential(block(), block(), block()))]
        ['3 blocks of TransformerEncoderLayer: 0 to 2']
    """
    found = _blocks_within(model, "")
    groups: dict[_Key, _Members] = {}
    seen: dict[int, _Members] = {}
    for siblings in found:
        for key, counters, members in _equal(siblings):
            group = groups.setdefault(key, _Members([], counters))
            for path, module in members:
                owner = seen.setdefault(id(module), group)
                owner.num_uses += 1
                if all(module is not known for _, known in owner.blocks):
                    owner.blocks.append((path, module))
    return tuple(
        BlockGroup(
            class_name=type(group.blocks[0][1]).__name__,
            paths=tuple(path for path, _ in group.blocks),
            counters=group.counters,
            num_uses=group.num_uses,
            nested=_nested(group.blocks[0][1]),
        )
        for group in groups.values()
        if group.blocks
    )


def count_layers(model: nn.Module) -> int:
    """Return the number of leaf modules, those that stand at several places counted each time."""
    modules = model.named_modules(remove_duplicate=False)
    return sum(1 for _, module in modules if not module._modules)


def equal_kinds(blocks: Iterable[tuple[str, nn.Module]]) -> list[list[tuple[str, nn.Module]]]:
    """Return modules, each with its path, by kind: those of one list are equal."""
    kinds: dict[_Key, list[tuple[str, nn.Module]]] = {}
    for key, _, members in _equal(list(blocks)):
        kinds.setdefault(key, []).extend(members)
    return list(kinds.values())


def abbreviated(paths: Iterable[str]) -> str:
    """Return paths for a person: runs of numbers as first and last.

    Example:
        >>> abbreviated(["h.0", "h.1", "h.2", "tail"])
        'h.0 to h.2, tail'
    """
    runs: list[list[str]] = []
    for path in paths:
        if runs and _follows(runs[-1][-1], path):
            runs[-1].append(path)
        else:
            runs.append([path])
    words = [
        run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(run)
        for run in runs
    ]
    return ", ".join(words) if len(words) <= 6 else f"{', '.join(words[:5])}, ..., {words[-1]}"


@dataclass
class _Members:
    blocks: list[tuple[str, nn.Module]]
    counters: tuple[str, ...]
    num_uses: int = 0


def _blocks_within(module: nn.Module, path: str) -> list[list[tuple[str, nn.Module]]]:
    """Return the blocks below a module, by the list in which they stand."""
    children = [
        (_join(path, name), child) for name, child in module._modules.items() if child is not None
    ]
    candidates = [(p, m) for p, m in children if _may_be_block(m)]
    similar: list[tuple[str, nn.Module]] = []
    if isinstance(module, _LISTS):
        repeated = {
            type(members[0][1])
            for _, _, members in _equal(candidates)
            if len(members) > 1 and not _is_passed_through(members[0][1])
        }
        if repeated:
            taken = [(p, m) for p, m in candidates if type(m) in repeated]
            rest = [(p, m) for p, m in children if type(m) not in repeated]
            return [taken, *(b for p, m in rest for b in _blocks_within(m, p))]
        classes = [type(m) for _, m in candidates]
        similar = [(p, m) for p, m in candidates if classes.count(type(m)) > 1]
    inside = [blocks for p, m in children for blocks in _blocks_within(m, p)]
    if inside or not similar:
        return inside
    return [similar]


def _is_passed_through(module: nn.Module) -> bool:
    """Whether a block is only a chain of blocks, which are then the finer choice."""
    return type(module) is nn.Sequential and bool(_blocks_within(module, ""))


def _may_be_block(module: nn.Module) -> bool:
    """Whether it can be called and is more than one layer of torch's."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return False
    # One derived from torch's is a single layer as well: float8 and shards change the class.
    kinds = [kind for kind in type(module).__mro__ if issubclass(kind, nn.Module)]
    is_layer_of_torch = any(_is_torch_own(kind) for kind in kinds if kind is not nn.Module)
    return bool(module._modules) or not is_layer_of_torch


def _is_torch_own(kind: type) -> bool:
    own = kind.__module__
    return own == "torch.nn" or own.startswith("torch.nn.")


def _equal(
    siblings: list[tuple[str, nn.Module]],
) -> Iterator[tuple[_Key, tuple[str, ...], list[tuple[str, nn.Module]]]]:
    """Yield equal ones among siblings: what they have in common, their counters, and themselves."""
    by_structure: dict[_Key, list[tuple[int, str, nn.Module, dict[str, int]]]] = {}
    for position, (path, module) in enumerate(siblings):
        counted: dict[str, int] = {}
        key = _structure(module, "", counted)
        by_structure.setdefault(key, []).append((position, path, module, counted))
    for key, members in by_structure.items():
        # One object at several places has one value.
        unique = list({id(m): (p, c) for p, _, m, c in reversed(members)}.values())
        counters = {
            name
            for name in members[0][3]
            if len(unique) > 1 and _counts([(p, counted[name]) for p, counted in unique])
        }
        parts: dict[_Key, list[tuple[str, nn.Module]]] = {}
        for _, path, module, counted in members:
            others = tuple(v for name, v in counted.items() if name not in counters)
            parts.setdefault((key, others), []).append((path, module))
        names = tuple(sorted({name.rpartition(".")[2] for name in counters}))
        for whole_key, equal in parts.items():
            yield whole_key, names, equal


def _counts(pairs: list[tuple[int, int]]) -> bool:
    """Whether values grow with the position, by one for each."""
    return len({value - position for position, value in pairs}) == 1


def _structure(module: nn.Module, prefix: str, counted: dict[str, int]) -> _Key:
    """Return what blocks must have in common, hashable; ints that may count go to ``counted``."""
    plain: list[tuple[str, Any]] = []
    for name, value in vars(module).items():
        if name == "training" or name.startswith("_"):
            continue
        if type(value) is int and _COUNTER.search(name):
            counted[f"{prefix}{name}"] = value
            continue
        plain.append((name, _comparable(value)))
    tensors = [
        (name, None if t is None else (tuple(_shape(t)), t.dtype))
        for table in (module._parameters, module._buffers)
        for name, t in table.items()
    ]
    children = [
        (name, None if child is None else _structure(child, f"{prefix}{name}.", counted))
        for name, child in module._modules.items()
    ]
    return type(module), tuple(plain), tuple(tensors), tuple(children)


def _shape(tensor: torch.Tensor) -> Iterable[int]:
    # Lazy parameters have no shape yet.
    return () if isinstance(tensor, nn.UninitializedParameter) else tensor.shape


def _comparable(value: Any) -> Any:
    """Return something that is equal where attributes steer the forward alike."""
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, tuple | list):
        return type(value), tuple(_comparable(v) for v in value)
    if callable(value) and hasattr(value, "__code__"):
        return value.__code__
    return type(value)


def _nested(block: nn.Module) -> tuple[str, ...]:
    inside = _blocks_within(block, "")
    return tuple(dict.fromkeys(type(m).__name__ for blocks in inside for _, m in blocks))


def _follows(path: str, other: str) -> bool:
    (start, _, number), (other_start, _, other_number) = (
        path.rpartition("."),
        other.rpartition("."),
    )
    return (
        start == other_start
        and number.isdecimal()
        and other_number.isdecimal()
        and int(other_number) == int(number) + 1
    )


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
