"""What a piece of code names, by its own bytecode: attributes, global variables, modules."""

from __future__ import annotations

import dis
import functools
import sys
from inspect import CO_VARARGS, CO_VARKEYWORDS
from types import CodeType
from typing import Any, Final, NamedTuple

from torchfast._core.any_name import takes_any_name

LOADS: Final = frozenset(("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"))
# From 3.12 on the lowest bit of the argument says that a method is called.
HAS_BIT: Final = sys.version_info >= (3, 12)
# What these return may be any object that their caller holds.
_HANDING_ON = frozenset(("getattr", "cast", "next"))
_CALLS = frozenset(("CALL", "CALL_KW", "CALL_FUNCTION_EX"))
_WITH_ALL_NAMES = frozenset(("__dict__", "vars", "asdict"))


# A pattern of these with one place, as ``int(number)``, reads no attribute.
_MATCHED_WHOLE = frozenset(
    (
        *("bool", "bytearray", "bytes", "dict", "float", "frozenset", "int", "list", "set", "str"),
        "tuple",
    )
)


class Names(NamedTuple):
    """What a function names.

    Attributes:
        read: Attributes that it reads; not those that it only calls, or only counts up.
        called: Those that it calls.
        counted: Those that it counts up.
        of_results: Those that it reads of what a call has returned, such as ``model(batch).loss``;
            in ``read`` are the others.
        used: All names, of methods and global variables too.
        global_: Global variables that it reads.
        strings: Those that are constants of it.
        all: Whether it may read all attributes of what it sees.
        is_open: Whether it may read an attribute by a name that is written nowhere in it.
        of_others: Those that it reads, or calls, of other objects than the ``self`` of a method.
        imports: Modules that it imports itself, with how many packages up they are looked for.
    """

    read: frozenset[str]
    called: frozenset[str]
    counted: frozenset[str]
    of_results: frozenset[str]
    used: frozenset[str]
    global_: frozenset[str]
    strings: frozenset[str]
    all: bool
    is_open: bool
    of_others: frozenset[str]
    imports: frozenset[tuple[str, int]]


@functools.lru_cache(maxsize=4096)
def names_of(code: CodeType) -> Names:
    """Return what code names, with the functions that are made in it."""
    read: set[str] = set()
    called: set[str] = set()
    counted: set[str] = set()
    of_results: set[str] = set()
    global_: set[str] = set()
    of_others: set[str] = set()
    imports: set[tuple[str, int]] = set()
    used, strings, others = set(code.co_names), set[str](), []
    hands_on = not used.isdisjoint(_HANDING_ON)
    results = set[str]() if hands_on else _results_in(code)
    before, level, is_matched = None, None, False
    for instruction in dis.get_instructions(code):
        name, number = instruction.opname, instruction.arg or 0
        is_call = name == "LOAD_METHOD" or (HAS_BIT and bool(number & 1))
        # What is loaded to be counted up (``self.calls += 1``) is copied right before.
        if name in LOADS and before is not None and before.opname == "COPY":
            counted.add(instruction.argval)
        elif name in LOADS:
            is_sure = not (hands_on or instruction.is_jump_target)
            is_of_result = is_sure and _gives_result(before, results)
            into = called if is_call else of_results if is_of_result else read
            into.add(instruction.argval)
            if not _is_of_self(before, code):
                of_others.add(instruction.argval)
        elif name in ("LOAD_GLOBAL", "LOAD_NAME"):
            global_.add(instruction.argval)
        elif name == "MATCH_CLASS":  # by keywords, and else by what the class says
            read |= _strings_in(before.argval if before is not None else None)
            is_matched |= bool(number) and (level is None or level.argval not in _MATCHED_WHOLE)
        elif name == "IMPORT_NAME":
            imports.add((instruction.argval, level.argval if level is not None else 0))
        before, level = instruction, before
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            others.append(names_of(constant))
        else:
            strings |= _strings_in(constant)
    if "hasattr" in used:  # what is asked for may come, or go
        asked = _asked_for(code)
        read |= {found for found in (strings if asked is None else asked) if found.isidentifier()}
    for inner in others:
        read |= inner.read
        called |= inner.called
        counted |= inner.counted
        of_results |= inner.of_results
        used |= inner.used
        global_ |= inner.global_
        strings |= inner.strings
        of_others |= inner.of_others
        imports |= inner.imports
    is_all = is_matched or bool(used & _WITH_ALL_NAMES) or any(inner.all for inner in others)
    is_open = takes_any_name(code) or any(inner.is_open for inner in others)
    return Names(
        read=frozenset(read),
        called=frozenset(called),
        counted=frozenset(counted),
        of_results=frozenset(of_results),
        used=frozenset(used),
        global_=frozenset(global_),
        strings=frozenset(strings),
        all=is_all,
        is_open=is_open,
        of_others=frozenset(of_others),
        imports=frozenset(imports),
    )


