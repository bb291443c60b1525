"""Work in other processes: test files that run themselves and print JSON, and ranks on two GPUs."""

from __future__ import annotations

import faulthandler
import json
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException


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


def begin_rank(rank, store, timeout_s):
    """Begin one of two ranks, on a GPU of its own; what it hangs in is printed, if it does."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    torch.cuda.set_device(rank)
    faulthandler.dump_traceback_later(timeout_s / 3)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl",
        init_method=f"file://{store}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=timeout_s),
    )


def spawned(run, arguments, limit_s):
    """Call ``run(rank, *arguments)`` in a process for each of two ranks, which end in any case.

    Returns:
        How they ended: nothing if each did by itself, in time.
    """
    ranks = multiprocessing.spawn(run, arguments, nprocs=2, join=False)
    until = time.monotonic() + limit_s
    try:
        while not ranks.join(timeout=1.0):
            if time.monotonic() > until:
                return f"the ranks were not done in {limit_s} s"
    except (ProcessRaisedException, ProcessExitedException) as error:
        return str(error)
    finally:
        for process in ranks.processes:
            process.kill()
            process.join()
    return ""
