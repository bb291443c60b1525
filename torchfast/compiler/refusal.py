"""Nothing is compiled while a graph is captured, and what was left alone stays so.

``torch.compiler.set_stance("fail_on_recompile")`` puts torch's own converter in the place of ours,
and that one fails at each frame without compiled code: also at one that `FrameConversion` has
answered is to run as it is, such as the function with the loop over the blocks. So where code
around blocks is called under this stance, the stance is lifted and each conversion refuses by
itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType

import torch

_IS_REFUSED: ContextVar[bool] = ContextVar("is_refused", default=False)


def stance_forbids() -> bool:
    """Whether a stance is in force under which torch's converter compiles nothing, but fails."""
    from torch._dynamo import eval_frame

    return getattr(eval_frame, "_stance", None) == eval_frame.DynamoStance("fail_on_recompile")


@contextmanager
def refused_by_conversions() -> Iterator[None]:
    """Lift the stance; frame conversions refuse instead, and torch refuses to compile again."""
    from torch._dynamo import config

    token = _IS_REFUSED.set(True)
    try:
        with torch.compiler.set_stance("default"), config.patch(error_on_recompile=True):
            yield
    finally:
        _IS_REFUSED.reset(token)


def is_refused() -> bool:
    """Whether no frame is to be converted."""
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
