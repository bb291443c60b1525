"""Modules of a model that a user has named, by paths and by classes."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from torchfast._core.arguments import suggestion
from torchfast._core.blocks import find_blocks
from torchfast._core.errors import PlanError

_MOST_NAMED = 5
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a whole name of a path


def checked_regions(value: Any, words: Sequence[str], nothing: str, option: str = "regions") -> Any:
    """Return regions as options hold them: a word, or a tuple of paths and module classes.

    Args:
        value: What the user gave.
        words: The words that stand for a selection.
        nothing: What to write instead of an empty selection.
        option: What it is called, for errors.

    Raises:
        PlanError: A word that has no meaning, or no region at all.
        TypeError: Something else.
    """
    if isinstance(value, str):
        if value not in words:
            raise PlanError(
                f"{option} must be one of {list(words)} or a tuple of paths and module classes, "
                f"got {value!r}{suggestion(value, words)}; for one path write ({value!r},)"
            )
        return value
    if not isinstance(value, tuple | list):
        raise TypeError(
            f"{option} must be one of {list(words)} or a tuple of paths and module classes, "
            f"got {value!r} ({type(value).__name__})"
        )
    for item in value:
        is_class = inspect.isclass(item) and issubclass(item, nn.Module)
        if not is_class and not isinstance(item, str):
            raise TypeError(
                f"{option} must hold paths such as 'layers.*' and subclasses of torch.nn.Module, "
                f"got {item!r} ({type(item).__name__})"
            )
    if not value:
        raise PlanError(f"{option} must name at least one region, got none; use {nothing}")
    return tuple(value)


def select_modules(
    model: nn.Module, selection: Iterable[Any], option: str
) -> tuple[dict[str, nn.Module], list[str]]:
    """Return the outermost modules that a selection names, and the paths of those inside them.

    Args:
        model: Where they stand.
        selection: Paths, in which ``*`` stands for one name, and module classes. A single name
            that is no path is that of a class, as a plan in JSON has it.
        option: What the selection is called, for errors.

    Raises:
        ValueError: A path or class that is not in the model, or cannot be called.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        >>> list(select_modules(model, (nn.Linear,), "regions")[0])
        ['0', '2']
    """
    modules = dict(model.named_modules())
    chosen: set[str] = set()
    for item in selection:
        if isinstance(item, str):
            chosen.update(_matches(modules, item, option))
        else:
            chosen.update(_instances(modules, item, option))
    ordered = {path: module for path, module in modules.items() if path in chosen}
    outermost = {path: m for path, m in ordered.items() if not _has_ancestor(path, ordered)}
    return outermost, [path for path in ordered if path not in outermost]


def named_blocks(model: nn.Module, regions: Any, option: str) -> list[tuple[str, nn.Module]]:
    """Return the modules that regions name, with their paths.

    Args:
        model: Where they stand.
        regions: ``"blocks"``, those that the model repeats, if any; or paths and module classes.
        option: What the selection is called, for errors.

    Raises:
        ValueError: A path or class that is not in the model, or cannot be called.
    """
    if regions != "blocks":
        return list(select_modules(model, regions, option)[0].items())
    paths = {path for group in find_blocks(model) for path in group.paths}
    return [(path, module) for path, module in model.named_modules() if path in paths]


def _instances(modules: dict[str, nn.Module], cls: type[nn.Module], option: str) -> list[str]:
    found = [path for path, module in modules.items() if isinstance(module, cls)]
    if not found:
        parts = [module for path, module in modules.items() if path and not _is_list(module)]
        known = list(dict.fromkeys(type(module).__name__ for module in parts))
        raise ValueError(
            f"{option} names the class {cls.__name__}, of which the model has no module"
            f"{_nearest(cls.__name__, known)}"
        )
    return _that_run(modules, found, f"the class {cls.__name__}", option)


def _matches(modules: dict[str, nn.Module], pattern: str, option: str) -> list[str]:
    found = [path for path in modules if path and _fits(path, pattern)]
    if not found and (found := _of_class(modules, pattern)):
        return _that_run(modules, found, f"the class {pattern}", option)
    if not found:
        known = [path for path, module in modules.items() if path and not _is_list(module)]
        if "*" in pattern:
            known = list(dict.fromkeys(_NUMBER.sub("*", path) for path in known))
        raise ValueError(
            f"{option} names {pattern!r}, which no module of the model matches"
            f"{_nearest(pattern, known)}"
        )
    lists = [path for path in found if _is_list(modules[path])]
    if lists:
        raise ValueError(
            f"{option} names {lists[0]!r}, a {type(modules[lists[0]]).__name__}, which cannot be "
            f"called; its members can: {lists[0] + '.*'!r}"
        )
    return found


def _that_run(
    modules: dict[str, nn.Module], found: list[str], named: str, option: str
) -> list[str]:
    """Return those that can be called."""
    lists = [path for path in found if _is_list(modules[path])]
    if len(lists) == len(found):
        at, members = (repr(lists[0]), f"{lists[0]}.*") if lists[0] else ("itself", "*")
        raise ValueError(
            f"{option} names {named}, of which the model has {at}, which cannot be called; its "
            f"members can: {members!r}"
        )
    return [path for path in found if path not in lists]


def _is_list(module: nn.Module) -> bool:
    """Whether a module only holds others, and cannot be called."""
    if not isinstance(module, nn.ModuleList | nn.ModuleDict):
        return False
    forward: Any = type(module).forward
    return forward is nn.Module.forward  # of a class of its own it may be one that runs


def _of_class(modules: dict[str, nn.Module], name: str) -> list[str]:
    return [p for p, m in modules.items() if any(c.__name__ == name for c in type(m).__mro__)]


def _fits(path: str, pattern: str) -> bool:
    # `*` stands for one name: `blocks.*` is each block and nothing inside.
    names, patterns = path.split("."), pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatchcase, names, patterns))


def _has_ancestor(path: str, others: dict[str, nn.Module]) -> bool:
    if "" in others:
        return path != ""
    parts = path.split(".")
    return any(".".join(parts[:n]) in others for n in range(1, len(parts)))


def _nearest(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, n=3, cutoff=0.4)
    if near:
        return f"; did you mean {' or '.join(map(repr, near))}?"
    more = ", ..." if len(known) > _MOST_NAMED else ""
    return f"; there are {', '.join(map(repr, known[:_MOST_NAMED]))}{more}" if known else ""
