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


def torchao_module(name: str, wanted_by: str, *needed: str) -> Any:
    """Return a module of torchao.

    Args:
        name: Such as ``"torchao.float8"``.
        wanted_by: What needs it, for the error.
        needed: The names that are used of it, of which the private ones may go with any release.

    Raises:
        ImportError: torchao is not there, is too old or too new, or cannot be imported.
    """
    remedy = f"pip install 'torchao>={'.'.join(map(str, OLDEST))}'"
    try:
        package = importlib.import_module("torchao")
    except Exception as error:  # built for another torch, it may fail in any way
        raise ImportError(
            f"{wanted_by} needs torchao, which cannot be imported here ({error}); {remedy}"
        ) from error
    version = str(getattr(package, "__version__", "0"))
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if found < OLDEST:
        raise ImportError(f"{wanted_by} needs another torchao than {version}; {remedy}")
    try:
        module = importlib.import_module(name)
    except Exception as error:
        raise ImportError(
            f"{wanted_by} needs {name}, which torchao {version} does not have for this torch, as "
            f"it is too old or too new ({error}); {remedy}"
        ) from error
    for each in needed:
        if not hasattr(module, each):
            raise ImportError(
                f"{wanted_by} needs {name}.{each}, which torchao {version} does not have for this "
                f"torch, as it is too old or too new; {remedy}"
            )
    return module
