"""Ways of compiling a model that a search can choose from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, final

import torch

from torchfast.compiler.receipts import Status

Undo = Callable[[], object]


class ModeChoice(NamedTuple):
    """A way of compiling, by the names of its options; None for eager."""

    name: str
    mode: str | None
    regions: str | None


def mode_choices(
    device: torch.device, *, has_blocks: bool, outer_graph: bool = False
) -> list[ModeChoice]:
    """Return the ways worth trying, eager first and the cheapest to compile before the others.

    Args:
        device: Where the model runs.
        has_blocks: Whether it has repeated blocks.
        outer_graph: Whether the step is captured into a CUDA graph anyway, so that the modes that
            make graphs of their own are out of place.

    Example:
        >>> import torch
        >>> [c.name for c in mode_choices(torch.device("cpu"), has_blocks=False)]
        ['eager', 'whole: default', 'whole: max-autotune-no-cudagraphs']
    """
    regions = ["blocks", "whole"] if has_blocks else ["whole"]
    pairs = [(mode, r) for mode in ("default", "max-autotune-no-cudagraphs") for r in regions]
    if device.type == "cuda" and not outer_graph:
        pairs.insert(len(regions), ("reduce-overhead", "whole"))
        pairs.append(("max-autotune", "whole"))
    return [
        ModeChoice("eager", None, None),
        *(ModeChoice(f"{region}: {mode}", mode, region) for mode, region in pairs),
    ]


class OutError(Exception):
    """A candidate is out, for a reason.

    Args:
        status: What became of it.
        reason: Why, in words.
    """

    def __init__(self, status: Status, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


@final
@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A way to run the model.

    Attributes:
        name: Its name, such as ``"blocks: default"``.
        apply: Puts it in force and returns what takes it back, which must not raise. It is called
            many times: what was compiled the first time has to be used again. If it raises,
            nothing is in force. It should compile nothing itself: no time limit interrupts it.
        failure: Asked once it has run: why it is not what its name says, such as that nothing was
            compiled; None if it is. Raises `OutError` where that is no failure of its own.
    """

    name: str
    apply: Callable[[], Undo]
    failure: Callable[[], str | None] = lambda: None

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Have it in force for a while."""
        undo = self.apply()
        try:
            yield
        finally:
            undo()
