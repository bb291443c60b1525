"""Runs commands one after the other on each GPU of a host, side by side on its GPUs.

    PYTHONPATH=. python benchmarks/side_by_side.py LIST [--limit-s 560] [--logs FOLDER]
        [--only NAME ...] [--gpus 2] [--each 1]

A line of the list is ``SECONDS NAME COMMAND``: about how long it takes, what its log is called, and
what a shell is to run; an empty line, or one that begins with ``#``, is nothing. Each command sees
one GPU (or ``--each`` of them) and an equal share of the cores, which are its own. ``PYTHON``
stands for this Python, and ``CARD`` for the model of the GPU in the names of result files: h200, or
cpu without one. A GPU that is free takes the next command that is done within the limit by its
estimate. One that takes more than twice as long, or is at work when the time is over, is ended with
all that it has started. So what is listed first is done first, and the rest in a later run.

What two GPUs of one host do side by side disturbs each other's host a little. Ratios within one
command bear it; do not compare the host's milliseconds of two.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks import results

# What a command may take beyond twice its estimate: a cold start of everything.
GRACE_S = 60.0
# After being asked to end, a command has so long to do so.
ENDING_S = 8.0


class Job(NamedTuple):
    """A command of the list."""

    seconds: float
    name: str
    command: str


def read(path: Path, only: list[str] | None = None) -> list[Job]:
    """Return the jobs of a list, or those of these names.

    Raises:
        SystemExit: A line is no job, two have one name, or a name is not there.
    """
    jobs = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        parts = line.split(maxsplit=2)
        try:
            seconds, name, command = float(parts[0]), parts[1], parts[2]
        except (ValueError, IndexError):
            raise SystemExit(
                f"{path}:{number}: expected SECONDS NAME COMMAND, got {line!r}"
            ) from None
        if name in {job.name for job in jobs}:
            raise SystemExit(f"{path}:{number}: a second {name!r}; give it a name of its own")
        jobs.append(Job(seconds, name, command))
    for name in only or ():
        if name not in {job.name for job in jobs}:
            raise SystemExit(f"{path} has no {name!r}; it has {', '.join(j.name for j in jobs)}")
    return [job for job in jobs if only is None or job.name in only]


class Queue:
    """Jobs that are yet to be taken, and the time there is for them."""

    def __init__(self, jobs: list[Job], limit_s: float, logs: Path) -> None:
        self.left = list(jobs)
        self.codes: dict[str, int] = {}
        self._card = results.card(results.gpu())
        self._logs = logs
        self._started = time.monotonic()
        self._until = self._started + limit_s
        self._lock = threading.Lock()

    def work(self, gpus: str, cores: list[int]) -> None:
        """Run jobs on a GPU, or on some (0,1), and some cores, as long as there is time."""
        while (job := self._take()) is not None:
            begun = time.monotonic()
            code = self._run(job, gpus, cores)
            now = time.monotonic()
            with self._lock:
                self.codes[job.name] = code
                print(
                    f"{job.name:28} on GPU {gpus}: exit status {code} after {now - begun:.0f} s, "
                    f"at {now - self._started:.0f} s",
                    flush=True,
                )

    def _take(self) -> Job | None:
        with self._lock:
            time_left = self._until - time.monotonic()
            for job in self.left:
                if job.seconds <= time_left:
                    self.left.remove(job)
                    return job
        return None

    def _run(self, job: Job, gpus: str, cores: list[int]) -> int:
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpus}
        command = job.command.replace(results.CARD, self._card)
        python = shlex.quote(sys.executable)
        command = re.sub(r"\bPYTHON\b", lambda _: python, command)  # and not in PYTHONPATH
        with (self._logs / f"{job.name}.txt").open("w") as log:
            process = subprocess.Popen(
                ["sh", "-c", command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=results.ROOT,
                start_new_session=True,
                preexec_fn=lambda: os.sched_setaffinity(0, cores),
            )
        limit_s = min(self._until - time.monotonic(), 2 * job.seconds + GRACE_S)
        try:
            return process.wait(max(limit_s, 0.0))
        except subprocess.TimeoutExpired:
            _signal(process, signal.SIGTERM)
            self._wait_for_all(process)
        finally:
            _signal(process, signal.SIGKILL)
        return process.wait()

    @staticmethod
    def _wait_for_all(process: subprocess.Popen[bytes]) -> None:
        """Give a command and all that it has started time to write what they have.

        The shell ends at once, and what it runs may not.
        """
        until = time.monotonic() + ENDING_S
        with contextlib.suppress(ProcessLookupError, PermissionError):
            while time.monotonic() < until:
                process.poll()  # or it would stay in its group
                os.killpg(process.pid, 0)
                time.sleep(0.05)


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to a command and to all that it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def shares(cores: list[int], number: int) -> list[list[int]]:
    """Return as many equal runs of cores; of one core at least."""
    size = max(1, len(cores) // number)
    return [cores[(i * size) % len(cores) :][:size] for i in range(number)]


def run(jobs: list[Job], gpus: int, limit_s: float, logs: Path, each: int = 1) -> Queue:
    """Run jobs, ``each`` on so many of the GPUs, and return what became of them."""
    logs.mkdir(parents=True, exist_ok=True)
    queue = Queue(jobs, limit_s, logs)
    workers = [
        threading.Thread(
            target=queue.work, args=(",".join(map(str, range(at * each, (at + 1) * each))), own)
        )
        for at, own in enumerate(shares(results.cores(), gpus // each))
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return queue


def main(arguments: list[str] | None = None) -> int:
    """Run a list; 1 if a command failed or none was left time for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("list", type=Path)
    parser.add_argument("--limit-s", type=float, default=float("inf"))
    parser.add_argument("--logs", type=Path, default=Path("side-by-side"))
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--gpus", type=int, default=max(1, torch.cuda.device_count()))
    parser.add_argument("--each", type=int, default=1, help="GPUs that a command sees")
    args = parser.parse_args(arguments)
    if not 1 <= args.each <= args.gpus:
        raise SystemExit(f"--each {args.each}: there are {args.gpus} GPUs; take 1 to {args.gpus}")
    queue = run(read(args.list, args.only), args.gpus, args.limit_s, args.logs, args.each)
    if queue.left:
        print(f"no time was left for {', '.join(job.name for job in queue.left)}")
    return int(bool(queue.left) or any(queue.codes.values()))


if __name__ == "__main__":
    sys.exit(main())
