"""Nothing is compiled while a graph is captured, and what was left alone stays so.

``torch.compiler.set_stance("fail_on_recompile")`` puts torch's own converter in the place of ours,
and that one fails at each frame without compiled code: also at one that `FrameConversion` has
answered is to run as it is, such as the function with the loop over the blocks, or what is at the
recompile limit. So code around blocks that is called under this stance, and what has reached the
limit, goes past torch's wrapper, to the conversion, and that refuses by itself. The stance stays in
force for what is called in it: the blocks, and functions that the user compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from types import FrameType
from typing import Any

import torch

from torchfast.compiler.switched_off import stance_in_force

# Not the stance itself, which is the process's: another thread may be in the middle of compiling.
_IS_REFUSED: ContextVar[bool] = ContextVar("is_refused", default=False)


def stance_forbids() -> bool:
    """Whether a stance is in force under which torch's converter compiles nothing, but fails."""
    return stance_in_force() == "fail_on_recompile"


def run_refusing(
    conversion: Callable[..., Any], function: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Call a function with its compiled code; a frame without goes to the conversion."""
    from torch._C._dynamo.eval_frame import set_eval_frame

    before = set_eval_frame(None)
    # Torch's wrapper does so too: compiled code has no ``finally`` of its own for what it pushes.
    depth = torch._C._functorch.get_dynamic_layer_stack_depth()
    token = _IS_REFUSED.set(True)
    try:
        set_eval_frame(conversion)
        return function(*args, **kwargs)
    finally:
        set_eval_frame(None)
        _IS_REFUSED.reset(token)
        torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        set_eval_frame(before)


def is_refused() -> bool:
    """Whether no frame is to be converted in the call that is running."""
    return _IS_REFUSED.get()


def refuse(frame: FrameType) -> None:
    """Raise what torch raises under the stance, where a frame would be compiled.

    Raises:
        RuntimeError: The frame has tensors, without which torch compiles none.
    """
    from torch._dynamo.convert_frame import has_tensor_in_frame
    from torch._dynamo.trace_rules import check

    code = frame.f_code
    if not check(code) and has_tensor_in_frame(frame):
        raise RuntimeError(
            "torch.compile would have compiled under the stance 'fail_on_recompile': "
            f"{code.co_name} at {code.co_filename}:{frame.f_lineno}"
        )
