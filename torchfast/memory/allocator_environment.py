"""Which environment variable torch takes its allocators' settings from.

There are three, and torch reads one only: ``PYTORCH_CUDA_ALLOC_CONF`` if it is set, though it be
empty; then on ROCm ``PYTORCH_HIP_ALLOC_CONF``; then ``PYTORCH_ALLOC_CONF``, the name that the
documentation gives. So the old name, left over in some shell profile, silently beats the new one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

# Each beats those behind it.
VARIABLES: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_NO_CACHING: Final = "PYTORCH_NO_CUDA_MEMORY_CACHING"


@dataclass(frozen=True, kw_only=True)
class AllocatorEnvironment:
    """What an environment says of the allocators.

    Attributes:
        winner: The variable that torch reads; None if none is set.
        text: What it says.
        ignored: The other variables that are set, with what they say; torch does not read them.
        caching: Whether the allocator is in use at all; ``PYTORCH_NO_CUDA_MEMORY_CACHING`` turns it
            off, and all settings with it.
    """

    winner: str | None
    text: str
    ignored: Mapping[str, str]
    caching: bool = True

    def __str__(self) -> str:
        """Say which variable wins, and over which."""
        if self.winner is None:
            said = "no variable for torch's allocators is set"
        else:
            said = f"{self.winner}={self.text!r} is what torch reads"
        for name, text in self.ignored.items():
            said += f"; {name}={text!r} is ignored, since {self.winner} beats it"
        if not self.caching:
            said += f"; {_NO_CACHING} turns the allocator off, so that no setting counts"
        return said


def read_environment(environ: Mapping[str, str]) -> AllocatorEnvironment:
    """Return which variable of ``environ`` wins, even if it is empty."""
    present = [name for name in VARIABLES if name in environ]
    winner = present[0] if present else None
    return AllocatorEnvironment(
        winner=winner,
        text=environ[winner] if winner else "",
        ignored={name: environ[name] for name in present[1:]},
        caching=_NO_CACHING not in environ,
    )
