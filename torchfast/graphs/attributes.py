"""What the host holds beside tensors: values that a step reads and a graph freezes.

They lie in the places of `torchfast.graphs.places`. Of objects that are no modules, and of modules
of Python, only what the step's code names counts: a count of steps that the loop keeps beside is
not the step's.

A value counts by type and value, a container or a small array by its content, any other object by
being the same. What the step itself writes (``self.last_loss = loss``) is left out from then on: an
evaluation writes it too, and no replay does. But for numbers: a step that counts may do something
else when it has come to some count, so it cannot be captured.
"""

from __future__ import annotations

import itertools
import operator
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from torchfast.graphs.places import (
    CELL,
    CONTAINERS,
    LONGEST,
    NOTHING,
    NUMBERS,
    Key,
    Place,
    is_plain,
    items_of,
    places,
    values_in,
    what_is_read,
    written_by,
)
from torchfast.graphs.signature import Identity

_PLAIN = frozenset((bool, int, str, bytes, type(None), range, slice))
_COUNTED = (*NUMBERS, complex, np.generic, np.ndarray)
_NOTHING = (None, object())
_OTHER = object()
_Known = dict[Key, tuple[Place, Any]]
_Reader = tuple[Callable[[Any], Any], Any]


@final
class Attributes:
    """Looks at values of the host before each replay.

    Args:
        function: The step.
        device: Where it runs. Of a tensor on the host beside it a graph holds the values.
    """

    def __init__(self, function: object, device: torch.device) -> None:
        self._function, self._device = function, device
        self._functions: Sequence[object] = (function,)
        self._modules: Sequence[nn.Module] = ()
        self._written: dict[Key, Any] = {}  # with the holder, so that the address stays its own
        self._read = NOTHING
        self._known: _Known = {}
        self._take: list[Callable[[Any], Any]] = []
        self._out_of: list[Any] = []
        self._objects: list[Any] = []
        self._sized: list[_Reader] = []
        self._sizes: list[Any] = []
        self._before: list[tuple[Place, str, Any, Any]] = []
        self._generators: list[tuple[Any, Any]] = []

    def refresh(self, modules: Sequence[nn.Module], others: Sequence[object] = ()) -> None:
        """Take values as they are now, of these modules, hooks and optimizers."""
        self._modules, self._functions = modules, (self._function, *others)
        self._read = what_is_read(self._functions, modules)
        self._take_as_they_are(self._look())
        held = list(self._values())
        before = [(place, name, value, _content(value)) for place, name, value in held]
        self._before = [b for b in before if is_plain(b[2]) or b[3] is not None]
        found = {id(g): g for _, _, value in held for g in _generators_in(value)}
        self._generators = [(g, _state_of(g)) for g in found.values()]

    def objects(self) -> Iterator[Any]:
        """Return all that has to be the very object that it was, in one line."""
        taken = map(operator.call, self._take, self._out_of)
        return itertools.chain.from_iterable(taken)

    def sizes(self) -> list[_Reader]:
        """Return what must be equal to what it was: by a function and its argument."""
        return list(self._sized)

    def changed(self) -> str | None:
        """Return what has another value than it had, in words; None if nothing has."""
        if self._is_same():
            return None
        now = self._look()
        for key, place in self._differing(now):
            return _in_words(key, place)
        self._take_as_they_are(now)  # other objects that say the same
        return None

    def drawn(self) -> list[str]:
        """Return which generators the step has drawn from since the values were taken."""
        return [
            f"a {type(generator).__name__} of its own on the host"
            for generator, state in self._generators
            if not _same_state(_state_of(generator), state)
        ]

    def counted(self) -> str | None:
        """Return which number has changed since the values were taken; None if none has."""
        now = self._look()
        for key, place in self._differing(now):
            if key in now and key in self._known and _counts(self._known[key][1], now[key][1]):
                return _in_words(key, place)
        return None

    def put_back(self) -> None:
        """Undo what Python has changed since the values were taken, in plain values."""
        now: dict[int, dict[str, Any]] = {}
        for place, name, value, content in self._before:
            if content is not None:
                _put_numbers_back(value, content)
            if place.is_module:  # whose attributes are put back as a whole
                continue
            if id(place) not in now:
                now[id(place)] = dict(values_in(place, self._read))
            if now[id(place)].get(name, _NOTHING) is not value:
                place.write(name, value)
        for generator, state in self._generators:
            _set_state(generator, state)

    def ran(self) -> None:
        """Note that the step has run: what has changed since it began, it has written itself.

        Not so numbers. A step that changes one cannot be captured, and one that does in another
        kind of call makes the graphs invalid.
        """
        if self._is_same():
            return
        now, numbers = self._look(), {}
        stay = {holder for holder, _ in now} & {holder for holder, _ in self._known}
        for key, place in self._differing(now):
            forms = [found[key][1] for found in (self._known, now) if key in found]
            is_count = any(map(_is_number, forms)) if place.is_module else False
            if key in self._known and (is_count or (len(forms) == 2 and _counts(*forms))):
                numbers[key] = self._known[key]
            else:
                written, holder = written_by(key, place, stay)
                self._written[written] = holder
        self._take_as_they_are(self._look() | numbers)
        if numbers:
            self._sizes = []  # which is never as it was

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

    def _values(self) -> Iterator[tuple[Place, str, Any]]:
        for place in self._places():
            for name, value in values_in(place, self._read):
                if (id(place.holder), name) not in self._written:
                    yield place, name, value

    def _look(self) -> _Known:
        """Return each value by its place and name, in the form in which it is compared."""
        found: _Known = {}
        for place, name, value in self._values():
            form = _form(value, on_host=self._device.type != "cpu")
            form = form if self._is_sure_to_be_read(place, name) else _only_plain(form)
            if form is not _OTHER:
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

    def _take_as_they_are(self, known: _Known) -> None:
        self._known = known
        self._sized = []
        pairs: list[_Reader] = []
        for place in self._places():
            held = values_in(place, self._read)
            values = [(name, value) for name, value in held if (id(place.holder), name) in known]
            for _, value in values:
                pairs += [(tuple, view) for view in _views(value)]
                self._sized += _readers(value, on_host=self._device.type != "cpu")
            names = [name for name, _ in values]
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
            if place.names is None:
                # One that is new hides what the class has, or takes the place of one that is gone.
                self._sized.append((len, table))
            if place.is_module and "training" in table:
                names.insert(0, "training")
            if names:  # of one name alone it would be no tuple
                pairs.append((operator.itemgetter(names[0], *names[1:] or names), table))
        self._take = [take for take, _ in pairs]
        self._out_of = [held for _, held in pairs]
        self._objects = list(self.objects())
        self._sizes = self._sizes_now()


