"""Where the values lie that a step may read on the host, and graphs freeze.

In attributes of modules; in what the step's function reaches (its closure, its defaults, its own
attributes, its ``functools.partial``, the objects that it belongs to); in global variables that its
code names; and in attributes of the classes of all these. Of what is no module only what the code
names counts.
"""

from __future__ import annotations

import functools
import inspect
import operator
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from types import (
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    ModuleType,
)
from typing import Any, Final, NamedTuple, TypeAlias

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchfast._core.code_names import Read, names_read, special_methods
from torchfast._core.proxies import is_dead
from torchfast._core.reachable import behind_partials
from torchfast.graphs.holders import (
    AROUND_DATA,
    CONTAINER,
    CONTAINERS,
    HOLDER,
    LONGEST,
    PLAIN,
    READ_BY_VALUE,
    UNSURE,
    WATCHED,
    Kinds,
    is_holder,
    is_of_library,
    is_own_class,
    items_of,
    slots_of,
)
from torchfast.graphs.library_objects import (
    names_of_getters,
    names_of_library,
    of_libraries,
    table_of,
    with_libraries,
)

Key: TypeAlias = tuple[int, str]

NUMBERS: Final = (bool, int, float)
NOTHING: Final = Read(*4 * (frozenset[str](),), all=False, globals=[])
_EVERYTHING = NOTHING._replace(all=True)
CELL: Final = operator.attrgetter("cell_contents")
_NO_DATA = (
    *(FunctionType, classmethod, staticmethod, property, functools.cached_property),
    *(MemberDescriptorType, GetSetDescriptorType),
)
# Their parts settle by themselves, also between steps.
_ONLY_NUMBERS = "torch.nn.parallel"
_FIRST_OF_MODULES = [*vars(nn.Module())]
_OWN_OF_MODULES = frozenset(_FIRST_OF_MODULES)
# Of one of the user's own class the rest counts, such as a count of its steps; of one that is not
# the step's so do its groups, as in a loss that reads the learning rate.
_OWN_OF_OPTIMIZERS = frozenset(("state", "param_groups", "defaults"))
_DEPTH = 6
_COUNTED = -2  # of what is an object more, and holds only what is watched elsewhere
_MOST_OBJECTS = 4096
_ROUNDS = 8
_DEFAULTS = operator.attrgetter("__defaults__", "__kwdefaults__")
_PARTIAL = operator.attrgetter("func", "args", "keywords")


class Place(NamedTuple):
    """What holds a value, with the way to read it; or values by name, where there is no way.

    It was found in a value of another place, ``via``, unless it is where the search begins.
    """

    holder: Any
    label: str
    read: Callable[[Any], Any] | None = None
    is_module: bool = False
    names: tuple[str, ...] | None = None  # which count; None if those do that are read
    in_slots: bool = False
    of_library: bool = False  # so others may use it at the same time
    via: tuple[Place, str] | None = None

    @property
    def table(self) -> dict[str, Any]:
        """Where the values are by name, at any time, if not in slots; a class's is only read."""
        return self.holder if isinstance(self.holder, dict) else vars(self.holder)

    def write(self, name: str, value: Any) -> None:
        """Put a value back, past what a class of its own would do with it."""
        if self.read is CELL:
            self.holder.cell_contents = value
        elif isinstance(self.holder, type):
            setattr(self.holder, name, value)
        elif self.in_slots:
            object.__setattr__(self.holder, name, value)
        elif self.read is None:
            self.table[name] = value

    def remove(self, name: str) -> None:
        """Take a value away that was not there."""
        if self.read is CELL:
            del self.holder.cell_contents
        elif isinstance(self.holder, type):
            delattr(self.holder, name)
        elif self.in_slots:
            object.__delattr__(self.holder, name)
        elif self.read is None:
            del self.table[name]


# Stands for all that is not looked into any more, as there is too much of it.
BEYOND: Final = Place(None, "what is beyond", names=(), in_slots=True)
# A value to look into, so many levels deep, and the place that has it by which name.
_Waiting = tuple[Any, int, tuple[Place, str] | None]


