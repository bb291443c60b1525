"""Whose wait it is: the user's place that a frame is part of, with what of torch it called."""

from __future__ import annotations

from types import FrameType
from typing import NamedTuple

from torchfast._core.user_code import function_of, is_installed, module_of, owner_of

# What stands in place of a call or in front of an operator, by which nobody waits.
_BETWEEN = ("torchfast._core.syncs", "torchfast._core.sync_net")
# What torchfast's modes do with each call of the user's: while a step warms up, and in recompute.
_MODES = ("__torch_function__", "__torch_dispatch__")
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
        called_from: Where the file is of an installed package, the nearest line that called it and
            is of none, as ``file:line``; empty where there is none.
    """

    kind: str
    file: str
    line: int
    function: str
    via: str
    during: str = ""
    called_from: str = ""


def place_of(frame: FrameType | None, kind: str, types: frozenset[str]) -> SyncPlace | None:
    """Return the user's place that a frame is part of; None for a wait that is not the user's."""
    via = ""
    while frame is not None:
        owner, module = owner_of(frame), module_of(frame)
        if module in _BETWEEN or (owner == "torchfast" and frame.f_code.co_name in _MODES):
            frame = frame.f_back
            continue
        if owner == "user":
            if "cuda" not in types and _is_called_by(frame, "torch.utils.data"):
                return None
            file, line, function = frame.f_code.co_filename, frame.f_lineno, function_of(frame)
            return SyncPlace(
                kind, file, line, function, via, called_from=_outside_of_packages(frame)
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


def _outside_of_packages(frame: FrameType | None) -> str:
    """Return who calls a line of an installed package: of a progress bar, its own helps little."""
    if frame is None or not is_installed(frame.f_code.co_filename):
        return ""
    while frame is not None:
        file = frame.f_code.co_filename
        if not is_installed(file) and owner_of(frame) == "user":
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _is_called_by(frame: FrameType | None, module: str) -> bool:
    while frame is not None:
        if module_of(frame).startswith(module):
            return True
        frame = frame.f_back
    return False
