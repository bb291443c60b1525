"""The graphs of a step: one for each kind of call, of which the latest used are kept."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from torchfast._core.decisions import Decision
from torchfast._core.phases import REPLAY, phase_outside
from torchfast.graphs.backend import Graph
from torchfast.graphs.manner import Manner
from torchfast.graphs.moments import Moment, PhaseMoments, Times
from torchfast.graphs.options import CUDAGraphOptions, graph_decision
from torchfast.graphs.outputs import StaticOutputs
from torchfast.graphs.reached import Notes, in_few_words
from torchfast.graphs.signature import Call, num_steps, only_tensors, other_value, shapes, single
from torchfast.graphs.static_inputs import StaticInputs

# So many graphs thrown out for each that is kept, and the kinds are too many to be captured.
_EVICTIONS_PER_GRAPH = 4
# So many times in a row the ranks did not all replay the same capture, and a graph goes: it may be
# gone on another one. Or so many times draws came out otherwise than in it.
_PATIENCE = 10


@dataclass(eq=False)
class Entry:
    """What is known of one kind of call.

    Attributes:
        shapes: Its tensors in words.
        num_steps: How many steps a call does, in one graph.
        warm_up_left: Calls that run as they are before it is captured.
        number: Of the capture that its graph is of, among those that all ranks have made.
        num_refused: Times in a row that it was not replayed: other ranks did not, or draws on the
            host came out otherwise.
        patience: How many of them make its graph go.
        graph: Its graph, with ``inputs`` that it reads and ``outputs`` that it writes.
        gradients: Each parameter with the gradient that a replay writes anew.
        added_to: Each parameter with the gradient that the step adds to: it was there before, and
            is state.
        from_none: Parameters that had no gradient at capture, where it is not known whether the
            step would have added to one: they must have none again.
        kept: Tensors that the graph reads and nobody else may hold.
        notes: Tensors that the step writes to attributes and the like, for others to read.
        manner: In what it is captured, and when again.
        moments: When its phases begin and end in replays, where that is asked for.
        why_eager: Why it is not captured, in words.
        num_replays: Replays so far.
    """

    shapes: str
    warm_up_left: int
    number: int = 0
    num_refused: int = 0
    patience: int = _PATIENCE
    graph: Graph | None = None
    inputs: StaticInputs | None = None
    outputs: StaticOutputs | None = None
    gradients: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)
    added_to: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    from_none: list[Tensor] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)
    notes: Notes | None = None
    manner: Manner = field(default_factory=Manner)
    moments: PhaseMoments | None = None
    why_eager: str | None = None
    num_replays: int = 0
    num_steps: int = 1

    @contextmanager
    def surroundings(self, device: torch.device) -> Iterator[None]:
        """Let the step run in a capture as it would without."""
        noting = nullcontext() if self.moments is None else self.moments.noting()
        with self.manner.surroundings(device), noting:
            yield

    def replay(self) -> None:
        """Replay the graph."""
        assert self.graph is not None
        if self.moments is not None:
            self.moments.before_replay()
        with phase_outside(REPLAY):
            self.graph.replay()
        if self.moments is not None:
            self.moments.replayed()
        if self.notes is not None:
            self.notes.write()
        self.num_replays += 1

    def drop(self) -> None:
        """Let go of the graph."""
        if self.graph is not None:
            self.graph.reset()
        self.graph = self.inputs = self.outputs = self.moments = self.notes = None
        self.num_refused = 0
        self.gradients, self.added_to, self.from_none, self.kept = [], [], [], []


class Ready(NamedTuple):
    """A call with the graph that serves it.

    Attributes:
        entry: That of the graph.
        call: Its tensors are what is read.
        around: In what it is to run eagerly, where a replay would do something else.
    """

    entry: Entry
    call: Call
    around: AbstractContextManager[Any] = nullcontext()

    def draws(self) -> bool:
        """Draw on the host what the replay needs; False if the step itself has to run, and draw."""
        return self.entry.manner.draws is None or self.entry.manner.draws.come_out_the_same()


class Aside(NamedTuple):
    """A call that no graph serves.

    Attributes:
        why: In words.
        around: In what it is to run eagerly.
    """

    why: str
    around: AbstractContextManager[Any] = nullcontext()


# Other shapes have less to warm up: the optimizer's state and the libraries are there.
_WARM_UP_OF_OTHERS = 1
# Why steps of a kind that was not captured yet are not replayed together.
ONE_FIRST = "steps of each kind are captured one by one first"
# So many kinds of steps were seen for each graph that is kept, and somebody should know.
_KINDS_PER_GRAPH = 8
# Of so many replays it is kept what their phases took: as many as the times of fit are over.
_WINDOW = 256


@final
class GraphStore:
    """The entries of a step, and whose gradients the parameters hold.

    All graphs share one memory pool, so each may write over what another has left there, its
    gradients too. A parameter therefore holds the gradients of the graph that ran last, or none.

    Args:
        options: How many, and what new shapes get.

    Attributes:
        adds_to_gradients: Whether a graph adds to gradients that were there before it.
    """

    def __init__(self, options: CUDAGraphOptions) -> None:
        self.entries: dict[Any, Entry] = {}
        self.num_evicted = 0
        self.graphs: list[Entry] = []  # the least recently used first
        self.owner: Entry | None = None
        self.adds_to_gradients = False
        self._concern: str | None = None  # of too many kinds
        self._options, self._limit = options, options.max_graphs
        self._phase_times: deque[Times] = deque(maxlen=_WINDOW)

    def entry(self, key: Any) -> tuple[Entry, str | None]:
        """Return the entry of a kind of step, a new one too; and what to warn of, if anything."""
        found = self.entries.get(key)
        if found is not None:
            if found.num_steps > 1 and found.graph is None:
                self._take_after(found, self.entries[key[0], single(key[1])])
            return found, None
        is_first = not self.entries
        entry = Entry(
            shapes=shapes(key[1]),
            warm_up_left=self._options.warm_up_steps if is_first else _WARM_UP_OF_OTHERS,
            num_steps=num_steps(key[1]),
        )
        if entry.num_steps > 1:
            self._take_after(entry, self.entries[key[0], single(key[1])])
        is_new_shape = all(known[1] != single(key[1]) for known in self.entries)
        if not is_first and is_new_shape and self._options.new_shapes == "eager":
            entry.why_eager = "other inputs than the first, and new_shapes='eager'"
        self.entries[key] = entry
        most = _KINDS_PER_GRAPH * self._limit
        if len(self.entries) <= most:
            return entry, None
        self._concern = self._concern_of_many(key)
        self._forget_some(most)
        return entry, self._concern

    def why_apart(self, key: Any) -> str | None:
        """Return why several steps cannot be a kind of call; None if they can."""
        if key in self.entries and self.entries[key].graph is not None:
            return None
        one = single(key[1])
        if one is None:
            return "batches of different shapes, values or containers in a group"
        known = self.entries.get((key[0], one))
        if known is None or known.graph is None:
            return ONE_FIRST
        if len(self.graphs) >= self._limit:
            return "max_graphs graphs are kept already"
        if known.manner.draws is not None:
            return "each draws on the host what it runs"
        return None

    @staticmethod
    def _take_after(several: Entry, one: Entry) -> None:
        """Let several steps begin with what is known of one: they have nothing to warm up."""
        several.warm_up_left = 0
        several.manner.take_after(one.manner, several.num_steps)

    def _concern_of_many(self, key: Any) -> str:
        kinds = [known[1] for known in self.entries]
        alike = [kind for kind in kinds if only_tensors(kind) == only_tensors(key[1])]
        why = "pad or bucket the batches to fewer shapes, or raise max_graphs"
        if len(alike) > self._limit:
            before = next(kind for kind in reversed(alike) if kind != key[1])
            why = (
                "an input that is no tensor has another value each time; pass it as a tensor, and "
                "an object that holds tensors as a dictionary, a tuple or a dataclass of them; "
                "leave out what the step does not read, such as paths; the latest is "
                f"{other_value(key[1], before)}"
            )
        return f"{len(kinds)} kinds of steps, each with a graph of its own; {why}"

    def _forget_some(self, limit: int) -> None:
        """Let go of what is known of the oldest kinds without a graph, beyond so many."""
        idle = [key for key, entry in self.entries.items() if entry.graph is None]
        for key in idle[: max(0, len(idle) - limit)]:
            del self.entries[key]

    def moments(self, new: Callable[[], Moment]) -> PhaseMoments | None:
        """Return what notes the phases of a capture, if somebody wants to know."""
        return PhaseMoments(new, self._phase_times) if self._options.time_phases else None

    def phase_times(self) -> list[Times]:
        """Return what phases took in some of the latest replays, in ms."""
        for entry in self.graphs:
            if entry.moments is not None:
                entry.moments.read()
        return list(self._phase_times)

    def decisions(self, why_eager: str | None, notes: Callable[[], list[str]]) -> list[Decision]:
        """Return what was captured with what is to be said of it, and what was not and why."""
        found = [
            graph_decision(
                "applied", f"{entry.shapes}: {entry.num_replays} replays{entry.manner.note}"
            )
            for entry in self.graphs
        ]
        found += [graph_decision("applied", note) for note in (notes() if self.graphs else ())]
        noted = {name: None for e in self.graphs if e.notes for name in e.notes.names()}
        if noted:
            detail = "what the latest replay has computed, until the next one; clone what you keep"
            found.append(graph_decision("applied", f"{in_few_words([*noted])}: {detail}"))
        reasons = [why for why in (why_eager, self._concern) if why]
        reasons += [f"{e.shapes}: {e.why_eager}" for e in self.entries.values() if e.why_eager]
        return found + [graph_decision("stepped aside", reason) for reason in reasons]

    def add(self, entry: Entry) -> None:
        """Take an entry that has just been captured."""
        self.graphs.append(entry)
        self.owner = entry
        self._note_additions()

    def remove(self, entry: Entry) -> None:
        """Let go of an entry's graph."""
        if self.owner is entry:
            self.release_gradients()
        self.graphs.remove(entry)
        entry.drop()
        self._note_additions()

    def _note_additions(self) -> None:
        self.adds_to_gradients = any(e.added_to or e.from_none for e in self.graphs)

    def has_too_many_kinds(self) -> bool:
        """Whether so many graphs were thrown out that no more are worth a capture."""
        return self.num_evicted > _EVICTIONS_PER_GRAPH * self._limit

    def make_room(self) -> None:
        """Let go of the least recently used graphs until there is room for another."""
        while len(self.graphs) >= self._limit:
            self.remove(self.graphs[0])
            self.num_evicted += 1

    def drop_all(self) -> None:
        """Let go of all graphs, and of constants, which may be others now."""
        while self.graphs:
            self.remove(self.graphs[-1])
        for entry in self.entries.values():
            entry.manner.constants = None

    def refused(self, entry: Entry) -> bool:
        """Note that a graph could not be replayed; return whether it went for that.

        Not all ranks could; or draws on the host came out otherwise than in its capture, which may
        be a rare outcome: the next one is captured of another step. After each time it takes twice
        as many, or ranks that differ, and steps that seldom come out alike, would capture for ever.
        """
        entry.num_refused += 1
        if entry.num_refused < entry.patience:
            return False
        entry.patience *= 2
        self.remove(entry)
        return True

    def used(self, entry: Entry) -> None:
        """Note that a graph was replayed."""
        entry.num_refused = 0
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