def what_is_read(functions: Sequence[object], modules: Sequence[nn.Module]) -> tuple[Read, bool]:
    """Return what functions and modules may read of what they reach, and whether that is all.

    A function counts only where the step reads its way there: an object of the step's may hold one
    of the loop as well; all do where code reads by names that are written nowhere. Methods count
    where they are named, of any class that is reached.
    """
    read, known, is_all, kinds = NOTHING, None, True, Kinds()
    of_modules = _of_modules(modules, kinds)
    wide, is_met = read, False  # what the way to a function may be
    classes: set[type] = set()
    specials: list[FunctionType] = []
    for number in range(_ROUNDS):  # what is read leads to other functions, which read more
        waiting: list[_Waiting] = [(function, _DEPTH, None) for function in functions]
        waiting += of_modules
        waiting += [(function, _DEPTH - 1, None) for function in read.enclosing]
        for place in _of_globals(read):
            waiting += _inner_of_globals(place, read, {}, kinds)
        everything = with_libraries(_EVERYTHING, read) if is_met else _EVERYTHING
        if known != (now := (read.globals, everything)):
            known = now
            classes, is_all = _classes_reached(waiting.copy(), modules, kinds, everything)
            specials = special_methods(classes)
        is_last = number == _ROUNDS - 1  # not all that is read was found: so any function counts
        deque(_reached(waiting, everything if is_last else wide, {}, kinds), maxlen=0)
        found = names_read(_functions_in(waiting), classes)
        found, is_met = of_libraries(found, [value for value, _, _ in waiting])
        ways = _ways(found, waiting, specials, classes)
        if (found, ways) == (read, wide):
            break
        read, wide = found, ways
    return read, is_all


def _ways(
    read: Read, waiting: Sequence[_Waiting], specials: list[FunctionType], classes: set[type]
) -> Read:
    """Return what may be read on the way to a function, also by special methods: if they run."""
    beside = names_read(specials, classes) if specials else NOTHING
    by_value = any(issubclass(type(value), READ_BY_VALUE) for value, _, _ in waiting)
    if by_value or read.is_open or beside.is_open:
        return with_libraries(_EVERYTHING, read)
    names, called = read.names | beside.names, read.called | beside.called
    return read._replace(names=names, called=called, all=read.all | beside.all)


def most_objects() -> int:
    """Return how many objects are looked into."""
    return _MOST_OBJECTS


def places(
    functions: Sequence[object],
    modules: Sequence[nn.Module],
    read: Read,
    written: Mapping[Key, Any],
) -> Iterator[Place]:
    """Return all places, each once; not those within what the step writes; or `BEYOND` at last."""
    kinds = Kinds()
    waiting: list[_Waiting] = [(function, _DEPTH, None) for function in functions]
    for module in modules:
        place = Place(module, type(module).__name__, is_module=True)
        yield place
        waiting += _inner(place, read, _DEPTH - 1, written, kinds)
    for place in _of_globals(read):
        yield place
        waiting += _inner_of_globals(place, read, written, kinds)
    waiting += [(kind, _DEPTH - 1, None) for kind in dict.fromkeys(map(type, modules))]
    waiting += [(function, _DEPTH - 1, None) for function in read.enclosing]
    optimizers = [function for function in functions if isinstance(function, Optimizer)]
    watched = {id(group) for optimizer in optimizers for group in optimizer.param_groups}
    yield from _reached(waiting, read, written, kinds, watched)


def written_by(key: Key, place: Place, stay: set[int]) -> tuple[Key, Any]:
    """Return what a step has written to get here, with its holder.

    An object that is new, or gone, was put into another one, or taken out. To keep that one would
    keep what it holds, such as a loss with its autograd graph, one for each step.
    """
    while id(place.holder) not in stay and place.via is not None:
        place, name = place.via
        key = (id(place.holder), name)
    return key, place.holder


def values_in(place: Place, read: Read) -> list[tuple[str, Any]]:
    """Return what a place holds that may be read, by name."""
    holder = place.holder
    if place.read is not None:
        try:
            return [("", place.read(holder))]
        except ValueError:  # a cell that is not filled yet
            return []
    if place.in_slots:
        return [(n, getattr(holder, n)) for n in place.names or () if hasattr(holder, n)]
    held = place.table
    if place.names is not None:
        return [(n, held[n]) for n in place.names if n in held]
    if not place.is_module:
        return [(n, v) for n, v in held.items() if _is_read(n, v, read)]
    names = [*held]
    if names[: len(_FIRST_OF_MODULES)] == _FIRST_OF_MODULES:  # as its ``__init__`` leaves them
        found = [(n, held[n]) for n in names[len(_FIRST_OF_MODULES) :]]
    else:
        found = [(n, v) for n, v in held.items() if n not in _OWN_OF_MODULES]
    if type(holder).__module__.startswith(_ONLY_NUMBERS):
        return [(n, v) for n, v in found if type(v) in NUMBERS]
    return found


