"""Whether code may read attributes by names that are written nowhere in it.

Such as ``getattr(self, self.kind)``: no look at the code tells which attribute that is.
"""

from __future__ import annotations

import dis
from types import CodeType
from typing import Final

# Functions that take a name from anywhere, or go through all names.
_ANY_NAME: Final = frozenset(
    (
        *("attrgetter", "methodcaller", "getattr_static", "getmembers", "__getattribute__"),
        *("astuple", "fields"),
    )
)
_CODE_IN_STRINGS: Final = frozenset(("eval", "exec"))
_LOOKED_AT: Final = _CODE_IN_STRINGS | {"getattr"}
_MATCH_CLASS: Final = dis.opmap["MATCH_CLASS"]
_CONSTANTS: Final = frozenset(("LOAD_CONST", "LOAD_SMALL_INT", "LOAD_COMMON_CONSTANT"))
_BESIDE_STACK: Final = frozenset(("EXTENDED_ARG", "PRECALL", "CACHE"))


def takes_any_name(code: CodeType) -> bool:
    """Whether it does, itself; not functions that are made in it."""
    if not _ANY_NAME.isdisjoint(code.co_names):
        return True
    # What takes an object apart by its class reads what that class says.
    if _MATCH_CLASS in code.co_code[::2]:
        return True
    if _LOOKED_AT.isdisjoint(code.co_names):
        return False  # most code, for which there is no need to look at each instruction
    depth, begun = 0, list[int]()  # of the stack; where it was before each ``getattr`` was loaded
    before: list[dis.Instruction] = []
    for found in dis.get_instructions(code):
        name, number = found.opname, found.arg
        is_global = name in ("LOAD_GLOBAL", "LOAD_NAME")
        if is_global and found.argval in _CODE_IN_STRINGS:
            return True
        if name.startswith("LOAD") and found.argval == "getattr":
            begun.append(depth)
        depth += dis.stack_effect(found.opcode, number, jump=False)
        if begun and depth <= begun[-1]:
            return True  # it is kept, or given on, to be called elsewhere
        if begun and name.startswith("CALL") and depth == begun[-1] + 1:
            if name != "CALL" or not _is_constant(before, number):
                return True
            begun.pop()
        if name not in _BESIDE_STACK:
            before = [*before[-1:], found]
    return bool(begun)  # another way than one that was understood


def _is_constant(before: list[dis.Instruction], num_arguments: int | None) -> bool:
    """Whether the name that ``getattr`` is called with is one, and the default value, if any."""
    if num_arguments not in (2, 3):
        return False
    name, *default = before[1 - num_arguments :]
    is_text = name.opname == "LOAD_CONST" and isinstance(name.argval, str)
    return is_text and all(found.opname in _CONSTANTS for found in default)
