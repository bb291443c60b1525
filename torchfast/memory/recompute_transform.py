"""Recompute as a plan asks for it: steps aside where it cannot be, and holds the memory budget.

A memory budget is a setting of torch's compiler for the whole process. It counts while the forward
is compiled, so it stands there while this step's loss function is called, and no longer: what else
is compiled in the process is not touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

from torch import nn

from torchfast._core.decisions import Decision
from torchfast.memory.recompute import Recompute, chosen_blocks, why_not
from torchfast.memory.recompute_options import RecomputeOptions, recompute_decision


@final
class RecomputeTransform:
    """Applies recompute to a model that a plan trains.

    Args:
        model: Changed in place by `apply`.
        options: What to recompute.
        is_compiled: Whether the plan compiles on this device.

    Raises:
        ValueError: A path or class that is not in the model.
    """

    needs_factory: str | None = None

    def __init__(self, model: nn.Module, options: RecomputeOptions, *, is_compiled: bool) -> None:
        self._model, self._options = model, options
        self._recompute: Recompute | None = None
        self._aside: str | None = None
        if options.budget is None:
            chosen_blocks(model, options)  # raises now what is not there
        elif not is_compiled:
            self._aside = (
                "a memory budget is the compiler's, and compile='auto' compiles on CUDA devices "
                "only; compile=True does here too"
            )

    def apply(self) -> None:
        """Change the model, unless there is a reason not to."""
        if self._options.budget is not None or self._recompute is not None:
            return
        # Not before: a step that had the model may have let go of it only now.
        self._aside = why_not(self._model, self._options)
        if self._aside is None:
            self._recompute = Recompute(self._model, self._options)

    def decisions(self) -> list[Decision]:
        """Say what is recomputed, or why nothing is."""
        if self._aside is not None:
            return [recompute_decision("stepped aside", f"nothing is recomputed: {self._aside}")]
        if self._options.budget is not None:
            what = f"the compiler recomputes to stay near {self._options.budget:.0%} of the memory"
            detail = f"{what} that what is saved would take"
            return [recompute_decision("applied", detail)]
        return [] if self._recompute is None else self._recompute.decisions()

    def close(self) -> None:
        """Give the model its own forwards back."""
        if self._recompute is not None:
            self._recompute.close()


@contextmanager
def memory_budget(budget: float) -> Iterator[None]:
    """Let what is compiled in the body save no more than a share of what it would.

    Example:
        >>> import torch._functorch.config as config
        >>> with memory_budget(0.5):
        ...     config.activation_memory_budget
        0.5
        >>> config.activation_memory_budget
        1.0
    """
    # Heavy, and needed only where something is compiled.
    import torch._functorch.config as config

    before = config.activation_memory_budget
    config.activation_memory_budget = budget
    try:
        yield
    finally:
        config.activation_memory_budget = before
