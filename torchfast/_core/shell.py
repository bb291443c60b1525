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
    """Print a line, or several; what would steer a terminal is printed escaped."""
    sys.stdout.write(_escaped(text, but="\n\t") + "\n")


def fail(text: str, status: int) -> int:
    """Print such a line to the errors, behind what was said before, and return ``status``."""
    sys.stdout.flush()
    sys.stderr.write(_escaped(text, but="\n\t") + "\n")
    return status


def one_line(value: object) -> str:
    """Return what a file says of itself as a part of one line, whatever is written there."""
    return _escaped(str(value), but="")


def _escaped(text: str, *, but: str) -> str:
    if text.isprintable():
        return text
    # A terminal obeys escape sequences, and shows text in another order behind some characters.
    return "".join(c if c.isprintable() or c in but else ascii(c)[1:-1] for c in text)
