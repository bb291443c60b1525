"""Code in a process of its own, whose allocators have the settings of its environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import torch

from torchfast.memory.allocator_environment import VARIABLES
from torchfast.memory.allocator_keys import KEYS

ROOT = Path(__file__).parents[2]
MB = 2**20
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])

BEGIN = """
import json, torch
from torchfast import AllocatorConfig, MemoryMonitor

def settings():
    return torch.cuda.memory._snapshot()["allocator_settings"]

def answer(value):
    print("ANSWER", json.dumps(value))
"""


def child(code, **environ):
    """Run code in a process with these variables; return what it answers."""
    clean = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    clean["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-W", "error::FutureWarning", "-c", BEGIN + textwrap.dedent(code)],
        env=clean | environ,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    return json.loads(line.removeprefix("ANSWER "))


def lacking(name):
    """Return why the torch in use lacks a setting; None if it has it."""
    since = KEYS[name].since
    return f"{name} came with torch {since[0]}.{since[1]}" if since > TORCH else None
