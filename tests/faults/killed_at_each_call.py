"""Kills a save at each of its system calls, one child process for each.

The children are forked, so that torch is imported once. Prints the number of calls and where each
resumed; ends with an error if one of them could not go on.

Usage: killed_at_each_call.py FOLDER {blocking,asynchronous} {4,3}

The folder has the steps 2 and 3, so that 4 is a new one and 3 replaces the one that is there.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import traceback
from pathlib import Path

import torch

from faults import states
from faults.ending import die_at
from torchfast import CheckpointManager

MOST_CALLS = 400
OPTIONS = {"keep_last": 2}


def child(folder, number, step, *, blocking):
    status = 1
    try:
        checkpoints = CheckpointManager(folder, **OPTIONS)
        die_at(number)
        state = states.make(4)
        checkpoints.save(state, step, blocking=blocking)
        states.spoil(state)
        checkpoints.close()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def main(root, mode, step):
    torch.set_num_threads(1)  # a fork takes no pool of threads along
    states.several_files()
    template = root / "template"
    with CheckpointManager(template, **OPTIONS) as checkpoints:
        for number in (1, 2, 3):
            checkpoints.save(states.make(number), number, blocking=True)
    resumed = []
    for number in range(MOST_CALLS):
        folder = root / "run"
        shutil.copytree(template, folder)
        pid = os.fork()
        if pid == 0:
            child(folder, number, step, blocking=mode == "blocking")
        _, status = os.waitpid(pid, 0)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        if not killed and status != 0:
            raise RuntimeError(f"the child that should die at call {number} failed by itself")
        try:
            # What is under step 3 may be the old or the new.
            contents = (3, 4) if step == 3 else None
            resumed.append(states.resume(folder, (3, step), contents, **OPTIONS))
        except BaseException as error:
            left = sorted(os.listdir(folder))
            raise RuntimeError(f"killed at call {number}, which left {left}") from error
        shutil.rmtree(folder)
        if not killed:
            sys.stdout.write(json.dumps(resumed))
            return
    raise RuntimeError(f"a save makes more than {MOST_CALLS} calls")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
