"""Which attributes and global variables code may read: found in the bytecode, running nothing.

An object that a step reaches may hold what the step reads (a weight of the loss) beside what only
the loop around it counts (the steps so far). What no code of the step names, it does not read.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch

from torchfast._core.names_in_code import HAS_BIT, LOADS, Names, loaded_last, names_of
from torchfast._core.proxies import is_dead
from torchfast._core.user_code import is_users, place_in

_MOST_FUNCTIONS = 2000
_INSTALLED = "-packages"  # whose ``__dict__`` is about objects of their own
_TESTS = ("POP_JUMP", "TO_BOOL", "UNARY_NOT")
_BINARY = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow")
# Reached without being named, by Python, for an operator or a ``with``.
_ALWAYS = frozenset(
    (
        *("__call__", "forward", "__getattr__", "__getattribute__", "__getitem__"),
        *("__iter__", "__next__", "__contains__", "__len__", "__enter__", "__exit__"),
        *(f"__{kind}{name}__" for kind in ("", "r", "i") for name in _BINARY),
        *("__neg__", "__pos__", "__abs__", "__round__", "__invert__"),
        *("__float__", "__int__", "__index__", "__bool__"),
        *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"),
    )
)
_OF_AUTOGRAD = ("backward", "setup_context", "vjp", "jvp")  # likewise by torch
_WITH_NAMES_IN_STRINGS = frozenset(("getattr", "attrgetter"))
# Python calls these where an object is made, copied or printed, which a step seldom does.
_SELDOM_RUN = frozenset(
    (
        *("__init__", "__new__", "__post_init__", "__del__", "__init_subclass__"),
        *("__set_name__", "__repr__", "__str__", "__format__", "__copy__", "__deepcopy__"),
        *("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__"),
    )
)


class Read(NamedTuple):
    """What functions may read, and those that they name.

    Attributes:
        names: Of attributes.
        called: Of those that it calls, mostly methods.
        counted: Of those that it counts up and reads nowhere.
        of_results: Those of ``names`` that are read of nothing but what calls have returned: what
            a model returns has mostly nothing to do with an object of the user's that has such an
            attribute, too.
        all: Whether it may be any attribute, by whatever name.
        globals: Variables of modules of the user's own: each module's table, and names in it.
        codes: Where all this was found.
        used: All names in it, of attributes that it only writes too.
        is_open: Whether code of the user's may read more, by names that are written nowhere in it.
        of_others: Those of ``names`` and ``called`` that may be asked of an object of a library's,
            which is never the ``self`` of a method of the user's.
        of_getters: Those that properties and methods of libraries read, where code names them.
        enclosing: Functions of the user's own that have variables around them, or default values.
    """

    names: frozenset[str]
    called: frozenset[str]
    counted: frozenset[str]
    of_results: frozenset[str]
    all: bool
    globals: list[tuple[dict[str, Any], frozenset[str]]]
    codes: frozenset[CodeType] = frozenset()
    used: frozenset[str] = frozenset()
    is_open: bool = False
    of_others: frozenset[str] = frozenset()
    of_getters: frozenset[str] = frozenset()
    enclosing: frozenset[FunctionType] = frozenset()


class Load(NamedTuple):
    """Where code loads an attribute or a variable.

    Attributes:
        code: Of the function.
        line: Of its file.
        asked: The attribute that is asked of it next, as ``mul_`` in ``p.data.mul_(x)``, or None.
        is_tested: Whether it is only asked whether it is true, or None.
        is_called: Whether it is called.
        is_own: Whether it is an attribute of the first argument, which is ``self`` of a method.
    """

    code: CodeType
    line: int
    asked: str | None
    is_tested: bool
    is_called: bool
    is_own: bool

    @property
    def place(self) -> str | None:
        """The line as a message names it; None in an installed package."""
        file = self.code.co_filename
        return None if _INSTALLED in file else place_in(file, self.line, self.code.co_name)


def names_read(functions: Iterable[Any], classes: Iterable[type]) -> Read:
    """Return what functions may read.

    Followed are the functions that they name (global ones, those of modules, methods of the
    classes), what these wrap, and those in their closures. torch, the standard library and
    torchfast are not. Where one of the user's reads an attribute by a string, all their strings
    count: it may have got it from another.

    Args:
        functions: Where it begins, with what is called of the classes without being named.
        classes: Of the objects that they meet.
    """
    waiting = [found for f in functions for found in _with_wrapped(f)]
    every = _beside_torch(classes)
    waiting += _of_classes(every, _ALWAYS)
    of_autograd = (cls for cls in classes if issubclass(cls, torch.autograd.Function))
    waiting += _of_classes(_beside_torch(of_autograd), _OF_AUTOGRAD)
    read: set[str] = set()
    called: set[str] = set()
    counted: set[str] = set()
    of_results: set[str] = set()
    used = set(_ALWAYS)
    strings: set[str] = set()
    of_others: set[str] = set()
    named: set[str] = set()  # by strings
    by_strings = is_all = is_open = False
    variables: dict[int, tuple[dict[str, Any], set[str]]] = {}
    seen: set[CodeType] = set()
    enclosing: set[FunctionType] = set()
    while waiting:
        function = waiting.pop()
        code = function.__code__
        if _is_enclosing(function):  # of one code there may be several
            enclosing.add(function)
        if code in seen or not is_users(code.co_filename):
            continue
        seen.add(code)
        names = names_of(code)
        is_own = _INSTALLED not in code.co_filename
        if len(seen) > _MOST_FUNCTIONS:
            is_all = True
            break
        is_all |= names.all and is_own
        is_open |= names.is_open and is_own
        read |= names.read
        called |= names.called
        counted |= names.counted
        of_results |= names.of_results
        strings |= names.strings
        of_others |= names.of_others
        if is_own:
            for table, found in _variables_of(function, names):
                variables.setdefault(id(table), (table, set()))[1].update(found)
        waiting += _globals_of(function, names)
        waiting += _enclosed_by(function)
        waiting += _of_classes(every, names.used - used)
        used |= names.used
        if names.used & _WITH_NAMES_IN_STRINGS:
            by_strings |= is_own
            named |= names.strings
        if by_strings:
            named |= strings
        read |= named
        waiting += _of_classes(every, {name for name in named - used if name.isidentifier()})
        used |= named
    return Read(
        names=frozenset(read | of_results),
        called=frozenset(called),
        counted=frozenset(counted - read - called - of_results),
        of_results=frozenset(of_results - read - called),
        all=is_all,
        globals=[(table, frozenset(names)) for table, names in variables.values()],
        codes=frozenset(seen),
        used=frozenset(used | strings if "setattr" in used else used),
        is_open=is_open,
        of_others=frozenset(of_others | named),
        enclosing=frozenset(enclosing),
    )


def _beside_torch(classes: Iterable[type]) -> set[type]:
    """Return classes and their bases, without torch's."""
    return {c for cls in classes for c in cls.__mro__ if not c.__module__.startswith("torch.")}


