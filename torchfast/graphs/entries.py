"""The graphs of a step: one for each kind of call, of which the latest used are kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, final

from torch import Tensor

from torchfast.graphs.backend import Graph
from torchfast.graphs.constants import HostConstants
from torchfast.graphs.failures import Failure
from torchfast.graphs.outputs import StaticOutputs
from torchfast.graphs.secrecy import Secret
from torchfast.graphs.static_inputs import StaticInputs


@dataclass(eq=False)
class Entry:
    """What is known of one kind of call.

    Attributes:
        shapes: Its tensors in words.
        warm_up_left: Calls that run as they are before it is captured.
        attempts: Captures that failed.
        graph: Its graph, with ``inputs`` that it reads and ``outputs`` that it writes.
        gradients: Each parameter with the gradient that a replay writes anew.
        added_to: Each parameter with the gradient that the step adds to: it was there before, and
            is state.
        from_none: Parameters that had no gradient at capture, where it is not known whether the
            step would have added to one: they must have none again.
        kept: Tensors that the graph reads and nobody else may hold.
        secret: That it is being captured; None where that is told to whoever asks.
        constants: What it copies from the host, once a capture has failed for that.
        why_eager: Why it is not captured, in words.
        num_replays: Replays so far.
    """

    shapes: str
    warm_up_left: int
    attempts: int = 0
    graph: Graph | None = None
    inputs: StaticInputs | None = None
    outputs: StaticOutputs | None = None
    gradients: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)
    added_to: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    from_none: list[Tensor] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)
    secret: Secret | None = field(default_factory=Secret)
    constants: HostConstants | None = None
    why_eager: str | None = None
    num_replays: int = 0

    @contextmanager
    def surroundings(self) -> Iterator[None]:
        """Let the step run in a capture as it would without."""
        with ExitStack() as stack:
            if self.secret is not None:
                stack.enter_context(self.secret.kept())
            if self.constants is not None:
                stack.enter_context(self.constants.standing_in())
            yield

    def is_to_be_told(self, failure: Failure) -> bool:
        """Whether telling of the next capture may help: who asked, or compiled code that asks."""
        return self.secret is not None and (self.secret.was_kept or failure.is_recompile)

    def drop(self) -> None:
        """Let go of the graph."""
        if self.graph is not None:
            self.graph.reset()
        self.graph = self.inputs = self.outputs = None
        self.gradients, self.added_to, self.from_none, self.kept = [], [], [], []


@final
class GraphStore:
    """The entries of a step, and whose gradients the parameters hold.

    All graphs share one memory pool, so each may write over what another has left there, its
    gradients too. A parameter therefore holds the gradients of the graph that ran last, or none.

    Args:
        limit: Most graphs.
    """

    def __init__(self, limit: int) -> None:
        self.entries: dict[Any, Entry] = {}
        self.num_evicted = 0
        self.graphs: list[Entry] = []  # the least recently used first
        self.owner: Entry | None = None
        self._limit = limit

    def forget_some(self, limit: int) -> None:
        """Let go of what is known of the oldest kinds without a graph, beyond so many."""
        idle = [key for key, entry in self.entries.items() if entry.graph is None]
        for key in idle[: max(0, len(idle) - limit)]:
            del self.entries[key]

    def add(self, entry: Entry) -> None:
        """Take an entry that has just been captured."""
        self.graphs.append(entry)
        self.owner = entry

    def remove(self, entry: Entry) -> None:
        """Let go of an entry's graph."""
        if self.owner is entry:
            self.release_gradients()
        self.graphs.remove(entry)
        entry.drop()

    def make_room(self) -> None:
        """Let go of the least recently used graphs until there is room for another."""
        while len(self.graphs) >= self._limit:
            self.remove(self.graphs[0])
            self.num_evicted += 1

    def drop_all(self) -> None:
        """Let go of all graphs."""
        while self.graphs:
            self.remove(self.graphs[-1])

    def used(self, entry: Entry) -> None:
        """Note that a graph was replayed."""
        if self.graphs[-1] is not entry:
            self.graphs.remove(entry)
            self.graphs.append(entry)

    def hold_gradients(self, entry: Entry) -> None:
        """Let parameters hold what this graph computes."""
        for parameter, gradient in entry.gradients:
            parameter.grad = gradient
        self.owner = entry

    def holds_others(self, entry: Entry) -> bool:
        """Whether parameters hold other gradients than this graph computes: one tells for all."""
        if self.owner is not entry or not entry.gradients:
            return self.owner is not entry
        parameter, gradient = entry.gradients[0]
        return parameter.grad is not gradient

    def release_gradients(self) -> None:
        """Let parameters no longer hold gradients that another graph may write over."""
        if self.owner is not None:
            state = {id(parameter) for parameter in self.owner.from_none}
            for parameter, gradient in self.owner.gradients:
                if parameter.grad is gradient and gradient is not None:
                    parameter.grad = gradient.clone() if id(parameter) in state else None
        self.owner = None

    def has_its_gradients(self) -> bool:
        """Whether gradients that the graphs add to are still there, and others still are not."""
        added_to = all(p.grad is g for entry in self.graphs for p, g in entry.added_to)
        return added_to and all(p.grad is None for entry in self.graphs for p in entry.from_none)
