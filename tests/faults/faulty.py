"""Runs the programs beside this file in processes of their own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import warm_python

HERE = Path(__file__).parent
TIMEOUT_S = 120


def run(program, *arguments, options=(), environment=None, drop=(), fresh=False, **popen):
    """Run a program of this folder, or ``-c`` code; return what it printed.

    Args:
        program: A file beside this one, or Python source if it has more than one line.
        arguments: Its arguments.
        options: Of the interpreter.
        environment: Variables to set.
        drop: Variables to take out.
        fresh: Start an interpreter for it, which takes seconds; with options it is always so.
        popen: Further arguments of ``subprocess.run``.
    """
    package = Path(importlib.util.find_spec("torchfast").origin).parents[1]
    paths = [str(package), str(HERE.parent)]
    variables = {k: v for k, v in os.environ.items() if k not in drop}
    variables |= {"PYTHONPATH": os.pathsep.join(paths), **(environment or {})}
    if not fresh and not options:
        path = program if "\n" in program else HERE / program
        finished = warm_python.run(path, *arguments, env=variables, timeout=TIMEOUT_S, **popen)
    else:
        start = ["-c", program] if "\n" in program else [str(HERE / program)]
        finished = subprocess.run(
            [sys.executable, *options, *start, *map(os.fspath, map(_text, arguments))],
            env=variables,
            capture_output=True,
            text=True,
            errors="surrogateescape",
            timeout=TIMEOUT_S,
            check=False,
            **popen,
        )
    assert finished.returncode == 0, f"{finished.stdout[-2000:]}\n{finished.stderr[-4000:]}"
    return finished


def _text(argument):
    return argument if isinstance(argument, str | os.PathLike) else str(argument)
