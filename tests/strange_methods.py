"""Methods that go wrong, each in its way, for the tests of the benchmarks."""

from __future__ import annotations

import os
import signal
import time

from benchmarks.job import Job
from benchmarks.methods import Method


def raise_an_error(job: Job) -> None:
    raise RuntimeError("no such kernel\nand a long story")


def hang(job: Job) -> None:
    time.sleep(600)


def die(job: Job) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop_early(job: Job) -> None:
    pass


def die_in_a_block(job: Job) -> None:
    forget_the_update(job, steps=26)
    die(job)


def forget_the_update(job: Job, steps: int = 10**9) -> None:
    for number, batch in enumerate(job.loader(pinned=False)):
        if number == steps:
            break
        loss = job.loss_fn(job.model, batch)
        loss.backward()
        job.tick(loss)


RAISES = Method("raises", raise_an_error, "")
HANGS = Method("hangs", hang, "")
DIES = Method("dies", die, "")
STOPS = Method("stops", stop_early, "")
DIES_LATE = Method("dies late", die_in_a_block, "")
FORGETS = Method("forgets", forget_the_update, "")
NEEDS_MUCH = Method("needs much", forget_the_update, "", needs="no_such_package.at_all")
