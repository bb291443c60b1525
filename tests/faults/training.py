"""Saves and resumes under whatever this process was started with; prints where it got to.

Usage: training.py FOLDER [spawn|lost|unknown]
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys

from faults import states
from torchfast import CheckpointManager
from torchfast.checkpoint import storage


def run(folder):
    """Save two steps, and check what was found before."""
    with CheckpointManager(folder, keep_last=3) as checkpoints:
        found = checkpoints.load()
        start = 0 if found is None else found.step
        if found is not None:
            assert states.are_equal(found.state, states.make(start))
        for step in (start + 1, start + 2):
            state = states.make(step)
            checkpoints.save(state, step, metrics={"loss": 1 / step})
            states.spoil(state)
        checkpoints.wait()
        checkpoints.verify()
        return checkpoints.steps()


def in_another_process(folder):
    """Do it in a process that was spawned."""
    process = multiprocessing.get_context("spawn").Process(target=run, args=(folder,))
    process.start()
    process.join()
    if process.exitcode != 0:
        raise RuntimeError("the spawned process failed")
    return run(folder)


if __name__ == "__main__":
    how = sys.argv[2] if len(sys.argv) > 2 else ""
    if how == "lost":
        os.mkdir("gone")
        os.chdir("gone")
        os.rmdir(os.getcwd())
    if how == "unknown":
        # Here and not from outside: another user may be unable to read what is imported.
        assert storage
        os.umask(0o777)
        os.setgroups([])
        os.setgid(54321)
        os.setuid(54321)
    steps = in_another_process(sys.argv[1]) if how == "spawn" else run(sys.argv[1])
    sys.stdout.write(json.dumps(steps))