def _is_enclosing(function: FunctionType) -> bool:
    """Whether a function of the user's own has variables around it, or default values."""
    held = function.__closure__ or function.__defaults__ or function.__kwdefaults__
    return bool(held) and _is_own_file(function.__code__.co_filename)


def _is_own_file(file: str) -> bool:
    return is_users(file) and _INSTALLED not in file


def special_methods(classes: Iterable[type]) -> list[FunctionType]:
    """Return methods of the user's that Python calls by itself, for an operator or a ``with``."""
    every = {c for cls in classes for c in cls.__mro__}
    return [
        function
        for cls in every
        for name, value in vars(cls).items()
        if name.startswith("__") and name.endswith("__") and name not in _ALWAYS | _SELDOM_RUN
        for function in functions_of(value)
        if is_users(function.__code__.co_filename)
    ]


def loads_of(name: str, codes: Iterable[CodeType]) -> Iterator[Load]:
    """Yield where code loads an attribute or a variable of a name."""
    waiting = list(codes)
    for code in waiting:  # which grows
        waiting += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        if name not in (*code.co_names, *code.co_freevars):
            continue
        found = [i for i in dis.get_instructions(code) if i.opname != "EXTENDED_ARG"]
        for before, load, then in zip(found, found[1:], found[2:], strict=False):
            is_load = load.opname.startswith("LOAD") and load.opname != "LOAD_CONST"
            if is_load and load.argval == name:
                line = load.positions.lineno if load.positions else None
                asked = then.argval if then.opname in LOADS else None
                is_call = load.opname == "LOAD_METHOD" or then.opname == "PUSH_NULL"
                is_call |= HAS_BIT and load.opname in LOADS and bool((load.arg or 0) & 1)
                yield Load(
                    code,
                    line or code.co_firstlineno,
                    asked,
                    is_tested=then.opname.startswith(_TESTS),
                    is_called=is_call,
                    is_own=before.opname.startswith("LOAD_FAST")
                    and load.opname != "LOAD_SUPER_ATTR"
                    and loaded_last(before) in code.co_varnames[: min(1, code.co_argcount)],
                )


