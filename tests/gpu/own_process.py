"""Test files that run themselves in another process, which prints JSON as its last line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def told_by(file, argument):
    """Run a test file with an argument; return what it has printed last."""
    tests = Path(__file__).parent.parent
    paths = [str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, file, argument],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