def _asked_for(code: CodeType) -> set[str] | None:
    """Return what ``hasattr`` is asked for; None where that is not written right there."""
    found, is_next = set[str](), False  # whether the next call is of ``hasattr``
    before: dis.Instruction | None = None
    for instruction in dis.get_instructions(code):
        name = instruction.opname
        if name.startswith("LOAD") and instruction.argval == "hasattr":
            is_next = True
        elif is_next and name.startswith(("PRECALL", "CALL")):
            said = before.argval if before is not None and before.opname == "LOAD_CONST" else None
            if instruction.arg != 2 or not isinstance(said, str):
                return None
            found.add(said)
            is_next = False
        before = instruction
    return found


def _is_of_self(before: dis.Instruction | None, code: CodeType) -> bool:
    """Whether an attribute is loaded of the object that a method of a class was called of."""
    if before is None or not before.opname.startswith(("LOAD_FAST", "LOAD_DEREF")):
        return False
    within = code.co_qualname.rpartition(".")[0]  # empty, or a function, where it is no method
    is_method = bool(within) and not within.endswith("<locals>")
    return is_method and loaded_last(before) == "self" == (*code.co_varnames, "")[0]


def _results_in(code: CodeType) -> set[str]:
    """Return the local variables to which nothing is assigned but what calls return."""
    results: set[str] = set()
    others = {*code.co_varnames[: _num_parameters(code)]}
    before = None
    for instruction in dis.get_instructions(code):
        if instruction.opname.startswith("STORE_FAST"):
            names = instruction.argval  # several, where two instructions have become one
            names = (names,) if isinstance(names, str) else names
            if "LOAD_FAST" in instruction.opname:
                names = names[:1]
            # Behind a jump it may be what another branch has left.
            is_result = not instruction.is_jump_target and _is_call(before) and len(names) == 1
            (results if is_result else others).update(names)
        before = instruction
    return results - others


def _num_parameters(code: CodeType) -> int:
    num = code.co_argcount + code.co_kwonlyargcount
    return num + sum(bool(code.co_flags & f) for f in (CO_VARARGS, CO_VARKEYWORDS))


def _gives_result(instruction: dis.Instruction | None, results: set[str]) -> bool:
    """Whether what an instruction leaves is what a call has returned, and nobody else's."""
    if instruction is None or "LOAD_FAST" not in instruction.opname:
        return _is_call(instruction)
    return loaded_last(instruction) in results


def loaded_last(instruction: dis.Instruction) -> str:
    """Return the local variable that an instruction leaves on top of the stack."""
    names = instruction.argval  # two, where two instructions have become one
    return names if isinstance(names, str) else names[-1]


def _is_call(instruction: dis.Instruction | None) -> bool:
    return instruction is not None and instruction.opname in _CALLS


def _strings_in(constant: Any) -> set[str]:
    """Return the strings of a constant, which may be ``("a", "b")``."""
    if isinstance(constant, str):
        return {constant}
    if isinstance(constant, tuple | frozenset):
        return {found for part in constant for found in _strings_in(part)}
    return set()
