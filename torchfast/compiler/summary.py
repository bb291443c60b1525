"""What was compiled, summed up: for a person, for a log, and for a report of decisions."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from torchfast._core.decisions import Decision, Outcome
from torchfast.compiler.events import (
    REGION,
    BackwardEvent,
    CacheUse,
    FrameEvent,
    GraphBreak,
    LimitReached,
    Recompile,
)

_SHOWN = 5  # of each kind in the text; all of them stand in `to_dict`


@dataclass(frozen=True, kw_only=True)
class CompileSummary:
    """What torch.compile did while a `CompileRecord` listened.

    Attributes:
        frames: Each try to compile a function, or the rest of one after a break.
        backwards: Graphs of backwards that were compiled when the first backward came.
        graph_breaks: The lines at which graphs ended, each once.
        recompiles: Functions compiled again, with what had changed.
        limits: Functions that torch compiles no more.
        caches: Graphs found on disk; None for one function, as torch counts for the process.
        forward_s: Seconds spent on forwards, what was compiled along with them included.
        backward_s: Seconds spent on backwards that were compiled later.
        is_complete: False if more was compiled at once than torch remembers.
    """

    frames: tuple[FrameEvent, ...] = ()
    backwards: tuple[BackwardEvent, ...] = ()
    graph_breaks: tuple[GraphBreak, ...] = ()
    recompiles: tuple[Recompile, ...] = ()
    limits: tuple[LimitReached, ...] = ()
    caches: CacheUse | None = None
    forward_s: float = 0.0
    backward_s: float = 0.0
    is_complete: bool = True

    @property
    def num_graphs(self) -> int:
        """Graphs of forwards that were compiled."""
        return sum(frame.outcome == "compiled" for frame in self.frames)

    @property
    def num_backward_graphs(self) -> int:
        """Graphs of backwards, those compiled along with their forward included.

        Of the latter only those of the inductor are known.
        """
        return len(self.backwards) + sum(frame.has_backward for frame in self.frames)

    @property
    def is_compiled(self) -> bool:
        """Whether anything was compiled at all."""
        return self.num_graphs > 0

    @property
    def total_s(self) -> float:
        """Seconds that compiling took, those that overlapped counted once."""
        return self.forward_s + self.backward_s

    @property
    def given_up(self) -> tuple[FrameEvent, ...]:
        """Functions that run eagerly because torch could not compile them."""
        return tuple(frame for frame in self.frames if frame.outcome == "given up")

    @property
    def unwanted_breaks(self) -> tuple[GraphBreak, ...]:
        """The graph breaks that nobody asked for."""
        return tuple(found for found in self.graph_breaks if not found.on_purpose)

    def of(self, name: str) -> CompileSummary:
        """Return what belongs to one function: itself, and what it called when it was compiled.

        Args:
            name: The ``co_name`` of its code object.
        """
        frames = tuple(e for e in self.frames if _belongs(e, name))
        backwards = tuple(e for e in self.backwards if _belongs(e, name))
        return CompileSummary(
            frames=frames,
            backwards=backwards,
            graph_breaks=tuple(
                e for e in self.graph_breaks if _is_of(e.within, e.place.name, name)
            ),
            recompiles=tuple(e for e in self.recompiles if _belongs(e, name)),
            limits=tuple(e for e in self.limits if _belongs(e, name)),
            forward_s=sum(e.seconds for e in frames),
            backward_s=sum(e.seconds for e in backwards),
            is_complete=self.is_complete,
        )

    def by_code(self) -> dict[str, CompileSummary]:
        """Return a summary for each function that torch tried, by the name of its code object."""
        return {name: self.of(name) for name in dict.fromkeys(e.code.name for e in self.frames)}

    @property
    def headline(self) -> str:
        """One line; it says "compiled" only of what was."""
        if not self.is_compiled:
            if not self.frames:
                return "nothing was compiled: torch.compile was not asked, or torch skipped it"
            reasons = [frame.reason for frame in self.frames if frame.reason]
            reason = reasons[0] if reasons else "no graph had an operation in it"
            return f"nothing was compiled: {reason}"
        parts = [f"{_count(self.num_graphs, 'graph')} compiled"]
        if self.num_backward_graphs:
            parts.append(f"{self.num_backward_graphs} for the backward")
        parts.append(f"{self.total_s:.1f} s")
        if self.caches and (self.caches.graph_hits or self.caches.autograd_hits):
            parts.append(f"{max(self.caches.graph_hits, self.caches.autograd_hits)} from the cache")
        parts += [
            _count(number, word)
            for number, word in (
                (len(self.unwanted_breaks), "graph break"),
                (len(self.recompiles), "recompile"),
                (len(self.given_up), "function given up"),
                (len(self.limits), "function at the recompile limit"),
            )
            if number
        ]
        return ", ".join(parts)

    def counters(self) -> dict[str, int | float]:
        """Return the numbers, for a log."""
        numbers: dict[str, int | float] = {
            "graphs": self.num_graphs,
            "backward_graphs": self.num_backward_graphs,
            "graph_breaks": len(self.unwanted_breaks),
            "graph_breaks_on_purpose": len(self.graph_breaks) - len(self.unwanted_breaks),
            "recompiles": len(self.recompiles),
            "recompile_limits": len(self.limits),
            "functions_given_up": len(self.given_up),
            "compile_s": round(self.total_s, 3),
        }
        if self.caches is not None:
            numbers |= {f"cache_{name}": value for name, value in self.caches.counts().items()}
        return numbers

    def decisions(self, lever: str = "compile") -> list[Decision]:
        """Return what happened as decisions, those that need attention as stepped aside.

        Args:
            lever: The name under which they stand in the report.
        """
        if not self.frames:
            return [Decision(lever=lever, outcome="left alone", detail=self.headline)]
        outcome: Outcome = "applied" if self.is_compiled else "stepped aside"
        made = [Decision(lever=lever, outcome=outcome, detail=self.headline)]
        wanted = [found for found in self.graph_breaks if found.on_purpose]
        failed = [frame for frame in self.given_up if not frame.at_break]
        for values, aside in (
            (self.unwanted_breaks, True),
            (wanted, False),
            ([f"{e.code} runs eagerly: {e.reason}" for e in failed], True),
            (_joined(self.recompiles), False),
            (self.limits, True),
        ):
            made += [
                Decision(
                    lever=lever,
                    outcome="stepped aside" if aside else "applied",
                    detail=f"{_title(value)}{value}",
                )
                for value in values
            ]
        return made

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as JSON-ready builtins."""
        values: dict[str, Any] = {
            field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)
        }
        for found, event in zip(values["graph_breaks"], self.graph_breaks, strict=True):
            found["place"]["text"] = event.place.text
        return {"headline": self.headline, "counters": self.counters(), **values}

    def __str__(self) -> str:
        lines = [f"torch.compile: {self.headline}"]
        for title, values in (
            ("graph breaks", self.unwanted_breaks),
            ("graph breaks on purpose", [e for e in self.graph_breaks if e.on_purpose]),
            ("recompiles", _joined(self.recompiles)),
            ("recompile limit", self.limits),
            ("given up", [f"{e.code}: {e.reason}" for e in self.given_up]),
        ):
            if values:
                lines.append(f"  {title}:")
                lines += [f"    {value}" for value in values[:_SHOWN]]
            if len(values) > _SHOWN:
                lines.append(f"    and {len(values) - _SHOWN} more")
        if self.caches is not None and any(self.caches.counts().values()):
            uses = self.caches
            lines.append(
                f"  cache: {uses.graph_hits} graphs found, {uses.graph_misses} not; with their "
                f"backward {uses.autograd_hits} found, {uses.autograd_misses} not, "
                f"{uses.autograd_bypasses} cannot be stored"
            )
        if not self.is_complete:
            lines.append("  more was compiled at once than torch remembers; some of it is missing")
        return "\n".join(lines)


