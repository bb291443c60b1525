"""What torch.compile did, as plain values: frames, graph breaks, recompiles, limits, caches."""

from __future__ import annotations

import linecache
import re
from dataclasses import dataclass, field, fields
from typing import Literal, NamedTuple

from torchfast._core.user_code import is_users
from torchfast.compiler.parameters import named
from torchfast.compiler.recompiles import Change

# How the code of regions is named.
REGION = re.compile(r"region_\d+_")
_OURS = re.compile(r"region_(?:update_)?\d+_")

FrameOutcome = Literal["compiled", "no graph", "given up", "limit reached"]


class CodePlace(NamedTuple):
    """A place in somebody's code.

    Attributes:
        name: The function, as its code object is named.
        file: The file.
        line: The line; of a function its first.
    """

    name: str
    file: str
    line: int

    @property
    def text(self) -> str:
        """The text of the line; empty where there is no such file."""
        return linecache.getline(self.file, self.line).strip()

    @property
    def shown(self) -> str:
        """The name, for a person: of a region what it is made of."""
        region = None if is_users(self.file) else _OURS.match(self.name)
        return self.name[region.end() :] if region else self.name

    def __str__(self) -> str:
        if self.shown != self.name:  # the place is torchfast's own, and says nothing
            return self.shown
        return f"{self.name} ({self.file}:{self.line})" if self.name else f"{self.file}:{self.line}"


@dataclass(frozen=True, kw_only=True)
class FrameEvent:
    """One try to compile a function, or the rest of one after a graph break.

    Attributes:
        code: The function. The rest of one after a break bears the name of the function.
        within: The functions that had called it, outermost first, as they are named.
        outcome: ``"compiled"``; ``"no graph"`` where there was nothing to compute;
            ``"given up"``: it runs eagerly; ``"limit reached"``: what fits none of the versions
            compiled so far runs eagerly.
        num_ops: Operations in the graph.
        has_backward: A graph for the backward was compiled along with it.
        seconds: What it took, this try alone.
        reason: Why it was given up; otherwise empty.
        at_break: It was given up at a graph break, which stands among the breaks.
        is_rest: It is the rest of a function after a graph break.
    """

    code: CodePlace
    within: tuple[str, ...] = ()
    outcome: FrameOutcome
    num_ops: int = 0
    has_backward: bool = False
    seconds: float = 0.0
    reason: str = ""
    at_break: bool = False
    is_rest: bool = False


@dataclass(frozen=True, kw_only=True)
class BackwardEvent:
    """A graph for the backward, compiled when the first backward came.

    Attributes:
        code: The function whose backward it is.
        within: The functions that had called it.
        seconds: What it took.
    """

    code: CodePlace
    within: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class GraphBreak:
    """A line at which a graph ended before its function did.

    Attributes:
        place: The line: the innermost one that is neither torch's nor the standard library's.
        within: The functions around it, outermost first.
        kind: A short name of the cause.
        reason: The cause in plain words.
        remedy: What to do about it; empty where there is nothing to do.
        on_purpose: Somebody asked for it, by ``torch.compiler.disable`` or the like.
        gave_up: torch could not go on after it: the whole function runs eagerly.
        times: How often torch came upon it. A function that was inlined into its caller breaks
            its own graph and the caller's.
    """

    place: CodePlace
    within: tuple[str, ...] = ()
    kind: str
    reason: str
    remedy: str
    on_purpose: bool = False
    gave_up: bool = False
    times: int = 1

    def __str__(self) -> str:
        text = f": {self.place.text}" if self.place.text else ""
        fate = "; the whole function runs eagerly" if self.gave_up else ""
        remedy = f". {self.remedy[:1].upper()}{self.remedy[1:]}" if self.remedy else ""
        return f"{self.place.file}:{self.place.line}{text}: {self.reason}{fate}{remedy}"


@dataclass(frozen=True, kw_only=True)
class Recompile:
    """A function compiled again because what it was compiled for has changed.

    Attributes:
        code: The function.
        within: The functions that had called it.
        change: What changed.
        guard: The failed guard as torch gives it.
        seconds: What compiling it again took.
    """

    code: CodePlace
    within: tuple[str, ...] = ()
    change: Change
    guard: str
    seconds: float = 0.0

    @property
    def cause(self) -> str:
        """What changed, and where, without what to do about it."""
        at = f" (used at {self.change.at})" if self.change.at else ""
        return f"{self.code.shown}: {_as_named(self.change, self.code)}{at}"

    def __str__(self) -> str:
        return f"{self.cause}. {_capital(self.change.remedy)}"


@dataclass(frozen=True, kw_only=True)
class LimitReached:
    """A function that torch compiles no more: calls that fit no version of it run eagerly.

    Attributes:
        code: The function.
        within: The functions that had called it.
        limit: The setting, such as ``"recompile_limit (8)"``.
        change: What changed at last; None if torch does not say.
    """

    code: CodePlace
    within: tuple[str, ...] = ()
    limit: str
    change: Change | None

    def __str__(self) -> str:
        if self.change is None:
            return f"{self.code} reached {self.limit} and runs eagerly since"
        last = f": {_as_named(self.change, self.code)}. {_capital(self.change.remedy)}"
        return f"{self.code} reached {self.limit} and runs eagerly since{last}"


@dataclass(frozen=True, kw_only=True)
class CacheUse:
    """How often a compiled graph was found on disk, by torch's counters.

    Attributes:
        autograd_hits: Graphs with their backward that were found as a whole.
        autograd_misses: Those that were not.
        autograd_bypasses: Those that cannot be stored.
        graph_hits: Single graphs of the inductor that were found.
        graph_misses: Those that were not.
        graph_bypasses: Those that cannot be stored.
    """

    autograd_hits: int = 0
    autograd_misses: int = 0
    autograd_bypasses: int = 0
    graph_hits: int = 0
    graph_misses: int = 0
    graph_bypasses: int = 0

    def counts(self) -> dict[str, int]:
        """Return the counts by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(kw_only=True)
class Events:
    """Everything noted so far, in the order in which it happened."""

    frames: list[FrameEvent] = field(default_factory=list)
    backwards: list[BackwardEvent] = field(default_factory=list)
    breaks: list[GraphBreak] = field(default_factory=list)
    recompiles: list[Recompile] = field(default_factory=list)
    limits: list[LimitReached] = field(default_factory=list)
    # Begin and end of each compilation in microseconds, and whether it was of a backward.
    spans: list[tuple[int, int, bool]] = field(default_factory=list)
    is_complete: bool = True


def _as_named(change: Change, code: CodePlace) -> Change:
    return change._replace(source=named(change.source, code.name))


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
