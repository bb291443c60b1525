"""Where an iterable of batches is, so that another process can go on at the very next one.

A position is that of the last batch that came out, never of one that was fetched ahead. There are
two kinds of loader. One that carries state (``state_dict`` and ``load_state_dict``, as torchdata's
StatefulDataLoader) is asked for it after each batch. Any other is counted: an epoch is begun again
with the random generators where they stood when it began, so that a shuffle, the seeds of worker
processes and random augmentations fall as they did, and as many batches are fetched and dropped.
That takes the time of fetching them.

The states of a loader's own generators are part of the position, also of a loader that carries its
own: torchdata's draws again as it takes its state up, and that moves its ``generator=`` to where it
would not be, so the epochs behind this one would be others. Of a loader that is counted, those that
its samplers and its data set hold belong to it too (`held_generators.py`). Two things are not part
of the position: what no generator decides, such as files that have changed since, or a sampler that
counts its epochs itself; and, after the first epoch, what ``persistent_workers`` draw for
augmentation, whose generators live on in processes that are gone. Which samples come is exact all
the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from threading import get_ident
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

import torch
from torch.utils.data import DataLoader

from torchfast._core.errors import StateMismatchError
from torchfast._core.generators import packed, set_states, state_of
from torchfast._core.rng import get_rng_state, preserved_rng, set_rng_state
from torchfast.data.drawn_ahead import FEW, Draw, DrawnAhead, states_of
from torchfast.data.fitting import SAVED, check_fits, fitted, fitting
from torchfast.data.held_generators import held_generators
from torchfast.data.loader_fingerprint import fingerprint
from torchfast.data.one_shot import begun, is_iterator, is_shared, parts_of
from torchfast.data.own_generators import own_generators
from torchfast.data.own_position import BrokenOff, state_of_loader
from torchfast.data.samplers import UNSIZED, samplers_of
from torchfast.data.sharded_batches import carries_state
from torchfast.data.turns import Turn, check_free, turn_of
from torchfast.data.unannotated import unannotated

if TYPE_CHECKING:
    from torchfast._core.generators import Generator

CPU = torch.device("cpu")
NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


class Position(NamedTuple):
    """After which batch: one of these comes with each.

    Attributes:
        num_batches: Batches of this epoch that have come out, this one included.
        epoch_start: The generators as the epoch found them, shared by the epoch's positions.
        loader_state: The state of a loader that carries one.
        generators: The loader's own generators as this batch left them; saved where the loader
            carries a state.
        draws_apart: Whether the loader draws from global generators that it hides; not saved.
        held: The generators that its parts hold, as this batch left them; not saved.
    """

    num_batches: int
    epoch_start: dict[str, Any]
    loader_state: Any = None
    generators: tuple[torch.Tensor, ...] = ()
    draws_apart: bool = False
    held: Mapping[str, Any] = NOTHING


NOWHERE: Final = Position(0, {})
_END: Final = object()


@final
class PositionedLoader:
    """Iterates over a loader and says where it is.

    Args:
        loader: Any iterable of batches.

    Numerics: An epoch that is taken up again yields exactly the batches that were left, and leaves
        the global generators as it found them; from then on they are the training's to restore.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        # Of the last batch that reached the training; None between two epochs. Whoever hands
        # batches on moves it.
        self.position: Position | None = None
        self._handed_out: Sequence[Position] = ()
        self._resume_at: Position | None = None
        self._announced: dict[str, Any] | None = None
        self._loaded_generators: Sequence[torch.Tensor] | None = None
        self._has_begun = False
        self._num_begun = 0
        self._has_warned = False
        self._is_shared = False  # whether iter() returns one iterator, which goes on
        self._first = self._fetched = NOWHERE
        self._broken_off: BrokenOff | None = None
        self._epoch: int | None = None
        self._draws: list[Draw] = []  # the first ones
        self._drawn = self._drawn_announced = DrawnAhead(0, self._draws)

    @property
    def will_resume(self) -> bool:
        """Whether the next iteration goes on in the middle or at the end of an epoch."""
        return self._resume_at is not None

    @property
    def is_one_shot(self) -> bool:
        """Whether the loader is an iterator, which serves one epoch only, or hands out such a one.

        The latter is known once an epoch has begun.
        """
        return self._is_shared or is_iterator(self.loader)

    @property
    def goes_on_only(self) -> bool:
        """Whether the loader has begun and cannot be given another position."""
        return self._has_begun and self.is_one_shot and not self.carries_state

    @property
    def may_be_at_end(self) -> bool:
        """Whether as many batches came out as the loader says it has."""
        try:
            length = len(self.loader)  # type: ignore[arg-type]
        except UNSIZED:
            return False
        return self.position is not None and self.position.num_batches >= length

    def hand_out(self, positions: Sequence[Position]) -> None:
        """Be behind a group of steps; these are the positions behind each."""
        self._handed_out, self.position = positions, positions[-1]
        self._drawn.handed_out = positions[0].num_batches  # `go_to` may go back so far

    def go_to(self, place: int) -> None:
        """Be behind the step in this place of the group."""
        self.position = self._handed_out[place]

    def tell_epoch(self, epoch: int) -> None:
        """Call ``set_epoch`` of the loader, its samplers and its data set, where they have it."""
        dataset = getattr(self.loader, "dataset", None)
        for holder in (self.loader, *samplers_of(self.loader).values(), dataset):
            if callable(getattr(holder, "set_epoch", None)):
                holder.set_epoch(epoch)
                if epoch != self._epoch:
                    self._broken_off = None  # it is to begin another one
        self._epoch = epoch

    @property
    def carries_state(self) -> bool:
        """Whether the loader knows its position by itself."""
        return carries_state(self.loader)

    def begin(self) -> Iterator[tuple[Any, Position]]:
        """Begin an epoch now, or go on in the one that was loaded.

        Returns:
            Batches with their positions.

        Raises:
            IterationError: Another one would be cut off; see `turns.py`.
        """
        check_free(self.loader)
        self._num_begun += 1
        self._first = self._fetched = NOWHERE
        at, self._resume_at = self._resume_at, None
        drawn = self._drawn_announced
        if self._announced is None:
            drawn = self._drawn = DrawnAhead(0 if at is None else at.num_batches, self._draws)
        if at is not None:
            iterator = self._resumed(at)
        else:
            self._take_up_state()
            at = Position(0, self._generators())
            iterator = self._iterator()
            if (broken_off := self._broken_off) is not None:
                iterator = broken_off.taken_up(self.loader, iterator)
                self._broken_off = None
        return self._positions(iterator, at, turn_of(self.loader), drawn)

    def _iterator(self) -> Iterator[Any]:
        self._has_begun = True
        parts = parts_of(self.loader)
        asked = [] if self._announced is None else self._all_generators()
        found = states_of(asked)
        try:
            iterator = iter(self.loader)
        finally:
            if asked:
                self._drawn_announced.note(Draw(0, asked, found, states_of(asked), is_alone=False))
        self._is_shared = not self.carries_state and is_shared(iterator, self.loader, parts)
        return begun(iterator)

    def rewind(self) -> None:
        """Take back what the loader's own generators gave behind the last batch that came out.

        For an epoch that breaks off. A loader that goes on from its own state is put back when it
        does so.
        """
        if self.position is not None:
            # A DataLoader with a state begins anew, if it was not given one.
            if self.carries_state and not isinstance(self.loader, DataLoader):
                states = [each.loader_state for each in (self._first, self._fetched, self.position)]
                is_ahead = self._fetched is not self.position
                self._broken_off = BrokenOff(*states) if is_ahead else None
            self._drawn.take_back(self.position.num_batches)

    def warn_if_spent(self) -> None:
        """Warn, once, of an epoch that yielded nothing because an iterator is used up."""
        if self._num_begun > 1 and self.is_one_shot and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"the loader ({type(self.loader).__name__}) is an iterator, which serves one "
                "epoch, and is used up, so this loop got no batch; pass something that iter() can "
                "start again, or a new one",
                stacklevel=3,
            )

    def announce(self) -> None:
        """Note that the epoch that `begin` is about to begin is not the training's turn yet."""
        self._announced = self._generators()
        self._drawn_announced = DrawnAhead(-1, self._draws)

    def arrive(self) -> None:
        """Note that the training has come to the announced epoch."""
        self._announced = None
        self._drawn = self._drawn_announced

    def recall(self) -> None:
        """Take the announced epoch back: the next one begins where it would have begun."""
        if self._announced is not None:
            self._drawn_announced.take_back(-1)
        self._announced = None

    def _positions(
        self, iterator: Iterator[Any], at: Position, turn: Turn, drawn: DrawnAhead
    ) -> Iterator[tuple[Any, Position]]:
        own = None  # looked up once an epoch, behind the first batch: iter() may make one
        holds: dict[str, Generator] = {}
        carries_state = False
        number, here = at.num_batches, get_ident()
        asked = self._all_generators() if number > drawn.handed_out else []
        found = states_of(asked)
        try:
            for batch in unannotated(iterator):
                number += 1
                is_first = own is None
                if own is None:
                    if found:
                        drawn.note(Draw(number, asked, found, states_of(asked), is_alone=False))
                    own, carries_state = own_generators(self.loader), self.carries_state
                    holds = self._held_generators()
                    asked = [*own, *holds.values()]
                generators = tuple([g.get_state() for g in own]) if own else ()
                state = self._loader_state() if carries_state else None
                apart = getattr(self.loader, "draws_apart", False) is True
                held = {name: state_of(g) for name, g in holds.items()} if holds else NOTHING
                if found or is_first:
                    left = [*generators, *held.values()]
                    found = left if is_first else found
                    drawn.note(Draw(number, asked, found, left, get_ident() == here))
                    found = []
                position = Position(number, at.epoch_start, state, generators, apart, held)
                if self._fetched is NOWHERE:
                    self._first = position
                self._fetched = position
                yield batch, position
                # The next one is what the training waits for, or is fetched ahead.
                if asked and (number > drawn.handed_out or number < FEW or get_ident() != here):
                    found = states_of(asked)
            if carries_state:
                self._fetched = NOWHERE._replace(loader_state=self._loader_state())
        finally:
            if found:  # the end was looked for, or a fetch failed
                drawn.note(Draw(number + 1, asked, found, states_of(asked), get_ident() == here))
            turn.is_over = True

    def _all_generators(self) -> list[Generator]:
        return [*own_generators(self.loader), *self._held_generators().values()]

    def _resumed(self, at: Position) -> Iterator[Any]:
        self._has_begun = True
        with preserved_rng(CPU):
            if self.carries_state:  # it was given its state when the position was loaded
                return self._as_drawn(iter(self.loader), at.generators)
            self._start_workers(at)
            set_rng_state(at.epoch_start["rng"], CPU)
            self._set_epoch_start(at.epoch_start)
            iterator = self._iterator()
            for number in range(at.num_batches):
                try:
                    next(iterator)
                except StopIteration:
                    raise StateMismatchError(
                        f"the saved position is after batch {at.num_batches} of the epoch, and the "
                        f"loader ended after {number}; load it into a loader over the same data"
                    ) from None
        return iterator

    def _as_drawn(self, rest: Iterator[Any], generators: Sequence[torch.Tensor]) -> Iterator[Any]:
        """Yield the rest of an epoch, and let the loader's own generators be as if it were whole.

        They are set behind the first batch, for which an order may have to be drawn again. If it
        was, it is not known where they would be now, and they are left to the loader.
        """
        before = self._own_states()
        first = next(rest, _END)
        after = self._own_states()
        if len(before) == len(after) and all(map(torch.equal, before, after)):
            self._set_own_generators(generators)
        if first is not _END:
            yield first
            yield from rest

    def _take_up_state(self) -> None:
        """Let a DataLoader make something of a state from between two epochs, if it was given one.

        torchdata's does so when it is asked for its state, and otherwise as it begins, when it
        draws for the epoch that is over too.
        """
        generators, self._loaded_generators = self._loaded_generators, None
        if generators is not None and isinstance(self.loader, DataLoader):
            with preserved_rng(CPU):
                self._loader_state()
            self._set_own_generators(generators)

    # -- State -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the position for ``torch.save``."""
        position = self.position
        if position is None:
            start = self._announced or self._generators()
            # The generators last: one that is asked for its state may begin, and draw.
            position = Position(0, start, self._loader_state(), self._own_states())
        if not self.carries_state:
            position = position._replace(generators=())
        start = {**position.epoch_start, "held": packed(position.epoch_start.get("held", {}))}
        return {
            **{name: getattr(position, name) for name in SAVED},
            "epoch_start": start,
            "carries_state": self.carries_state,
            "fingerprint": fingerprint(self.loader),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at a position in the next iteration.

        Raises:
            TypeError: Not a mapping.
            StateMismatchError: The position is that of another kind of loader.
        """
        self.check(state)
        self._broken_off = None
        self.loader = fitting(self.loader, state)
        state = fitted(state, self.loader)
        position = Position(**{name: state[name] for name in SAVED})
        if self.carries_state:
            self.loader.load_state_dict(position.loader_state)  # type: ignore[attr-defined]
            self._loaded_generators = None if position.num_batches else position.generators
        elif position.num_batches == 0:
            # The global generators are the training's, which its own state puts back.
            with preserved_rng(CPU):
                self._start_workers(position)
            self._set_epoch_start(position.epoch_start)
        self.position = self._resume_at = position if position.num_batches else None

    def check(self, state: object) -> None:
        """Raise unless ``state`` is a position in such a loader; see `load_state_dict`."""
        check_fits(state, self.loader)
        if self.goes_on_only:
            assert isinstance(state, Mapping)
            now = 0 if self.position is None else self.position.num_batches
            if state["num_batches"] != now:
                raise StateMismatchError(
                    f"the position is after batch {state['num_batches']}, and the loader "
                    f"({type(self.loader).__name__}) is an iterator that has begun and is after "
                    f"batch {now}; it cannot go back: pass a new one, or something that iter() can "
                    "start again"
                )

    def _start_workers(self, at: Position) -> None:
        """Let workers that stay begin: only a loader's first iteration draws a seed for them."""
        if at.epoch_start["workers_stayed"]:
            iter(self.loader)
            self._has_begun = True

    def _set_own_generators(self, states: Sequence[torch.Tensor]) -> None:
        own = own_generators(self.loader)
        if self.carries_state and len(own) != len(states):
            return  # built otherwise than it was, which is between it and its state
        for generator, state in zip(own, states, strict=True):
            generator.set_state(state)

    def _held_generators(self) -> dict[str, Generator]:
        # What a loader that carries its own state does about them is its own affair.
        return (
            {} if self.carries_state else held_generators(self.loader, own_generators(self.loader))
        )

    def _set_epoch_start(self, start: Mapping[str, Any]) -> None:
        self._set_own_generators(start["generators"])
        set_states(self._held_generators(), start.get("held", {}))

    def _own_states(self) -> tuple[torch.Tensor, ...]:
        return tuple([generator.get_state() for generator in own_generators(self.loader)])

    def _generators(self) -> dict[str, Any]:
        return {
            "rng": get_rng_state(CPU),
            "generators": list(self._own_states()),
            "held": {name: state_of(g) for name, g in self._held_generators().items()},
            "workers_stayed": self._has_begun
            and bool(getattr(self.loader, "persistent_workers", False)),
        }

    def _loader_state(self) -> Any:
        return state_of_loader(self.loader) if self.carries_state else None