def is_in_strings(name: str, codes: Iterable[CodeType]) -> bool:
    """Whether code may name it in a string, for ``getattr``."""
    return any(name in names_of(code).strings for code in codes)


def _variables_of(
    function: FunctionType, names: Names
) -> list[tuple[dict[str, Any], frozenset[str]]]:
    """Return the variables of modules that a function reads: its own module's, and others'."""
    found = [(function.__globals__, names.global_)]
    # What it imports by ``from module import name`` stands among its names, too.
    of_imports = names.read | names.of_results | names.used
    found += [(vars(m), of_imports) for m in _imported_by(function, names) if is_users_module(m)]
    for table, read in found:  # which grows: a module may be reached through another
        for name in read & table.keys():
            value = table[name]
            if is_users_module(value):
                inner = (vars(value), names.read | names.of_results)
                if all(inner[0] is not known for known, _ in found):
                    found.append(inner)
    return [(table, names & table.keys()) for table, names in found]


def is_users_module(value: Any) -> bool:
    """Whether it is a module of the user's own, and not of an installed package."""
    if is_dead(value) or not isinstance(value, ModuleType):
        return False
    if type(value).__module__.startswith("torch."):  # as ``torch.ops`` is, whose file is nowhere
        return False
    # A package without a file of its own lies in folders.
    file = getattr(value, "__file__", None) or next(iter(getattr(value, "__path__", ())), "")
    return bool(file) and _is_own_file(file)


def _imported_by(function: FunctionType, names: Names) -> list[ModuleType]:
    """Return the modules that a function imports itself, as far as they have been by now."""
    found: dict[str, ModuleType] = {}
    package = str(function.__globals__.get("__package__") or "")
    for name, level in names.imports:
        parents = package.split(".")[: package.count(".") + 2 - level] if level else []
        path = ".".join([*parents, name] if name else parents)
        for known in (path, path.partition(".")[0]):  # ``import a.b`` gives ``a``
            if isinstance(module := sys.modules.get(known), ModuleType):
                found[known] = module
    return [*found.values()]


def _of_classes(classes: Iterable[type], names: Iterable[str]) -> list[FunctionType]:
    return [f for n in names for cls in classes for f in functions_of(vars(cls).get(n))]


def _globals_of(function: FunctionType, names: Names) -> set[Any]:
    """Return global functions, and those of modules, that a function names.

    Not a global function that has the name of a method: ``model.train()`` runs no ``train`` of the
    user's, which is the loop mostly.
    """
    found: set[Any] = set()
    of_globals = map(function.__globals__.get, names.global_)
    for value in (*of_globals, *_imported_by(function, names)):
        if is_dead(value):
            continue
        if isinstance(value, ModuleType) and is_users(getattr(value, "__file__", "") or ""):
            found.update(f for n in names.used for f in _with_wrapped(vars(value).get(n)))
        found.update(_with_wrapped(value))
    return found


def _enclosed_by(function: FunctionType) -> list[FunctionType]:
    """Return the functions that a function has from around it, as one has that wraps another."""
    found: list[FunctionType] = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # it is not filled yet
            found += _with_wrapped(cell.cell_contents)
    return found


def _with_wrapped(value: Any) -> list[FunctionType]:
    """Return a function and what it wraps, which a decorator of a library's runs; [] of others."""
    found: list[FunctionType] = []
    while not is_dead(value) and isinstance(value, FunctionType) and value not in found:
        found.append(value)
        value = vars(value).get("__wrapped__")
    return found


def functions_of(value: Any) -> list[FunctionType]:
    """Return the functions that run where a class's attribute is read, or called."""
    if is_dead(value):
        return []
    if isinstance(value, property):
        value = value.fget
    elif isinstance(value, staticmethod | classmethod):
        value = value.__func__
    elif isinstance(value, functools.cached_property | functools.partialmethod):
        value = value.func
    return _with_wrapped(value)
