"""Whose wait it is: the user's place that a frame is part of, with what of torch it called."""

from __future__ import annotations

from types import FrameType
from typing import NamedTuple

from torchfast._core.user_code import function_of, module_of, owner_of

# What stands in place of a call or in front of an operator, by which nobody waits.
_BETWEEN = ("torchfast._core.syncs", "torchfast._core.sync_net")
_COMPILERS = ("torch._dynamo", "torch._inductor", "torch._subclasses", "torch.fx", "triton")
_COMPILES = ("torch._dynamo.convert_frame", "torch._inductor.compile_fx")
_GENERATED = "torch._inductor.runtime.compile_tasks"
# The step counters of optimizers and the seeds of loaders are on the host on any machine, so that
# on CUDA nothing would wait.
_OF_THE_HOST = (
    "torch.optim",
    "torch.utils.data",
    # The lengths of packed sequences are on the host, too.
    "torch.nn.utils.rnn",
    "torch.nn.modules.rnn",
)
# Waits in these parts of torch are the user's even where torchfast has called them.
_OF_THE_STEP = ("torch.optim", "torch.autograd", "torch.nn")


class SyncPlace(NamedTuple):
    """A place in the user's code that makes the host wait.

    Attributes:
        kind: The kind of call, a key of `sync_calls.remedy_for`.
        file: The source file, ``"?"`` where there is no Python below.
        line: The line in it.
        function: The function that the line is in.
        via: Where in torch the call is, such as ``"torch.optim.adafactor"``; empty where the user's
            line is the call itself.
        during: What ran it, where that is no step: ``"callbacks"``, ``"transform"``, ...
    """

    kind: str
    file: str
    line: int
    function: str
    via: str
    during: str = ""


def place_of(frame: FrameType | None, kind: str, types: frozenset[str]) -> SyncPlace | None:
    """Return the user's place that a frame is part of; None for a wait that is not the user's."""
    via = ""
    while frame is not None:
        owner, module = owner_of(frame), module_of(frame)
        if module in _BETWEEN:
            frame = frame.f_back
            continue
        if owner == "user":
            if "cuda" not in types and _is_called_by(frame, "torch.utils.data"):
                return None
            return SyncPlace(
                kind, frame.f_code.co_filename, frame.f_lineno, function_of(frame), via
            )
        if owner == "torchfast" and not via.startswith(_OF_THE_STEP):
            return None
        if module.startswith(_COMPILES) or (
            not via and module.startswith(_COMPILERS) and not module.startswith(_GENERATED)
        ):
            return None
        if not via and module.startswith(("torch.", "triton.")):
            via = module
            if "cuda" not in types and via.startswith(_OF_THE_HOST):
                return None
        frame = frame.f_back
    return SyncPlace(kind, "?", 0, "?", via)


def _is_called_by(frame: FrameType | None, module: str) -> bool:
    while frame is not None:
        if module_of(frame).startswith(module):
            return True
        frame = frame.f_back
    return False
