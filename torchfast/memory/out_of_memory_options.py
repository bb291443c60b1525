"""What a user can say about a step that does not fit into memory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import ClassVar, Literal, cast, final

from torchfast._core.arguments import check_choice, check_flag, check_int, explain_init_keywords
from torchfast._core.errors import PlanError
from torchfast._core.option_fields import call_of, changed_fields, refuse_unused

Action = Literal["raise", "split"]


@final
@explain_init_keywords
@dataclass(frozen=True, kw_only=True)
class OutOfMemoryOptions:
    """What to do about a step that does not fit into memory.

    Args:
        action: ``"raise"``: an `OutOfMemoryError` with an account. ``"split"``: do the step again
            with its micro-batches in parts, and raise only if that is of no use. Under
            ``Plan(shard=...)`` all ranks do, when one has run out.
        max_parts: Most parts of a micro-batch.
        lines: Have torch note which line allocates each block, so that the account can tell lines
            and modules. Some microseconds for each allocation of an eager step.
        snapshot: A folder for a file that pytorch.org/memory_viz shows; None writes none. Torch
            then keeps a history of allocations with their lines, at the same cost, and the last
            ``history`` of them in host memory, some kilobytes each. Three files at most.
        history: Allocations and frees that the snapshot reaches back.

    Raises:
        PlanError: Unknown action.

    Example:
        >>> OutOfMemoryOptions(action="split", max_parts=8)
        OutOfMemoryOptions(action='split', max_parts=8)
    """

    action: Action = "raise"
    max_parts: int = 64
    lines: bool = False
    snapshot: str | None = None
    history: int = 20_000

    ACTIONS: ClassVar[tuple[str, ...]] = ("raise", "split")

    def __post_init__(self) -> None:
        check_choice("out_of_memory", self.action, self.ACTIONS, PlanError)
        check_int("max_parts", self.max_parts, minimum=2)
        check_flag("lines", self.lines)
        check_int("history", self.history, minimum=1)
        if self.action != "split":
            refuse_unused(self, ("max_parts",), "action='split'")
        if self.snapshot is None:
            refuse_unused(self, ("history",), "snapshot")
            return
        if not isinstance(self.snapshot, str | os.PathLike):
            raise TypeError(
                "snapshot must be a folder, or None for no file, got "
                f"{self.snapshot!r} ({type(self.snapshot).__name__})"
            )
        object.__setattr__(self, "snapshot", os.fspath(self.snapshot))

    @classmethod
    def of(cls, value: object) -> OutOfMemoryOptions:
        """Return options from the scalar form ``"split"`` or from options."""
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            return cls(action=cast(Action, value))
        raise TypeError(
            f"out_of_memory must be one of {list(cls.ACTIONS)} or OutOfMemoryOptions, "
            f"got {value!r} ({type(value).__name__})"
        )

    @property
    def changed(self) -> dict[str, object]:
        """The options that are not as by default."""
        return changed_fields(self)

    def __repr__(self) -> str:
        """Return the call that makes these options, defaults left out."""
        return call_of(self, self.changed)
