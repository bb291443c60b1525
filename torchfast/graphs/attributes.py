"""What the host holds beside tensors: values that a step reads and a graph freezes.

They lie in the places of `torchfast.graphs.places`. Of objects that are no modules, and of modules
of Python, only what the step's code names counts: a count of steps that the loop keeps beside is
not the step's.

A value counts by type and value, a container or a small array by its content, any other object by
being the same. What the step itself writes (``self.last_loss = loss``) is left out from then on: an
evaluation writes it too, and no replay does. But for numbers: a step that counts may do something
else when it has come to some count, so it cannot be captured. One that only notes a number (how
many samples there are in its batch) leaves the same one on such a batch, whatever was there before.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from torchfast._core.generators import of_host, same_state, set_state, state_of
from torchfast._core.proxies import is_dead
from torchfast._core.refilling import bits
from torchfast.graphs.holders import (
    CONTAINERS,
    LONGEST,
    TENSOR,
    Kinds,
    is_holder,
    items_of,
    parts_of,
)
from torchfast.graphs.iterators import iterator_in, lines_drawing
from torchfast.graphs.library_objects import is_elsewhere
from torchfast.graphs.places import (
    BEYOND,
    CELL,
    NOTHING,
    Key,
    Place,
    counts_in,
    most_objects,
    places,
    values_in,
    what_is_read,
    written_by,
)
from torchfast.graphs.reached import Reached
from torchfast.graphs.value_forms import (
    BUFFERS,
    OTHER,
    as_of_library,
    bytes_of,
    contents,
    counts,
    form_of,
    has_numbers,
    is_frozen,
    is_number,
    is_small_array,
    only_plain,
)

_NOTHING = (None, object())
_MOST_KINDS = 64  # of calls of which is remembered what numbers they left
_Known = dict[Key, tuple[Place, Any]]
_Held = list[tuple[Place, list[tuple[str, Any]]]]
_Reader = tuple[Callable[[Any], Any], Any]


@final
class Attributes:
    """Looks at values of the host before each replay.

    Args:
        function: The step.
        device: Where it runs. Of a tensor on the host beside it a graph holds the values.

    Attributes:
        take: Functions that return what has to be the very object that it was, some at a time.
        out_of: What each of them is called with.
        elsewhere: What another process keeps of what is read, in words; None if nothing.
        modules: Those that were met in places, such as in a list of a module's.
    """

    def __init__(self, function: object, device: torch.device) -> None:
        self._function, self._device = function, device
        self._until_updates = self._functions = [function]
        self._modules: Sequence[nn.Module] = ()
        self._written: dict[Key, Any] = {}  # with the holder, so that the address stays its own
        # By the kind of call: numbers as they were before the latest of them, and behind it.
        self._left: dict[Hashable, dict[Key, tuple[Any, Any]]] = {}
        self._read, self._is_all = NOTHING, True
        self._known: _Known = {}
        self.take: list[Callable[[Any], Any]] = []
        self.out_of: list[Any] = []
        self._objects: list[Any] = []
        self._sized: list[_Reader] = []
        self._sizes: list[Any] = []
        self._counts: list[tuple[Place, dict[str, Any]]] = []
        self._stopped: dict[str, None] = {}  # counts that no replay goes on with, in words
        self._generators: list[tuple[Any, Any]] = []
        self._may_draw = False
        self.elsewhere: str | None = None
        self.modules: list[nn.Module] = []

    def refresh(
        self,
        modules: Sequence[nn.Module],
        hooks: Sequence[object] = (),
        of_updates: Sequence[object] = (),
    ) -> None:
        """Take values as they are now, of these modules, hooks, and what updates are made of."""
        self._modules, self._until_updates = modules, [self._function, *hooks]
        self._functions = [*self._until_updates, *of_updates]
        self._read, self._is_all = what_is_read(self._functions, modules)
        held = self._held()
        self._take_as_they_are(self._look(held), held)
        counts = [(place, dict(counts_in(place, self._read))) for place, _ in held]
        self._counts = [(place, found) for place, found in counts if found]
        kinds = Kinds()
        unlike = [f for f in self._not_written(held) if kinds[type(f[2])] > TENSOR]
        away = (
            _in_words(n, place) for place, n, v in unlike if any(map(is_elsewhere, parts_of(v)))
        )
        self.elsewhere = next(away, None)
        values = [value for _, _, value in unlike]
        sure = [v for place, n, v in unlike if self._is_sure_to_be_read(place, n)]
        # Not weak proxies, which say that they are modules.
        parts = [part for value in sure for part in parts_of(value)]
        self.modules = [part for part in parts if issubclass(type(part), nn.Module)]
        kinds_of_generators = of_host()
        parts = [part for value in values for part in parts_of(value)]
        found = {id(part): part for part in parts if isinstance(part, kinds_of_generators)}
        self._generators = [(g, state_of(g)) for g in found.values()]
        # Another walk, as for the step alone, could find one only in groups of what updates.
        groups = [v for f in of_updates if isinstance(f, Optimizer) for v in _settings_of(f)]
        self._may_draw = not self._is_all or any(is_holder(v, kinds) for v in groups)
        self._may_draw |= any(iterator_in(v) is not None for v in (*values, *groups))

    def objects(self) -> Iterator[Any]:
        """Return all that has to be the very object that it was, in one line."""
        taken = map(operator.call, self.take, self.out_of)
        return itertools.chain.from_iterable(taken)

    def sizes(self) -> list[_Reader]:
        """Return what must be equal to what it was: by a function and its argument."""
        return list(self._sized)

    def notes(self) -> list[str]:
        """Return what somebody who relies on it should know, in words."""
        found = [
            f"{count} is counted in Python, which no replay runs: it stands still"
            for count in self._stopped
        ]
        if not self._is_all:
            found.append(
                f"the step reaches more than {most_objects():,} objects; a change of values in "
                "those beyond is not noticed"
            )
        return found

    def changed(self) -> str | None:
        """Return what has another value than it had, in words; None if nothing has."""
        if self._is_same():
            return None
        held = self._held()
        now = self._look(held)
        for key, place in self._differing(now):
            return _in_words(key[1], place)
        self._take_as_they_are(now, held)  # other objects that say the same
        return None

    def drawn(self) -> list[str]:
        """Return which generators the step has drawn from since the values were taken."""
        return [
            f"a {type(generator).__name__} of its own on the host"
            for generator, state in self._generators
            if not same_state(state_of(generator), state)
        ]

    def iterator(self) -> tuple[str, str, str] | None:
        """Return what draws from an iterator by all appearances, its type, and where it is.

        To be asked right behind `refresh`, which has seen whether there is any.
        """
        if not self._may_draw:
            return None
        named = self._read.names | self._read.called
        parts = {"step": self._until_updates, "update": self._functions}
        for part, functions in parts.items():
            read = self._read
            if part == "step" and read.enclosing:  # among which are those of updates
                of_step, _ = what_is_read(functions, self._modules)
                read = read._replace(enclosing=of_step.enclosing)
            found = places(functions, self._modules, read, self._written)
            for place, name, value in self._not_written(self._held(found)):
                is_sure = self._is_sure_to_be_read(place, name)
                if not is_sure or (place.is_module and name not in named):
                    continue
                if (kind := iterator_in(value)) is None:
                    continue
                is_drawn, line = lines_drawing(name, value, place.holder, self._read)
                if is_drawn:
                    return part, kind, _in_words(name, place) + (f" at {line}" if line else "")
        return None

    def counted(self, kind: Hashable) -> str | None:
        """Return which number the step has changed by counting; None if it has none.

        Args:
            kind: Of the call.
        """
        if self._is_same():
            return None
        now = self._look(self._held())
        for key, place in self._differing(now):
            if key not in now or key not in self._known or self._only_notes(kind, key, now):
                continue
            if counts(self._known[key][1], now[key][1]):
                return _in_words(key[1], place)
        return None

    def reached(self) -> Reached:
        """Return all values as they are now, those too that the step writes itself."""
        read = self._read._replace(names=self._read.names | self._read.used)
        return Reached(places(self._functions, self._modules, read, {}), read)

    def put_generators_back(self) -> None:
        """Set generators of the host back to where they were when the values were taken."""
        for generator, state in self._generators:
            set_state(generator, state)

    def ran(self, kind: Hashable) -> None:
        """Note that the step has run: what has changed since it began, it has written itself.

        Not so numbers, but for those that it only notes. A step that changes one cannot be
        captured, and one that does in another kind of call makes the graphs invalid.

        Args:
            kind: Of the call.
        """
        self._note_counts()
        if self._is_same():
            if kind not in self._left:
                self._note_left(kind, self._known)
            return
        now, numbers = self._look(self._held()), {}
        stay = {holder for holder, _ in now} & {holder for holder, _ in self._known}
        for key, place in self._differing(now):
            forms = [found[key][1] for found in (self._known, now) if key in found]
            is_count = any(map(is_number, forms)) if place.is_module else False
            is_count |= len(forms) == 2 and counts(*forms)
            if key in self._known and is_count and not self._only_notes(kind, key, now):
                numbers[key] = self._known[key]
            else:
                written, holder = written_by(key, place, stay)
                self._written[written] = holder
        self._note_left(kind, now)
        held = self._held()  # without what is among the written now
        self._take_as_they_are(self._look(held) | numbers, held)
        if numbers:
            self._sizes = [object()]  # which is never as it was

    def _note_counts(self) -> None:
        """Note what the step has counted up: once, as afterwards others may have, too."""
        for place, known in self._counts:
            now = dict(counts_in(place, self._read))
            counted = [name for name in known if now.get(name) != known[name]]
            self._stopped.update({_in_words(name, place): None for name in counted})
        self._counts = []

    def _only_notes(self, kind: Hashable, key: Key, now: _Known) -> bool:
        """Whether an earlier call of this kind made the same number of another one."""
        earlier = self._left.get(kind, {}).get(key)
        if earlier is None or key not in now or key not in self._known:
            return False
        return bool(earlier[0] != self._known[key][1] and earlier[1] == now[key][1])

    def _note_left(self, kind: Hashable, now: _Known) -> None:
        self._left.pop(kind, None)
        self._left[kind] = {
            key: (self._known[key][1], form)
            for key, (_, form) in now.items()
            if key in self._known and has_numbers(form)
        }
        if len(self._left) > _MOST_KINDS:
            del self._left[next(iter(self._left))]

    def _differing(self, now: _Known) -> list[tuple[Key, Place]]:
        return [
            (key, found[key][0])
            for key, found in {
                **dict.fromkeys(self._known, self._known),
                **dict.fromkeys(now, now),
            }.items()
            if now.get(key, _NOTHING)[1] != self._known.get(key, _NOTHING)[1]
        ]

    def _is_same(self) -> bool:
        try:
            now = list(self.objects())
        except (AttributeError, KeyError, ValueError):  # one is gone
            return False
        known = self._objects
        is_same = len(now) == len(known) and all(map(operator.is_, now, known))
        return is_same and self._sizes_now() == self._sizes

    def _sizes_now(self) -> list[Any]:
        return [read(held) for read, held in self._sized]

    def _places(self) -> Iterator[Place]:
        return places(self._functions, self._modules, self._read, self._written)

    def _held(self, found: Iterator[Place] | None = None) -> _Held:
        """Return all places, each with what it holds that may be read, by name."""
        found = self._places() if found is None else found
        return [(place, values_in(place, self._read)) for place in found]

    def _not_written(self, held: _Held) -> Iterator[tuple[Place, str, Any]]:
        for place, values in held:
            for name, value in values:
                if (id(place.holder), name) not in self._written:
                    yield place, name, value

    def _look(self, held: _Held) -> _Known:
        """Return each value by its place and name, in the form in which it is compared."""
        found: _Known = {}
        for place, name, value in self._not_written(held):
            form = form_of(value, on_host=self._device.type != "cpu")
            form = form if self._is_sure_to_be_read(place, name) else only_plain(form)
            form = as_of_library(form) if place.of_library else form
            if form is not OTHER:
                found[id(place.holder), name] = (place, form)
        return found

    def _is_sure_to_be_read(self, place: Place, name: str) -> bool:
        """Whether code names it; if not, an object may be what a loop keeps beside.

        Code that reads all there is, by no name, reads losses and batches too, which are new in
        each step. And ``model(batch).loss`` is not ``trainer.loss``, by all appearances.
        """
        if place.is_module or place.read is not None or isinstance(place.holder, dict):
            return True
        read = self._read
        return name in read.called or (name in read.names and name not in read.of_results)

    def _take_as_they_are(self, known: _Known, found: _Held) -> None:
        self._known = known
        self._sized = []
        pairs: list[_Reader] = []
        for place, held in found:
            self._is_all &= place is not BEYOND
            values = [(name, value) for name, value in held if (id(place.holder), name) in known]
            names = []
            for name, value in values:
                self._sized += _readers(value, on_host=self._device.type != "cpu")
                if place.of_library and isinstance(value, CONTAINERS):
                    # A new one each time may say the same, as a trainer's metrics without any do.
                    self._sized.append((_form_in, (place, name)))
                    continue
                pairs += [(tuple, view) for view in _views(value)]
                names.append(name)
            self._sized += [
                (_kind_in, (place, name))
                for name, _ in held
                if (key := (id(place.holder), name)) not in known and key not in self._written
            ]
            if place.read is not None:
                # The others return a new tuple each time, of objects that stay the same.
                read = _cell_in_tuple if place.read is CELL else place.read
                pairs += [(read, place.holder)] if names else []
                continue
            if place.in_slots:
                get = operator.attrgetter(names[0], *names[1:] or names) if names else None
                pairs += [(get, place.holder)] if get is not None else []
                continue
            table: Any = place.table
            if place.names is None or place.of_library:
                # One that is new hides what the class has, or takes the place of one that is gone.
                self._sized.append((len, table))
            if place.is_module and "training" in table:
                names.insert(0, "training")
            if names:  # of one name alone it would be no tuple
                pairs.append((operator.itemgetter(names[0], *names[1:] or names), table))
        self.take = [take for take, _ in pairs]
        self.out_of = [held for _, held in pairs]
        self._objects = list(self.objects())
        self._sizes = self._sizes_now()


def _in_words(name: str, place: Place) -> str:
    return f"{name!r} of {place.label}" if name else place.label


def _views(value: Any, within: tuple[int, ...] = ()) -> Iterator[Any]:
    """Return what to go through to see each object in a container, now and later."""
    if is_dead(value) or not isinstance(value, CONTAINERS):
        return
    if len(value) > LONGEST or id(value) in within:
        return
    yield value
    if isinstance(value, dict):
        yield value.values()
    for item in items_of(value):
        yield from _views(item, (*within, id(value)))


def _readers(value: Any, *, on_host: bool) -> list[_Reader]:
    """Return how to read what can change in an object that stays the same."""
    found: list[_Reader] = []
    for part in parts_of(value):
        if is_small_array(part):
            found.append((bits, part))
        elif isinstance(part, BUFFERS):
            found.append((bytes_of, part))
        elif on_host and is_frozen(part):
            found.append((contents, part))
    return found


def _settings_of(optimizer: Optimizer) -> Iterator[Any]:
    """Yield what is in an optimizer's groups beside the parameters."""
    for group in optimizer.param_groups:
        yield from (value for name, value in group.items() if name != "params")


def _kind_in(found: tuple[Place, str]) -> type:
    """Return of what type a value is that only counts if it is a plain one."""
    return type(_value_in(found))


def _form_in(found: tuple[Place, str]) -> Any:
    """Return the form of what an object of a library's holds, as it is now."""
    return as_of_library(form_of(_value_in(found), on_host=False))


def _value_in(found: tuple[Place, str]) -> Any:
    place, name = found
    return getattr(place.holder, name, None) if place.in_slots else place.table.get(name)


def _cell_in_tuple(cell: Any) -> tuple[Any]:
    return (cell.cell_contents,)
