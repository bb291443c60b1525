"""What a user can say about compilation."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch import nn

from torchfast._core.arguments import (
    check_choice,
    check_flag,
    check_folder,
    check_positive,
    explain_init_keywords,
)
from torchfast._core.decisions import Decision, Outcome
from torchfast._core.errors import PlanError
from torchfast._core.option_fields import call_of, changed_fields, json_ready
from torchfast._core.selection import checked_regions

Mode: TypeAlias = Literal[
    "default", "max-autotune-no-cudagraphs", "reduce-overhead", "max-autotune", "auto"
]
Regions: TypeAlias = (
    Literal["auto", "blocks", "whole"] | tuple[str | type[nn.Module], ...] | list[Any]
)

# Where things are kept, and what becomes of a failure: what is kept is found again without.
WHERE_AND_IF = frozenset(("cache", "on_failure"))
# And how long one waits, of which compiled code knows nothing, but a measurement does.
HOW_LONG = frozenset(("timeout_s", "budget_s"))

MODES = ("default", "max-autotune-no-cudagraphs", "reduce-overhead", "max-autotune", "auto")
_REGION_WORDS = ("auto", "blocks", "whole")


def compile_decision(outcome: Outcome, detail: str) -> Decision:
    """Return what became of the lever, as a value."""
    return Decision(lever="compile", outcome=outcome, detail=detail)


@explain_init_keywords
@dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """How a model is compiled.

    Args:
        mode: What the compiler optimises for, as in ``torch.compile``. ``"auto"`` measures
            ways of compiling and takes the fastest: under a plan on the first batch, and otherwise
            in `CompiledModule.search`.
        regions: ``"blocks"`` compiles the repeated blocks, each kind once, and under a plan what
            stands around them, in pieces; ``"whole"`` the model in one piece; ``"auto"`` takes
            whole for models that are small enough. Or name them: paths, in which ``*`` stands for
            one name (``("layers.*",)``), and module classes.
        dynamic: As in ``torch.compile``: ``None`` compiles for the sizes seen, and for any size
            where a size changes.
        fullgraph: A graph break is an error, whatever ``on_failure`` says.
        backend: As in ``torch.compile``; a mode has a meaning for ``"inductor"`` only.
        on_failure: ``"eager"`` runs what cannot be compiled as it is, with one warning;
            ``"raise"`` raises `CompileError`.
        timeout_s: Longest time that one call may spend on compiling one kind of region, which
            then runs eagerly; ``math.inf`` for no limit.
        cache: Folder in which what was compiled, and what was measured, is kept for later runs.
        mark_dynamic: After a recompilation because of a size, compile for any size of that
            dimension. Of use with ``dynamic=False``: torch does it by itself otherwise.
        budget_s: Longest time that the search of ``mode="auto"`` may take.
        update: Under a plan, compile the optimizer's update too, in one graph: True, or ``"auto"``
            to keep it where it is measured to be faster. A fused update stays as it is.

    Raises:
        PlanError: A choice that does not exist, or a mode for a backend that has none.

    Example:
        >>> CompileOptions(regions="blocks", fullgraph=True)
        CompileOptions(regions='blocks', fullgraph=True)
    """

    mode: Mode = "default"
    regions: Regions = "auto"
    dynamic: bool | None = None
    fullgraph: bool = False
    backend: str | Callable[..., Any] = "inductor"
    on_failure: Literal["eager", "raise"] = "eager"
    timeout_s: float = 300.0
    cache: str | os.PathLike[str] | None = None
    mark_dynamic: bool = False
    budget_s: float = 600.0
    update: bool | Literal["auto"] = False

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, MODES, PlanError)
        regions = checked_regions(self.regions, _REGION_WORDS, "compile=False")
        object.__setattr__(self, "regions", regions)
        if self.dynamic is not None and not isinstance(self.dynamic, bool):
            raise TypeError(
                "dynamic must be True or False, or None for the sizes seen and any where one "
                f"varies, got {self.dynamic!r} ({type(self.dynamic).__name__})"
            )
        check_flag("fullgraph", self.fullgraph)
        if not isinstance(self.backend, str) and not callable(self.backend):
            raise TypeError(
                "backend must be the name of a torch.compile backend or a callable "
                f"(graph, inputs) -> callable, got {self.backend!r}"
            )
        if self.mode != "default" and self.backend != "inductor":
            raise PlanError(
                f"mode={self.mode!r} has a meaning for backend='inductor' only, "
                f"got backend={self.backend!r}; leave one of them out"
            )
        check_choice("on_failure", self.on_failure, ("eager", "raise"), PlanError)
        check_positive("timeout_s", self.timeout_s)
        if self.cache is not None:
            if not isinstance(self.cache, str | os.PathLike):
                raise TypeError(f"cache must be the path of a folder or None, got {self.cache!r}")
            object.__setattr__(self, "cache", check_folder("cache", self.cache, "cache"))
        check_flag("mark_dynamic", self.mark_dynamic)
        check_positive("budget_s", self.budget_s)
        if not isinstance(self.update, bool) and self.update != "auto":
            raise TypeError(f"update must be True, False or 'auto', got {self.update!r}")

    @property
    def changed(self) -> dict[str, object]:
        """The options that are not as by default, JSON-ready: classes and callables by name."""
        return self.changed_without(frozenset())

    def changed_without(self, names: frozenset[str]) -> dict[str, object]:
        """What is `changed`, but for some options."""
        fields = changed_fields(self)
        return {name: json_ready(fields[name]) for name in fields if name not in names}

    def __repr__(self) -> str:
        """Return the call that makes these options, defaults left out."""
        return call_of(self, changed_fields(self))
