"""Whose code a frame runs: the user's, torchfast's, or that of torch and the standard library.

A report that names a line inside of torch helps nobody. What is asked for is the innermost line
that somebody who uses torch wrote: in the model, the loss function, or a library of models.
"""

from __future__ import annotations

import functools
import os
import re
import sysconfig
from pathlib import Path
from types import FrameType
from typing import Literal

import torch

Owner = Literal["user", "torchfast", "library"]

_OURS = str(Path(__file__).parent.parent) + "/"
# Modules without a file of their own, and one that only ever runs what torch.compile made.
_LIBRARIES = ("torch.", "triton.")


@functools.lru_cache(maxsize=4096)
def is_library(file: str) -> bool:
    """Whether a file is torch's, the standard library's or made at run time."""
    if file.startswith(("<frozen", "<string>", "<eval_with_key>")):
        return True
    if file.startswith(_folder(torch.__file__)):
        return True
    standard = sysconfig.get_path("stdlib")
    # Where there is no virtual environment, other packages lie inside of the standard library.
    return file.startswith(standard) and "-packages" not in file[len(standard) :]


def is_installed(file: str) -> bool:
    """Whether a file is of a package that was installed, torch or any other."""
    return "/site-packages/" in file or "/dist-packages/" in file


def is_compiled(file: str) -> bool:
    """Whether a file lies in one of the folders in which torch's compilers keep what they make."""
    own = [os.environ.get(name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")]
    folders = [f"{os.path.abspath(folder)}/" for folder in own if folder]
    return "/torchinductor_" in file or "/.triton/cache/" in file or file.startswith((*folders,))


def is_users(file: str) -> bool:
    """Whether a file is neither a library's in that sense nor torchfast's."""
    return not (file.startswith(_OURS) or is_library(file))


def owner_of(frame: FrameType) -> Owner:
    """Return whose code a frame runs."""
    file = frame.f_code.co_filename
    if file.startswith(_OURS):
        return "torchfast"
    # What torch.compile generates lies in a cache of any place, but is a module of torch's.
    if is_library(file) or module_of(frame).startswith(_LIBRARIES):
        return "library"
    return "user"


def module_of(frame: FrameType) -> str:
    """Return the name of the module whose code a frame runs, empty where it has none."""
    return str(frame.f_globals.get("__name__", ""))


def function_of(frame: FrameType) -> str:
    """Return the name of the function, as the user wrote it.

    Behind a graph break torch.compile goes on in a function of its own, named after the user's.
    """
    name = frame.f_code.co_name
    resumed = re.fullmatch(r"torch_dynamo_resume_in_(.+)_at_\d+", name)
    return resumed[1] if resumed else name


def place_of(frame: FrameType, line: int | None = None) -> str:
    """Return a line of a frame as a message names it; by default the one that it runs."""
    number = frame.f_lineno if line is None else line
    return place_in(frame.f_code.co_filename, number, function_of(frame))


def place_in(file: str, line: int, function: str) -> str:
    """Return a line as a message names it."""
    return f"{Path(*Path(file).parts[-2:])}:{line} ({function})"


def raised_at(error: BaseException) -> str | None:
    """Return the innermost line of the user's that an error came through, if there is one."""
    found, trace = None, error.__traceback__
    while trace is not None:
        if owner_of(trace.tb_frame) == "user":
            found = place_of(trace.tb_frame, trace.tb_lineno)
        trace = trace.tb_next
    return found


def _folder(file: str | None) -> str:
    return (file or "").rpartition("__init__")[0] or "<none>"