def counts_in(place: Place, read: Read) -> list[tuple[str, Any]]:
    """Return numbers that code counts up and reads nowhere, by name: no change of one counts."""
    if place.is_module or place.read is not None or read.all:
        return []
    if place.in_slots:
        names = read.counted.intersection(slots_of(type(place.holder)))
        found = [(name, getattr(place.holder, name, None)) for name in names]
    else:
        found = [(name, place.table.get(name)) for name in read.counted]
    return [(name, value) for name, value in found if type(value) in NUMBERS]


def _of_globals(read: Read) -> list[Place]:
    return [
        Place(table, str(table.get("__name__")), names=tuple(sorted(names)))
        for table, names in read.globals
    ]


def _inner(
    place: Place, read: Read, depth: int, written: Mapping[Key, Any], kinds: Kinds
) -> list[_Waiting]:
    """Return the values of a place, but not those that the step writes, to look into them."""
    return [
        (value, depth, (place, name))
        for name, value in values_in(place, read)
        if kinds[type(value)] > WATCHED and (id(place.holder), name) not in written
    ]


def _inner_of_globals(
    place: Place, read: Read, written: Mapping[Key, Any], kinds: Kinds
) -> list[_Waiting]:
    """Return the same of global variables, whose modules are known, each with its own names."""
    found = _inner(place, read, _DEPTH - 1, written, kinds)
    return [one for one in found if not issubclass(type(one[0]), ModuleType)]


def _reached(
    waiting: list[_Waiting],
    read: Read,
    written: Mapping[Key, Any],
    kinds: Kinds,
    watched: Container[int] = frozenset(),
) -> Iterator[Place]:
    """Return the places that values lead to, so many levels deep.

    Args:
        waiting: Where to begin, which grows by what may lead to more.
        read: What counts.
        written: What does not.
        kinds: What is known of types.
        watched: Addresses of parameter groups that are watched elsewhere.
    """
    seen: dict[int, Any] = {}  # held, so that no address is another's
    for value, depth, via in waiting:
        if (depth < 0 and depth != _COUNTED) or id(value) in seen:
            continue
        kind = kinds[type(value)]
        is_sure = kind == HOLDER or depth == _COUNTED
        if kind <= WATCHED or not (is_sure or is_holder(value, kinds)):
            continue
        of_library = kind == UNSURE and is_of_library(value)
        if of_library and not any(names_of_library(value, read)):
            continue  # it is none of the objects that are looked into
        seen[id(value)] = value
        if len(seen) > _MOST_OBJECTS:
            yield BEYOND
            return
        if depth == _COUNTED:
            continue
        if kind == CONTAINER or (kind == UNSURE and isinstance(value, CONTAINERS)):
            items = [item for item in items_of(value) if kinds[type(item)] > WATCHED]
            waiting += [(item, depth - 1, via) for item in items]
        elif inspect.ismethod(value):
            waiting += [(value.__self__, depth, via), (value.__func__, depth, via)]
        else:
            found = _of_library(value, read) if of_library else _places_of(value, read, watched)
            for place in found:
                place = place._replace(via=via)
                yield place
                waiting += _inner(place, read, depth - 1, written, kinds)
            bases = value.__bases__ if isinstance(value, type) else ()
            waiting += [(base, depth, via) for base in (*bases, type(value))]


