"""Functions that torch.compile runs as they are, whoever calls them and whatever they call."""

from __future__ import annotations

from types import CodeType
from typing import Any

import torch


def leave_to_python(code: CodeType) -> None:
    """Let torch.compile run a function as it is, with all that it calls.

    Unless torch follows the code from that of a function that calls it.
    """
    try:
        frames: Any = torch._C._dynamo.eval_frame
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))
    except (AttributeError, TypeError):  # another torch: it then compiles around the call
        pass
