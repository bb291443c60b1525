"""Processes of their own that begin where ``import torch`` has ended.

To import torch takes a processor seconds, which was a third of all that the tests took. Here one
process imports it once, for each process of pytest, and forks when a test asks for a program. What
a test gets is a process like any other: with variables, a folder and arguments of its own, that can
be killed, that runs its exit functions, and whose memory and threads are nobody else's. It shares
what was decided when its interpreter began, so these tests start an interpreter themselves: those
of imports, of the interpreter's options, of encodings, and of hashes that differ.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent


@cache
def server():
    """Return the socket of the process that forks; it ends with this one."""
    # A packet is one request, however long.
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    number = theirs.fileno()
    process = subprocess.Popen(
        [sys.executable, HERE / "warm_server.py", str(number)],
        pass_fds=[number],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)])},
        stdin=subprocess.DEVNULL,
        cwd=ROOT,
    )
    theirs.close()
    atexit.register(end, ours, process)
    return ours


def end(ours, process):
    ours.close()
    process.wait(10)


class Process:
    """A program that runs, with the attributes of a `subprocess.Popen` that tests ask for."""

    def __init__(
        self,
        program,
        *arguments,
        env=None,
        cwd=None,
        stdout=None,
        stderr=None,
        start_new_session=False,
    ):
        """Start a program.

        Args:
            program: A path, or Python source if it has more than one line.
            arguments: Its arguments.
            env: Its variables; those of this process if None.
            cwd: Its folder.
            stdout: Where its output goes; a pipe that `stdout` reads if None.
            stderr: Where its errors go; where its output goes if None.
            start_new_session: Whether it gets a group of processes of its own.
        """
        is_code = "\n" in str(program)
        words = [os.fspath(a) if isinstance(a, os.PathLike) else str(a) for a in arguments]
        request = {
            "code": program if is_code else None,
            "path": None if is_code else os.path.abspath(program),
            "argv": ["-c" if is_code else os.fspath(program), *words],
            "env": dict(os.environ if env is None else env),
            "cwd": os.fspath(cwd or os.getcwd()),
            "session": start_new_session,
        }
        self.args = request["argv"]
        self.returncode = None
        self.stdout = None
        ends = []
        if stdout is None:
            reading, writing = os.pipe()
            ends.append(writing)
            self.stdout = os.fdopen(reading, errors="surrogateescape")
        else:
            writing = stdout.fileno()
        self._status, status = os.pipe()
        ends.append(status)
        errors = writing if stderr is None else stderr.fileno()
        socket.send_fds(server(), [json.dumps(request).encode()], [writing, errors, status])
        for end in ends:
            os.close(end)
        self._told = b""
        self.pid = int(self._line(60))

    def _line(self, timeout):
        until = None if timeout is None else time.monotonic() + timeout
        while b"\n" not in self._told:
            left = None if until is None else max(0.0, until - time.monotonic())
            if not select.select([self._status], [], [], left)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout)
            told = os.read(self._status, 100)
            assert told, "the process that forks has ended"
            self._told += told
        line, _, self._told = self._told.partition(b"\n")
        return line

    def wait(self, timeout=None):
        """Return the exit code, negative for a signal, when it has ended."""
        if self.returncode is None:
            self.returncode = int(self._line(timeout))
            os.close(self._status)
        return self.returncode

    def poll(self):
        """Return the exit code, None while it runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def run(program, *arguments, timeout=120, check=False, **details):
    """Run a program to its end, as `subprocess.run` does with its output captured as text."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = Process(program, *arguments, stdout=out, stderr=err, **details)
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
            raise
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="surrogateescape"))
    done = subprocess.CompletedProcess(process.args, process.returncode, *texts)
    if check:
        done.check_returncode()
    return done
