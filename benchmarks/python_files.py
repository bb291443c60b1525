"""Python's compiled files of torch, which pip makes when it installs it, and some images lack."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

# What a compiled training and torch's workers import, some of it in the middle of a step.
_IMPORTS = """
import torch._inductor.compile_worker.__main__
from benchmarks.compile_work import import_compiler
from torchfast import Trainer
import_compiler()
if torch.cuda.is_available():
    layer = torch.nn.Linear(64, 64, device="cuda")
    optimizer = torch.optim.AdamW(layer.parameters())
    trainer = Trainer(layer, optimizer, lambda model, x: model(x).relu().sum(), "fast")
    for _ in range(8):
        trainer.step(torch.ones(64, 64, device="cuda"))
"""


def keep_python_files(folder: Path) -> bool:
    """Let the processes to come find torch's sources compiled, as they are where pip put them.

    Where an image leaves these files out (``PYTHONDONTWRITEBYTECODE``), each process compiles
    thousands of sources again, and each start of torch's compile workers takes three times as long.

    Args:
        folder: For these files, where there are none. It has to last as long as the processes.

    Returns:
        Whether there were none.
    """
    if Path(torch.__spec__.cached or "").is_file():
        return False
    os.environ["PYTHONPYCACHEPREFIX"] = str(folder)
    writing = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run([sys.executable, "-c", _IMPORTS], env=writing, check=True)
    return True
