"""What the arguments of a region are called, for a person.

A region's code takes whatever it is called with as ``args``, so torch says ``args[0]`` of what the
user's forward calls ``batch``.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

# By the name of a region's code, which is given once.
_NAMES: dict[str, list[str]] = {}


def note_parameters(code_name: str, function: Callable[..., Any]) -> None:
    """Note what a region's code calls, with the arguments that it is given."""
    try:
        parameters = [*inspect.signature(function).parameters.values()]
    except (TypeError, ValueError):  # of a function that is not written in Python
        return
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    _NAMES[code_name] = [p.name for p in parameters if p.kind in kinds]


def named(source: str, code_name: str) -> str:
    """Return torch's expression for a value with the name that the user's function has for it.

    Example:
        >>> note_parameters("region_0_loss", lambda model, batch: None)
        >>> named("args[1]['ids']", "region_0_loss")
        "batch['ids']"
    """
    found = re.match(r"args\[(\d+)\]", source)
    names = _NAMES.get(code_name, [])
    if found is None or int(found[1]) >= len(names):
        return source
    return names[int(found[1])] + source[found.end() :]
