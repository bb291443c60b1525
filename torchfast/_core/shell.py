"""What the commands of ``python -m torchfast`` share: exit codes, and how they speak."""

from __future__ import annotations

import math
import sys
from typing import Final

# Exit codes: something is damaged or could not be done; the arguments are wrong.
DAMAGED: Final = 1
WRONG: Final = 2
UNITS: Final = ("B", "kB", "MB", "GB", "TB")


def size(num_bytes: int) -> str:
    """Return a number of bytes for a person."""
    power = min(4, int(math.log(max(num_bytes, 1), 1000)))
    return f"{num_bytes / 1000**power:.4g} {UNITS[power]}"


def say(text: str) -> None:
    """Print a line."""
    sys.stdout.write(f"{text}\n")


def fail(text: str, status: int) -> int:
    """Print a line to the errors, behind what was said before, and return ``status``."""
    sys.stdout.flush()
    sys.stderr.write(f"{text}\n")
    return status
