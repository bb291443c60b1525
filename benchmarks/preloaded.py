"""What the processes of a sweep have in common, imported once, before they are forked.

transformers imports torchao if it is there, and torchao touches CUDA at its import, after which no
fork can use the device. Nothing that is swept needs torchao, so it is hidden for the moment.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

NAMES = ("torch._dynamo", "timm", "transformers.modeling_utils", "benchmarks.sweep_processes")
HIDDEN = "torchao"


@contextmanager
def hidden(name: str) -> Iterator[None]:
    """Let a package look as if it were not installed, unless it is imported already."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]


with hidden(HIDDEN):
    for _name in NAMES:
        with suppress(ImportError):  # whoever needs it says so
            importlib.import_module(_name)
