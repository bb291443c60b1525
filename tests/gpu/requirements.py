"""Say which CUDA devices a test needs.

::

    from gpu.requirements import requires


    @requires(gpus=2, sm=90)
    def test_two_hopper_gpus(): ...

A test in this folder that says nothing needs one GPU. ``conftest.py`` skips what the machine cannot
run. It looks at the machine when the first test is about to run, not at import, so collecting tests
does not initialise CUDA.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pytest
import torch


@dataclass(frozen=True, kw_only=True)
class Devices:
    """CUDA devices: how many, and of which compute capability at least (80 is 8.0)."""

    gpus: int = 1
    sm: int = 0


def requires(*, gpus: int = 1, sm: int = 0) -> pytest.MarkDecorator:
    """Mark a test, class or module (``pytestmark``) with the CUDA devices that it needs.

    Args:
        gpus: How many.
        sm: The lowest compute capability of each, as in ``sm_90``; 0 for any.
    """
    return pytest.mark.requires(gpus=gpus, sm=sm)


def required_by(marks: Iterable[pytest.Mark]) -> Devices:
    """Return the devices that satisfy all marks of a test together; one GPU if it has none."""
    needs = [Devices(**mark.kwargs) for mark in marks] or [Devices()]
    return Devices(gpus=max(need.gpus for need in needs), sm=max(need.sm for need in needs))


def lacking(needed: Devices, present: Sequence[int]) -> str | None:
    """Return why devices of the given compute capabilities are not enough, None if they are."""
    kind = f" of sm_{needed.sm} or later" if needed.sm else ""
    if sum(sm >= needed.sm for sm in present) >= needed.gpus:
        return None
    found = ", ".join(f"sm_{sm}" for sm in present) or "none"
    return f"needs {needed.gpus} CUDA device(s){kind}; this machine has {found}"


@functools.cache
def present_devices() -> tuple[int, ...]:
    """Return the compute capability of each CUDA device of this machine; initialises CUDA."""
    if not torch.cuda.is_available():
        return ()
    capabilities = map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))
    return tuple(10 * major + minor for major, minor in capabilities)
