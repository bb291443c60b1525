"""What the host holds beside tensors: values in attributes that a step reads and a graph freezes.

They are attributes of modules, and what the step's function reaches: its closure, its defaults, its
``functools.partial``, the objects that it belongs to. Of objects that are no modules only what the
step's code names counts: a count of steps that the loop keeps beside is not the step's.

A value counts by type and value, a list or a dictionary by its content, any other object by being
the same; such an object counts in modules and variables only, since a loop keeps losses and batches
beside what the step reads. What the step itself writes (``self.last_loss = loss``) is left out from
then on: an evaluation writes it too, and no replay does.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchfast._core.code_names import names_read
from torchfast.graphs.signature import Identity

_NUMBERS = (bool, int, float)
_PLAIN = frozenset((bool, int, str, bytes, type(None), range, slice))
_VALUES = (bool, int, float, complex, str, bytes, range, slice, Enum, np.generic)
_CONTAINERS = (list, tuple, dict, set, frozenset)
_NAMESPACES = (SimpleNamespace, Namespace)
_WATCHED_ELSEWHERE = (
    *(nn.Module, Tensor, Optimizer, LRScheduler, torch.Generator, torch.amp.GradScaler),
    *(type, ModuleType, np.ndarray),
)
_LIBRARIES = frozenset(("torch", "torchfast", "numpy"))
# Their parts settle by themselves, also between steps.
_ONLY_NUMBERS = "torch.nn.parallel"
_OWN_OF_MODULES = frozenset(vars(nn.Module()))
_LONGEST = 256  # containers of more are data
_DEPTH = 3
_MOST_OBJECTS = 256
_NOTHING = (None, object())
_OTHER = object()
_CELL = operator.attrgetter("cell_contents")
_DEFAULTS = operator.attrgetter("__defaults__", "__kwdefaults__")
_PARTIAL = operator.attrgetter("func", "args", "keywords")

_Key = tuple[int, str]


class _Place(NamedTuple):
    """What holds a value, with the way to read it; or values by name, where there is no way.

    It was found in a value of another place, ``via``, unless it is where the search begins.
    """

    holder: Any
    label: str
    read: Callable[[Any], Any] | None
    is_module: bool = False
    via: tuple[_Place, str] | None = None


# A value to look into, so many levels deep, and the place that has it by which name.
_Waiting = tuple[Any, int, tuple[_Place, str] | None]


@final
class Attributes:
    """Looks at attributes before each replay.

    Args:
        function: The step.
    """

    def __init__(self, function: object) -> None:
        self._function = function
        self._modules: Sequence[nn.Module] = ()
        self._written: dict[_Key, Any] = {}  # with the holder, so that the address stays its own
        self._read: frozenset[str] | None = frozenset()
        self._known: dict[_Key, tuple[_Place, Any]] = {}
        self._take: list[Callable[[Any], Any]] = []
        self._out_of: list[Any] = []
        self._objects: list[Any] = []
        self._tables: list[dict[str, Any]] = []
        self._sizes: list[int] = []

    def refresh(self, modules: Sequence[nn.Module]) -> None:
        """Take attributes as they are now, of these modules."""
        self._modules = modules
        self._read = names_read(*_code_of(self._function, modules))
        self._take_as_they_are(self._look())

    def objects(self) -> Iterator[Any]:
        """Return all that has to be the very object that it was, in one line."""
        taken = map(operator.call, self._take, self._out_of)
        return itertools.chain.from_iterable(taken)

    def changed(self) -> str | None:
        """Return what has another value than it had, in words; None if nothing has."""
        if self._is_same():
            return None
        now = self._look()
        for key, place in self._differing(now):
            return f"{key[1]!r} of {place.label}" if key[1] else place.label
        self._take_as_they_are(now)  # other objects that say the same
        return None

    def ran(self) -> None:
        """Note that the step has run: what has changed since it began, it has written itself.

        Not so numbers of modules. A step that changes one cannot be captured, and one that does in
        another kind of call makes the graphs invalid.
        """
        if self._is_same():
            return
        now, numbers = self._look(), {}
        stay = {holder for holder, _ in now} & {holder for holder, _ in self._known}
        for key, place in self._differing(now):
            forms = [found[key][1] for found in (now, self._known) if key in found]
            if (
                key in self._known
                and place.is_module
                and not {*_NUMBERS}.isdisjoint(map(_kind, forms))
            ):
                numbers[key] = self._known[key]
            else:
                written, holder = _written_by(key, place, stay)
                self._written[written] = holder
        self._take_as_they_are(self._look() | numbers)
        if numbers:
            self._sizes = []  # which is never as it was

    def _differing(self, now: dict[_Key, tuple[_Place, Any]]) -> list[tuple[_Key, _Place]]:
        return [
            (key, found[key][0])
            for key, found in {
                **dict.fromkeys(self._known, self._known),
                **dict.fromkeys(now, now),
            }.items()
            if now.get(key, _NOTHING)[1] != self._known.get(key, _NOTHING)[1]
        ]

    def sizes(self) -> list[tuple[Callable[[Any], int], Any]]:
        """Return what must be of the size that it is: by a function and its argument."""
        return [(len, held) for held in self._tables]

    def _is_same(self) -> bool:
        try:
            now = list(self.objects())
        except (AttributeError, KeyError, ValueError):  # one is gone
            return False
        known = self._objects
        is_same = len(now) == len(known) and all(map(operator.is_, now, known))
        return is_same and [*map(len, self._tables)] == self._sizes

    def _look(self) -> dict[_Key, tuple[_Place, Any]]:
        """Return each value by its place and name, in the form in which it is compared."""
        return {
            key: (place, _form(value) if place.is_module else _plain_form(value, place))
            for place in self._places()
            for name, value in _values_in(place, self._read)
            if (key := (id(place.holder), name)) not in self._written
        }

    def _take_as_they_are(self, known: dict[_Key, tuple[_Place, Any]]) -> None:
        self._known = known
        self._tables = []
        pairs: list[tuple[Callable[[Any], Any], Any]] = []
        for place in self._places():
            values = [
                (name, value)
                for name, value in _values_in(place, self._read)
                if (id(place.holder), name) in known
            ]
            pairs += [(tuple, view) for _, value in values for view in _views(value)]
            names = [name for name, _ in values]
            if place.read is None and not hasattr(place.holder, "__dict__"):
                if names:
                    get = operator.attrgetter(names[0], *names[1:] or names)
                    pairs.append((get, place.holder))
            elif place.read is None:
                held = vars(place.holder)
                # One that is new hides what the class has, or takes the place of one that is gone.
                self._tables.append(held)
                if place.is_module and "training" in held:
                    names.insert(0, "training")
                if names:  # of one name alone it would be no tuple
                    pairs.append((operator.itemgetter(names[0], *names[1:] or names), held))
            elif names:
                # The others return a new tuple each time, of objects that stay the same.
                read = _cell_in_tuple if place.read is _CELL else place.read
                pairs.append((read, place.holder))
        self._take = [take for take, _ in pairs]
        self._out_of = [held for _, held in pairs]
        self._objects = list(self.objects())
        self._sizes = [*map(len, self._tables)]

    def _places(self) -> Iterator[_Place]:
        """Return all places, each once."""
        waiting: list[_Waiting] = [(self._function, _DEPTH, None)]
        for module in self._modules:
            place = _Place(module, type(module).__name__, None, is_module=True)
            yield place
            waiting += _inner(place, None, _DEPTH - 1, self._written)
        yield from _reached(waiting, self._read, self._written)


def _written_by(key: _Key, place: _Place, stay: set[int]) -> tuple[_Key, Any]:
    """Return what a step has written to get here, with its holder.

    An object that is new, or gone, was put into another one, or taken out. To keep that one would
    keep what it holds, such as a loss with its autograd graph, one for each step.
    """
    while id(place.holder) not in stay and place.via is not None:
        place, name = place.via
        key = (id(place.holder), name)
    return key, place.holder


def _inner(
    place: _Place, names: frozenset[str] | None, depth: int, written: Mapping[_Key, Any]
) -> list[_Waiting]:
    """Return the values of a place, but not those that the step writes, to look into them."""
    return [
        (value, depth, (place, name))
        for name, value in _values_in(place, names)
        if (id(place.holder), name) not in written
    ]


def _reached(
    waiting: list[_Waiting], names: frozenset[str] | None, written: Mapping[_Key, Any]
) -> Iterator[_Place]:
    """Return the places that values lead to, so many levels deep."""
    seen: dict[int, Any] = {}  # held, so that no address is another's
    for value, depth, via in waiting:  # which grows
        if depth < 0 or id(value) in seen or not _is_holder(value):
            continue
        seen[id(value)] = value
        if len(seen) > _MOST_OBJECTS:
            return
        if isinstance(value, _CONTAINERS):
            waiting += [(item, depth - 1, via) for item in _items(value)]
        elif inspect.ismethod(value):
            waiting += [(value.__self__, depth, via), (value.__func__, depth, via)]
        else:
            for found in _places_of(value):
                place = found._replace(via=via)
                yield place
                waiting += _inner(place, names, depth - 1, written)


def _places_of(value: Any) -> Iterator[_Place]:
    if isinstance(value, FunctionType):
        name = value.__qualname__
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        for variable, cell in cells:
            yield _Place(cell, f"{variable!r} in the closure of {name}", _CELL)
        if value.__defaults__ or value.__kwdefaults__:
            yield _Place(value, f"a default value of {name}", _DEFAULTS)
    elif isinstance(value, functools.partial):
        yield _Place(value, "an argument in a functools.partial", _PARTIAL)
    else:
        yield _Place(value, type(value).__name__, None)


def _values_in(place: _Place, names: frozenset[str] | None) -> list[tuple[str, Any]]:
    """Return what a place holds that may be read, by name."""
    holder = place.holder
    if place.read is not None:
        try:
            return [("", place.read(holder))]
        except ValueError:  # a cell that is not filled yet
            return []
    held = _held_by(holder)
    if not place.is_module:
        return [(n, v) for n, v in held.items() if names is None or n in names]
    found = [(n, v) for n, v in held.items() if n not in _OWN_OF_MODULES]
    if type(holder).__module__.startswith(_ONLY_NUMBERS):
        return [(n, v) for n, v in found if type(v) in _NUMBERS]
    return found


def _code_of(function: object, modules: Sequence[nn.Module]) -> tuple[list[Any], set[type]]:
    """Return functions that the step may run, and classes whose methods it may."""
    functions: list[Any] = []
    classes: set[type] = set()
    waiting: list[_Waiting] = [(function, _DEPTH, None)]
    for module in modules:
        classes.add(type(module))
        waiting += [(v, _DEPTH - 1, None) for v in vars(module).values() if not _is_plain(v)]
    for place in _reached(waiting, None, {}):
        if place.read is None:
            classes.add(type(place.holder))
    for value, _, _ in waiting:
        while isinstance(value, functools.partial):
            value = value.func
        functions.append(value.__func__ if inspect.ismethod(value) else value)
    return functions, classes


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, _VALUES)


def _is_holder(value: Any) -> bool:
    """Whether values that a step reads may be in it, and not only what else is watched."""
    kind = type(value)
    if kind in _CONTAINERS or isinstance(value, _CONTAINERS):
        return len(value) <= _LONGEST
    if isinstance(value, FunctionType | functools.partial) or inspect.ismethod(value):
        return True
    if _is_plain(value) or isinstance(value, _WATCHED_ELSEWHERE):
        return False
    if not isinstance(getattr(value, "__dict__", None), dict) and not _slots_of(kind):
        return False
    owner = kind.__module__.partition(".")[0]
    return kind in _NAMESPACES or not (owner in _LIBRARIES or owner in sys.stdlib_module_names)


def _held_by(holder: Any) -> dict[str, Any]:
    """Return the attributes of an object by name, where they are its own."""
    if hasattr(holder, "__dict__"):
        held: dict[str, Any] = vars(holder)
        return held
    return {n: getattr(holder, n) for n in _slots_of(type(holder)) if hasattr(holder, n)}


def _slots_of(kind: type) -> list[str]:
    """Return the names of a class's slots, as ``dataclass(slots=True)`` makes them."""
    found: list[str] = []
    for cls in kind.__mro__:
        slots = vars(cls).get("__slots__", ())
        found += (slots,) if isinstance(slots, str) else tuple(slots)
    return [name for name in found if not name.startswith("__")]


