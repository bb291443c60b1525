"""Checkpoints, data and the ends of epochs on several GPUs; see ``rank_jobs.py``."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

JOB = Path(__file__).parent / "rank_jobs.py"
TIMEOUT_S = 240


def run(folder, device, strategy, num_ranks):
    package = Path(importlib.util.find_spec("torchfast").origin).parents[1]
    paths = [str(package), str(JOB.parent.parent)]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    finished = subprocess.run(
        [*launcher, f"--nproc-per-node={num_ranks}", JOB, folder, device, strategy],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert finished.returncode == 0, f"{finished.stdout[-2000:]}\n{finished.stderr[-6000:]}"


@pytest.mark.requires(gpus=1)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_on_one(tmp_path, strategy):
    run(tmp_path, "cuda", strategy, 1)


@pytest.mark.requires(gpus=2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_on_two(tmp_path, strategy):
    run(tmp_path, "cuda", strategy, 2)
