"""Kills a process that saves one checkpoint after the other, at random times.

Usage: killed_at_random.py FOLDER SEED TIMES
"""

from __future__ import annotations

import os
import random
import select
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path

import torch

from faults import states
from torchfast import CheckpointManager

LONGEST_S = 0.3
LAST_STEP = 250


def child(folder, pipe):
    try:
        with CheckpointManager(folder, keep_last=2) as checkpoints:
            for step in range(LAST_STEP):
                state = states.make(step)
                checkpoints.save(state, step)
                states.spoil(state)
                # save() has waited for the one before this.
                os.write(pipe, bytes([step]))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def main(folder, seed, times):
    torch.set_num_threads(1)
    states.several_files()
    generator = random.Random(seed)
    for turn in range(times):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            child(folder, write)
        os.close(write)
        reported = os.read(read, 1)  # the first save has been handed over
        delay = generator.uniform(0, LONGEST_S)
        deadline = time.monotonic() + delay
        while (left := deadline - time.monotonic()) > 0 and select.select([read], [], [], left)[0]:
            reported = os.read(read, 1) or sys.exit("the child ended by itself")
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        while data := os.read(read, 1):
            reported = data
        os.close(read)
        last = reported[0]  # handed over; the one before it was on the disk
        if last == 0:
            with CheckpointManager(folder) as checkpoints:
                found = checkpoints.load()
                assert found is None or states.are_equal(found.state, states.make(found.step))
        else:
            try:
                # The next may have been handed over and written before it was reported.
                states.resume(folder, (last - 1, last, last + 1), keep_last=2)
            except BaseException as error:
                raise RuntimeError(
                    f"seed {seed}, turn {turn}, killed after {delay:.3f} s"
                ) from error
        sys.stdout.write(f"{turn} {last} {delay:.3f}\n")
        shutil.rmtree(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