def _in_words(key: Key, place: Place) -> str:
    return f"{key[1]!r} of {place.label}" if key[1] else place.label


def _views(value: Any, within: tuple[int, ...] = ()) -> Iterator[Any]:
    """Return what to go through to see each object in a container, now and later."""
    if not isinstance(value, CONTAINERS) or len(value) > LONGEST or id(value) in within:
        return
    yield value
    if isinstance(value, dict):
        yield value.values()
    for item in items_of(value):
        yield from _views(item, (*within, id(value)))


def _parts(value: Any, within: tuple[int, ...] = ()) -> Iterator[Any]:
    """Return a value and what is in it."""
    yield value
    if isinstance(value, CONTAINERS) and len(value) <= LONGEST and id(value) not in within:
        for item in items_of(value):
            yield from _parts(item, (*within, id(value)))


def _readers(value: Any, *, on_host: bool) -> list[_Reader]:
    """Return how to read what can change in an object that stays the same."""
    return [
        (_bits if isinstance(part, np.ndarray) else contents, part)
        for part in _parts(value)
        if _is_small_array(part) or (on_host and is_frozen(part))
    ]


def _is_small_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.size <= LONGEST and not value.dtype.hasobject


def is_frozen(value: Any) -> bool:
    """Whether a graph on a device keeps the values of a tensor, and not only where it lies.

    Of a scalar on the host a kernel takes the value at its launch. A copy from pinned memory is
    part of the graph, and each replay reads what is there.
    """
    if not isinstance(value, Tensor) or value.device.type != "cpu":
        return False
    return value.dim() == 0 or not value.is_pinned()