def _places_of(value: Any, read: Read, watched: Container[int]) -> Iterator[Place]:
    name = type(value).__name__
    if isinstance(value, FunctionType):
        name = value.__qualname__
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        for variable, cell in cells:
            yield Place(cell, f"{variable!r} in the closure of {name}", CELL)
        if value.__defaults__ or value.__kwdefaults__:
            yield Place(value, f"a default value of {name}", _DEFAULTS)
        if attributes := _wanted([*vars(value)], read):
            yield Place(value, name, names=attributes)
    elif isinstance(value, functools.partial):
        yield Place(value, "an argument in a functools.partial", _PARTIAL)
    elif isinstance(value, type):
        data = [n for n, v in vars(value).items() if not isinstance(v, _NO_DATA)]
        yield Place(value, value.__name__, names=_wanted(data, read))
    elif isinstance(value, Optimizer):
        of_others = read.of_others & read.names  # what the user has put into one of a library's
        own = vars(value) if is_own_class(type(value)) else of_others & vars(value).keys()
        names = [n for n in own if n not in _OWN_OF_OPTIMIZERS]
        names += _groups_of(value, watched)
        yield Place(value, name, names=_wanted(names, read))
    else:
        if isinstance(value, AROUND_DATA):  # read by their base's methods, which are a library's
            yield Place(value, name, names=("data", "maps"))
        if hasattr(value, "__dict__"):
            yield Place(value, name)
        if slots := slots_of(type(value)):
            yield Place(value, name, names=_wanted(slots, read), in_slots=True)
        if inherited := names_of_getters(value, read):
            yield _held_by(value, name, inherited)


def _of_library(value: Any, read: Read) -> Iterator[Place]:
    name = type(value).__name__
    names, slots = names_of_library(value, read)
    if issubclass(type(value), ModuleType):  # some of its variables may be known already
        table, name = vars(value), value.__name__
        known = frozenset[str]().union(*(names for held, names in read.globals if held is table))
        yield Place(table, name, names=tuple(n for n in names if n not in known))
    elif names:
        yield _held_by(value, name, names)
    if slots:
        yield Place(value, name, names=slots, in_slots=True, of_library=True)


def _held_by(value: Any, name: str, names: tuple[str, ...]) -> Place:
    if isinstance(value, LRScheduler):  # a step that steps one is not captured
        return Place(value, name, names=names)
    # A weak proxy's object may go, and what it held may not.
    held = table_of(value) if type(value) in weakref.ProxyTypes else value
    return Place(held, name, names=names, of_library=True)


def _groups_of(optimizer: Optimizer, watched: Container[int]) -> list[str]:
    """Return the name of an optimizer's groups, if they are not watched elsewhere."""
    groups = optimizer.param_groups
    return [] if all(id(group) in watched for group in groups) else ["param_groups"]


def _is_read(name: str, value: Any, read: Read) -> bool:
    if name in read.called and callable(value):  # a function in an attribute
        return True
    return read.all or name in read.names


def _wanted(names: Sequence[str], read: Read) -> tuple[str, ...]:
    return tuple(
        n for n in names if (read.all or n in read.names | read.called) and not n.startswith("__")
    )


def _of_modules(modules: Sequence[nn.Module], kinds: Kinds) -> list[_Waiting]:
    """Return the values of modules where a look at the step's code begins."""
    return [
        (value, depth, None)
        for module in modules
        for value in vars(module).values()
        if kinds[type(value)] > WATCHED and (depth := _depth_of(value, kinds)) is not None
    ]


def _depth_of(value: Any, kinds: Kinds) -> int | None:
    """Return how deep to look into a module's value; None where it holds nothing of interest."""
    if kinds[type(value)] != CONTAINER:
        return _DEPTH - 1
    if not 0 < len(value) <= LONGEST:
        return None
    # A dictionary that is filled when it is asked may give other values than it has.
    highest = max([kinds[type(item)] for item in items_of(value)], default=PLAIN)
    if highest == PLAIN:
        return None
    return _COUNTED if highest <= WATCHED else _DEPTH - 1


def _classes_reached(
    waiting: list[_Waiting], modules: Sequence[nn.Module], kinds: Kinds, everything: Read
) -> tuple[set[type], bool]:
    """Return classes whose methods the step may run, and whether these are all."""
    classes, is_all = {type(module) for module in modules}, True
    for place in _reached(waiting, everything, {}, kinds):
        is_all &= place is not BEYOND
        if place.read is None and not isinstance(place.holder, FunctionType):
            # Of a class that the step names, its methods too: it may ask them for what is in it.
            is_class = isinstance(place.holder, type)
            classes.add(place.holder if is_class else type(place.holder))
    return classes, is_all


def _functions_in(waiting: Sequence[_Waiting]) -> list[Any]:
    """Return the functions that the step may run, beside other values."""
    found: list[Any] = []
    for value, _, _ in waiting:
        if is_dead(value):
            continue
        value = behind_partials(value)
        if isinstance(value, Optimizer):
            value = type(value).step
        found.append(value.__func__ if inspect.ismethod(value) else value)
    return found
