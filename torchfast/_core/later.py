"""Names of a package that are imported when somebody asks for them.

Importing torchfast is to take next to nothing. What most programs never use (tools that measure and
diagnose) is imported by the first access to its name.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def later(
    package: dict[str, Any], homes: Mapping[str, Sequence[str]], modules: Sequence[str] = ()
) -> Callable[[str], Any]:
    """Return a package's ``__getattr__``.

    Args:
        package: Its ``globals()``, where each name is kept once it was asked for.
        homes: The names, by the module that has them.
        modules: Its own modules that are reached by their names, such as ``torchfast.losses``.
    """
    module_of = {name: module for module, names in homes.items() for name in names}

    def get(name: str) -> Any:
        if name in modules:
            return importlib.import_module(f"{package['__name__']}.{name}")
        if name not in module_of:
            raise AttributeError(f"module {package['__name__']!r} has no attribute {name!r}")
        value = package[name] = getattr(importlib.import_module(module_of[name]), name)
        return value

    return get
