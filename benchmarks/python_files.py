"""Python's compiled files of torch, for installations that have none and cannot keep any.

    python -m benchmarks.python_files [--device cpu]

imports what a compiled training and torch's compile workers import, so that Python writes them.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch

_LIMIT_S = 180.0


@contextmanager
def compiled_python(folder: Path, device: str) -> Iterator[bool]:
    """Let processes find torch's sources compiled, as they are where pip has installed it.

    Installed without (``--no-compile``, as by uv), into a folder that cannot be written or under
    ``PYTHONDONTWRITEBYTECODE``, thousands of sources are compiled again by every process, and each
    start of torch's compile workers takes three times as long.

    Args:
        folder: For these files, if there are none.
        device: Where what imports them trains a little.

    Yields:
        Whether there were none.
    """
    # One that nobody has imported so far: what this process imports it may have written itself.
    one = Path(torch.__path__[0], "_inductor", "compile_fx.py")
    if Path(importlib.util.cache_from_source(str(one))).is_file():
        yield False
        return
    with mock.patch.dict(os.environ, {"PYTHONPYCACHEPREFIX": str(folder)}):
        writing = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        command = [sys.executable, "-m", "benchmarks.python_files", "--device", device]
        try:
            subprocess.run(command, env=writing, check=True, timeout=_LIMIT_S)
        except subprocess.SubprocessError as error:
            print(f"slow: torch's Python was not compiled beforehand: {error}", flush=True)
        yield True


def import_all(device: str) -> None:
    """Import what a compiled training imports, some of it in the middle of a step."""
    import torch._inductor.compile_worker.__main__

    from benchmarks.compile_work import import_compiler
    from torchfast import Plan, Trainer

    import_compiler()
    layer = torch.nn.Linear(64, 64, device=device)
    optimizer = torch.optim.AdamW(layer.parameters())
    # On a CPU the inductor's C++ would take a minute, and has no workers.
    plan = Plan.preset("fast") if device == "cuda" else Plan()
    with Trainer(layer, optimizer, lambda model, x: model(x).relu().sum(), plan) as trainer:
        for _ in range(8):
            trainer.step(torch.ones(64, 64, device=device))


def main() -> None:
    """Import it, with a cache of its own for what is compiled."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        os.environ.pop("TRITON_CACHE_DIR", None)
        import_all(args.device)


if __name__ == "__main__":
    main()