def _belongs(event: FrameEvent | BackwardEvent | Recompile | LimitReached, name: str) -> bool:
    return _is_of(event.within, event.code.name, name)


def _is_of(within: tuple[str, ...], own: str, name: str) -> bool:
    """Whether something belongs to a function; of regions within regions, to the innermost."""
    names = [*within, own]
    if REGION.match(name):
        names = [other for other in names if REGION.match(other)][-1:]
    return name in names


def _joined(recompiles: tuple[Recompile, ...]) -> list[str]:
    """Return recompiles as text, those of one function and one cause as one line."""
    groups: dict[tuple[object, ...], list[Recompile]] = {}
    for event in recompiles:
        change = event.change
        cause = (event.code[:2], change.kind, change.source, change.dimension, change.remedy)
        groups.setdefault(cause, []).append(event)
    return [
        f"{same[-1]}" + (f" ({len(same)} times, this was the last)" if len(same) > 1 else "")
        for same in groups.values()
    ]


def _title(value: object) -> str:
    if isinstance(value, GraphBreak):
        return "graph break on purpose at " if value.on_purpose else "graph break at "
    return ""


def _count(number: int, word: str) -> str:
    head, _, tail = word.partition(" ")
    if tail.startswith(("break",)):
        return f"{number} {word}{'' if number == 1 else 's'}"
    plural = head if number == 1 else f"{head}s"
    return f"{number} {plural} {tail}".strip()


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if hasattr(value, "_asdict"):
        return {name: _plain(item) for name, item in value._asdict().items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value
