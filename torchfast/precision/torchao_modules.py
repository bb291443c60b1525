"""torchao, imported when a plan first asks for what it has.

`import torchfast` must be free, and torchao's import takes seconds. So it is imported here and
nowhere else, by the constructors that need it. What is trained with it needs it no longer: weights
and their keys are plain, and so is the state of `LowBitAdamW` in a file.
"""

from __future__ import annotations

import importlib
import re
from typing import Any, Final

OLDEST: Final = (0, 17)


def torchao_module(name: str, wanted_by: str) -> Any:
    """Return a module of torchao.

    Args:
        name: Such as ``"torchao.float8"``.
        wanted_by: What needs it, for the error.

    Raises:
        ImportError: torchao is not there, is too old, or cannot be imported.
    """
    remedy = f"pip install 'torchao>={'.'.join(map(str, OLDEST))}'"
    try:
        package = importlib.import_module("torchao")
    except ImportError as error:
        raise ImportError(
            f"{wanted_by} needs torchao, which cannot be imported here ({error}); {remedy}"
        ) from error
    version = str(getattr(package, "__version__", "0"))
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if found < OLDEST:
        raise ImportError(f"{wanted_by} needs another torchao than {version}; {remedy}")
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"{wanted_by} needs {name}, which torchao {version} does not have for this torch "
            f"({error}); {remedy}"
        ) from error