def _items(value: Any) -> list[Any]:
    return [*value.values()] if isinstance(value, dict) else [*value]


def _views(value: Any, within: tuple[int, ...] = ()) -> Iterator[Any]:
    """Return what to go through to see each object in a container, now and later."""
    if not isinstance(value, _CONTAINERS) or len(value) > _LONGEST or id(value) in within:
        return
    yield value
    if isinstance(value, dict):
        yield value.values()
    for item in _items(value):
        yield from _views(item, (*within, id(value)))


def _form(value: Any, within: tuple[int, ...] = ()) -> Any:
    """Return a value as something that is equal for the same value, and reads no tensor.

    Args:
        value: Any.
        within: Where the containers are that it is in: one in itself counts by being the same.
    """
    kind = type(value)
    if isinstance(value, float | complex):
        # A zero has a sign, and a NaN is the same NaN.
        return (kind, value) if value == value and value else (kind, repr(value))
    if isinstance(value, np.generic):
        return (kind, value.dtype.str, value.tobytes())
    if isinstance(value, _CONTAINERS) and len(value) <= _LONGEST and id(value) not in within:
        now_within = (*within, id(value))
        if isinstance(value, dict):
            return (kind, *((_form(k), _form(v, now_within)) for k, v in value.items()))
        if isinstance(value, set | frozenset):
            return (kind, frozenset(map(_form, value)))
        return (kind, *(_form(item, now_within) for item in value))
    if kind in _PLAIN or isinstance(value, torch.device):
        return (kind, value)
    return Identity(value)


def _plain_form(value: Any, place: _Place) -> Any:
    """Return a value outside of modules: of other objects only which one a variable refers to.

    What a loop keeps beside (losses, batches) lies about there, new in each step.
    """
    form = _form(value)
    if isinstance(form, Identity):
        return _OTHER if place.read is None else form
    return _only_plain(form)


def _only_plain(form: Any) -> Any:
    if isinstance(form, Identity):
        return _OTHER
    return tuple(map(_only_plain, form)) if isinstance(form, tuple) else form


def _kind(form: Any) -> Any:
    return form[0] if isinstance(form, tuple) else None


def _cell_in_tuple(cell: Any) -> tuple[Any]:
    return (cell.cell_contents,)
