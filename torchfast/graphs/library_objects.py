"""Objects of torch's, torchfast's and the standard library's classes, through which a step reads.

Such as ``trainer.num_steps``, ``loader.dataset.epoch``, the value of a ``multiprocessing.Value``.
One holds far more than a step has to do with: a trainer counts its steps, a loader has workers. So
what counts of it is what the step's code names of objects other than the ``self`` of its methods,
and what the properties and methods read that it so names: of those of a library that is found in
their code, as it is of the user's own. A module of the user's that a step has from elsewhere than
its global variables counts in the same way.

Methods count that only read: one that returns nothing, writes, or waits for others in a ``with``
(a queue's, a logger's) tells a step no setting.
"""

from __future__ import annotations

import dis
import functools
import sys
import weakref
from collections.abc import Iterator, Sequence
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final

from torch.optim.lr_scheduler import LRScheduler

from torchfast._core.code_names import Read, functions_of
from torchfast._core.names_in_code import names_of
from torchfast._core.user_code import is_users
from torchfast.graphs.holders import OTHERWISE, is_of_library, is_own_class, slots_of

# What is asked of an object without its being named: ``sampler[0]``, ``len(loader)``.
_UNNAMED: Final = frozenset(("__getitem__", "__len__", "__bool__", "__float__", "__int__"))
_WRITES: Final = ("STORE_ATTR", "STORE_SUBSCR", "STORE_GLOBAL", "DELETE_")
_WAITS: Final = ("BEFORE_WITH", "BEFORE_ASYNC_WITH", "LOAD_SPECIAL")  # by the version of Python
_OF_SCHEDULERS: Final = ("last_epoch", "_last_lr")
_MANAGERS: Final = "multiprocessing.managers"


def is_elsewhere(value: Any) -> bool:
    """Whether it stands for an object of another process, which answers what is asked of it."""
    managers = sys.modules.get(_MANAGERS)
    return managers is not None and issubclass(type(value), managers.BaseProxy)


def of_libraries(read: Read, values: Sequence[Any]) -> tuple[Read, bool]:
    """Return what is read with what getters of libraries read for it, and whether any is met.

    Args:
        read: What functions of the user's read.
        values: What the step reaches.
    """
    # Nearly all are of few types, which tell of all but modules and proxies.
    some = {type(v): v for v in values}
    some.pop(ModuleType, None)
    each = [v for v in values if type(v) in (ModuleType, *weakref.ProxyTypes)]
    met = {_kind_of(value) for value in (*some.values(), *each) if _has_getters(value)}
    getters = frozenset[str]()
    while True:
        found = getters.union(*(_read_by_getters(kind, read, getters) for kind in met))
        if found == getters:
            return read._replace(of_getters=getters), bool(met)
        getters = found


def with_libraries(read: Read, other: Read) -> Read:
    """Return what is read, but of objects of libraries what another one says."""
    return read._replace(of_others=other.of_others, of_getters=other.of_getters)


def table_of(value: Any) -> dict[str, Any]:
    """Return what an object of a library's holds by name, but for what is in slots."""
    found = getattr(value, "__dict__", None)
    return found if isinstance(found, dict) else {}


def names_of_library(value: Any, read: Read) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return which of the names that an object of a library's holds count; and of its slots."""
    held, moved = table_of(value), _moved_by_steps(value, read)
    named = read.of_others | read.of_getters
    slots = [name for name in slots_of(type(value)) if name in named]
    return (
        # All at once: another thread may put more into it meanwhile.
        tuple(name for name in [*held] if name in moved or _counts(name, held.get(name), read)),
        tuple(name for name in slots if _counts(name, getattr(value, name, None), read)),
    )


def names_of_getters(value: Any, read: Read) -> tuple[str, ...]:
    """Return what is read of an object of the user's class by what that inherits of libraries."""
    found = read.of_getters.union(_moved_by_steps(value, read))
    if not found or read.all or not _bases(type(value)):
        return ()
    named = read.names | read.called
    return tuple(name for name in [*table_of(value)] if name in found and name not in named)


def _moved_by_steps(value: Any, read: Read) -> tuple[str, ...]:
    """Return what a scheduler moves on, if the step may be what steps it: no replay would."""
    is_stepped = isinstance(value, LRScheduler) and "step" in read.called
    return _OF_SCHEDULERS if is_stepped else ()


def _counts(name: str, value: Any, read: Read) -> bool:
    if name.startswith("__"):
        return False
    # A name that is only called is some other object's where there is nothing to be called.
    is_meant = name in read.of_others and (read.all or name in read.names or callable(value))
    return is_meant or name in read.of_getters


def _has_getters(value: Any) -> bool:
    """Whether it is of a library's class, or of one of the user's that inherits from one."""
    if is_of_library(value):
        return True
    kind = type(value)
    return is_own_class(kind) and not issubclass(kind, OTHERWISE) and bool(_bases(kind))


def _kind_of(value: Any) -> type:
    """Return its class; of a weak proxy, that of the object."""
    return value.__class__ if type(value) in weakref.ProxyTypes else type(value)


def _bases(kind: type) -> list[type]:
    """Return the classes of libraries that a class is of, or made of."""
    return [cls for cls in kind.__mro__ if cls is not object and not is_own_class(cls)]


def _read_by_getters(kind: type, read: Read, getters: frozenset[str]) -> Iterator[str]:
    """Yield what a class's properties and methods read that are named, of those of libraries."""
    own = read.names | read.called if is_own_class(kind) else read.of_others
    named = own | getters | _UNNAMED
    for cls in _bases(kind):
        for name in named & vars(cls).keys():
            value = vars(cls)[name]
            for function in functions_of(value):
                code = function.__code__
                if is_users(code.co_filename):
                    continue  # whose names are known
                if not isinstance(value, FunctionType) or _only_reads(code):
                    names = names_of(code)
                    yield from names.read | names.called | names.of_results


@functools.lru_cache(maxsize=1024)
def _only_reads(code: CodeType) -> bool:
    """Whether a method may be called for what it says of its object, and not for what it does."""
    before, returns = None, False
    for instruction in dis.get_instructions(code):
        if instruction.opname.startswith((*_WRITES, *_WAITS)):
            return False
        if instruction.opname == "RETURN_CONST":
            returns |= instruction.argval is not None
        elif instruction.opname == "RETURN_VALUE":
            is_none = before is not None and before.opname == "LOAD_CONST" and before.argval is None
            returns |= not is_none
        before = instruction
    return returns
