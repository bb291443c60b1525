"""Ending the waits of this process for other ranks, from another thread.

A collective waits in C++, where no exception of Python reaches it. NCCL's can be aborted: their
kernels end, and with them whatever the host waits for. Gloo's cannot (its ``abort`` does nothing),
but they end with an error when a connection does. So the connections between two ranks are shut
down. Which of a process's they are, neither torch nor gloo says; the two ends of one say the same
two addresses, so ranks that tell each other theirs know which they have in common.

All groups are of no use behind it. Connections are found where there is ``/proc``, as on Linux.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, Final

from torch.distributed import distributed_c10d

from torchfast.parallel.rank_store import innermost

# An end: the own address and port, and those of the other side.
Ends = tuple[str, int, str, int]

_DESCRIPTORS: Final = "/proc/self/fd"
_MAPPED: Final = "::ffff:"  # an address of IPv4 as one of IPv6


def connections(store: Any) -> list[Ends]:
    """Return the ends of this process's connections but those to the ranks' store."""
    port = _port_of(store)
    found = []
    for ends, connection in _connections():
        connection.close()
        if port not in (ends[1], ends[3]):
            found.append(ends)
    return found


def break_off(theirs: Iterable[Ends]) -> None:
    """Shut down the connections of which another process has the other end."""
    shared = {(host, port, own_host, own_port) for own_host, own_port, host, port in theirs}
    for ends, connection in _connections():
        with connection:
            if ends in shared:
                with suppress(OSError):  # the other side was faster
                    connection.shutdown(socket.SHUT_RDWR)


def abort_groups() -> list[threading.Thread]:
    """Abort the collectives of all groups on the device, and return the threads that do it.

    One for each: an abort waits for kernels, which may stand behind another group's.
    """
    threads = [
        threading.Thread(target=_abort, args=(group,), name="torchfast-abort", daemon=True)
        for group in list(distributed_c10d._world.pg_names)
    ]
    for thread in threads:
        thread.start()
    return threads


def _abort(group: Any) -> None:
    with suppress(RuntimeError):  # not in time, or aborted already
        group.abort()


def _connections() -> Iterator[tuple[Ends, socket.socket]]:
    """Yield the ends of each TCP connection of this process, and what is to be closed by whom."""
    try:
        names = os.listdir(_DESCRIPTORS)
    except OSError:
        return
    for name in names:
        try:
            if not os.readlink(f"{_DESCRIPTORS}/{name}").startswith("socket:"):
                continue
            found = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # closed meanwhile
            continue
        try:
            if found.family not in (socket.AF_INET, socket.AF_INET6):
                raise OSError
            ends = (*_address(found.getsockname()), *_address(found.getpeername()))
        except OSError:  # it listens, or is over
            found.close()
            continue
        yield ends, found


def _address(name: tuple[Any, ...]) -> tuple[str, int]:
    return str(name[0]).removeprefix(_MAPPED), int(name[1])


def _port_of(store: Any) -> int | None:
    """Return the port of a store that has one; ends of its connections are not of ranks."""
    return getattr(innermost(store), "port", None)
