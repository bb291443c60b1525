"""Whose call a region serves: that of its own module, or of a shallow copy.

``module(x)`` calls what stands in the object's ``_compiled_call_impl``, and does not say which
module was called. A shallow copy of the ``__dict__``, such as ``nn.DataParallel`` makes for each
device, has the same region there, which would compute with the parameters of the module that was
copied: so does what ``module.compile()`` makes. No attribute tells the two apart, so a region looks
at the call that it is in (0.5 µs). In code that torch traces there is no such call; there the
tracer is asked, while it traces, and nothing of it is left in the compiled code.
"""

from __future__ import annotations

from types import FrameType
from typing import Any

from torch import nn

_CALL = nn.Module._wrapped_call_impl.__code__


def called_in(frame: FrameType, module: Any) -> Any:
    """Return the module whose call a frame is; the one that is given if it is no such call."""
    code = frame.f_code
    # By its name, as torch may run it in a form of its own.
    if code.co_name == _CALL.co_name and code.co_filename == _CALL.co_filename:
        return frame.f_locals.get("self", module)
    return module


def leave_copies_alone() -> None:
    """In ``Region.__call__``, where torch traces it: end the graph unless it is the module's call.

    The call then runs as it is.
    """
    from torch._dynamo.comptime import comptime

    comptime(_check)


def _check(context: Any) -> None:
    try:
        region, called = (_self(context, level) for level in (1, 2))
        is_own = region.module is called
    except (AttributeError, KeyError):  # something else has called it
        is_own = False
    if not is_own:
        context.graph_break("a shallow copy of a compiled module is called, and is not traced")


def _self(context: Any, level: int) -> Any:
    """Return ``self`` of a function that is traced, so many calls up."""
    variable = context.get_local("self", stacklevel=level)
    return variable._i_will_not_complain_if_bc_breaks_VariableTracker().value
