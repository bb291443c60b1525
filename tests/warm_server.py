"""Started by `warm_python`: imports torch once, and forks a process for each program it is sent.

Usage: warm_server.py SOCKET, a descriptor of a socket over which the requests come.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from types import ModuleType

import torch
import torch._dynamo
import torch.utils.data

import costs
import torchfast


def next_program(requests):
    """Return in a new process for each program, with what to run; ends when nobody asks."""
    # A watcher that ends is nobody's to wait for.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, 1 << 20, 8)
        if not message:
            os._exit(0)
        if os.fork() == 0:
            requests.close()
            return watched(json.loads(message), *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def watched(request, out, err, status):
    """Return in the process of the program; the one before it stays to tell of its end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        os.close(status)
        os.dup2(out, 1)
        os.dup2(err, 2)
        for descriptor in (out, err):
            os.close(descriptor)
        return request
    for descriptor in (out, err):
        os.close(descriptor)
    os.write(status, b"%d\n" % pid)
    _, ended = os.waitpid(pid, 0)
    os.write(status, b"%d\n" % os.waitstatus_to_exitcode(ended))
    os._exit(0)


def surroundings(request):
    """Have the program find what it would find in a process that was started for it."""
    if request["session"]:
        os.setsid()
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    first = os.path.dirname(request["path"]) if request["path"] else ""
    sys.path[:1] = [first, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv = request["argv"]
    main = ModuleType("__main__")
    main.__builtins__ = __builtins__
    sys.modules["__main__"] = main
    if request["path"]:
        main.__file__ = request["path"]
        with open(request["path"], encoding="utf-8") as file:
            source = file.read()
    else:
        source = request["code"]
    return compile(source, request["path"] or "<string>", "exec", dont_inherit=True), vars(main)


if __name__ == "__main__":
    torch.set_num_threads(1)  # a fork takes no pool of threads along
    costs.leave_out()
    assert torchfast.Trainer, torchfast.CheckpointManager
    exec(*surroundings(next_program(socket.socket(fileno=int(sys.argv[1])))))