def _bits(array: np.ndarray[Any, Any]) -> tuple[Any, ...]:
    return array.dtype.str, array.shape, array.tobytes()


def contents(tensor: Tensor) -> tuple[int, str]:
    """Return what tells that a tensor on the host was written to: its values, if it is small."""
    is_small = tensor.numel() <= LONGEST and tensor.layout is torch.strided
    return tensor._version, str(tensor.tolist()) if is_small else ""


def _form(value: Any, within: tuple[int, ...] = (), *, on_host: bool) -> Any:
    """Return a value as something that is equal for the same value, and reads no other device.

    Args:
        value: Any.
        within: Where the containers are that it is in: one in itself counts by being the same.
        on_host: Whether tensors on the host count by their values.
    """
    kind = type(value)
    if isinstance(value, float | complex):
        # A zero has a sign, and a NaN is the same NaN.
        return (kind, value) if value == value and value else (kind, repr(value))
    if isinstance(value, np.generic):
        return (kind, value.dtype.str, value.tobytes())
    if isinstance(value, np.ndarray) and _is_small_array(value):
        return (kind, *_bits(value))
    if isinstance(value, CONTAINERS) and len(value) <= LONGEST and id(value) not in within:
        now_within = (*within, id(value))
        if isinstance(value, dict):
            pairs = [(k, _form(v, now_within, on_host=on_host)) for k, v in value.items()]
            return (kind, *((_form(k, on_host=on_host), form) for k, form in pairs))
        if isinstance(value, set | frozenset):
            return (kind, frozenset(_form(item, on_host=on_host) for item in value))
        return (kind, *(_form(item, now_within, on_host=on_host) for item in value))
    if kind in _PLAIN or isinstance(value, torch.device):
        return (kind, value)
    if on_host and is_frozen(value):
        return (Identity(value), *contents(value))
    return Identity(value)


def _only_plain(form: Any) -> Any:
    if isinstance(form, Identity):
        return _OTHER
    return tuple(map(_only_plain, form)) if isinstance(form, tuple) else form


def _is_number(form: Any) -> bool:
    kind = form[0] if isinstance(form, tuple) and form else None
    return isinstance(kind, type) and issubclass(kind, _COUNTED)


def _counts(old: Any, new: Any) -> bool:
    """Whether a number is another one, or one in a list or a dictionary, in the same place."""
    if old == new:
        return False
    if _is_number(old) and _is_number(new):
        return True
    if not (isinstance(old, tuple) and isinstance(new, tuple) and old and old[0] is new[0]):
        return False
    if isinstance(old[0], type) and issubclass(old[0], dict):
        known = dict(old[1:])
        return any(_counts(known[key], form) for key, form in new[1:] if key in known)
    if isinstance(old[0], type) and issubclass(old[0], list | deque):
        return any(map(_counts, old[1:], new[1:]))
    return False


def _content(value: Any) -> Any:
    """Return a copy of what holds numbers by key or place; None of other values."""
    if isinstance(value, dict | list | deque) and len(value) <= LONGEST:
        return dict(value) if isinstance(value, dict) else list(value)
    return None


def _put_numbers_back(container: Any, content: Any) -> None:
    """Write numbers to where they were; what was put in or taken out may be for others to see."""
    if isinstance(container, dict):
        pairs = [(key, value) for key, value in content.items() if key in container]
    else:
        pairs = list(enumerate(content)) if len(content) == len(container) else []
    for key, value in pairs:
        if isinstance(value, _COUNTED) and container[key] is not value:
            container[key] = value


def _generators_in(value: Any) -> list[Any]:
    return [
        part
        for part in _parts(value)
        if isinstance(part, random.Random | np.random.Generator | np.random.RandomState)
    ]


def _state_of(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state()
    return generator.bit_generator.state


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


def _same_state(a: Any, b: Any) -> bool:
    return repr(a) == repr(b)


def _kind_in(found: tuple[Place, str]) -> type:
    """Return of what type a value is that only counts if it is a plain one."""
    place, name = found
    if place.in_slots:
        return type(getattr(place.holder, name, None))
    return type(place.table.get(name))


def _cell_in_tuple(cell: Any) -> tuple[Any]:
    return (cell.cell_contents,)
