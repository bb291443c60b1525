"""The folder of the compile cache: who may have written in it, and how a file gets there whole.

What lies in this folder runs as this user, so a file is read only if nobody else can have written
it: folder and file belong to this user, nobody else may write to them, and neither is a symbolic
link. This is asked of what has been opened, never of a path, which may be another file by then; and
all goes through the descriptor of the folder, so exchanging the folder afterwards changes nothing.

A file is written under a name of its own, put on the disk, and renamed: whoever reads sees the
whole old one or the whole new one, on a network file system too. One process a node writes at a
time, held apart by a lock of the system, which ends with the process whatever its end was. The name
of the node is part of the lock's and of the temporary names: locks seldom reach across nodes. Where
there are none at all, files are as whole, and only what two wrote at the same moment is not merged.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import re
import stat
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Literal, Self, final

from typing_extensions import override

from torchfast._core.closing import Closing
from torchfast._core.replacing import PIECE_BYTES, replacing, write_all

Lock = Literal["held", "busy", "none"]
_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH
_LEFT_BEHIND_S: Final = 24 * 3600.0
_POLL_S: Final = 0.02
_TEMPORARY: Final = re.compile(r"\.writing-[A-Za-z0-9-]{1,40}-[0-9a-f]{32}\Z")
# What a system without locks answers; any other refusal is somebody who holds it.
_NO_LOCKS: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class Unusable(Exception):  # noqa: N818 - it is caught where it is raised, and told as a value
    """What is in the folder cannot be used; the message is the reason. Never leaves this room."""


@final
class StoreFolder(Closing):
    """An opened folder that only this user can have written in.

    Args:
        path: The folder.
        create: Make it, with what is above it, if it is not there.

    Raises:
        FileNotFoundError: It is not there.
        Unusable: Somebody else may have written in it.
        OSError: It cannot be made or opened.
    """

    def __init__(self, path: Path, *, create: bool = False) -> None:
        self.path = path
        self._node = _node_name()
        made = create and _make(path)
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                raise
            raise Unusable(
                f"{path} is a symbolic link or no folder, and may lead to what others wrote; name "
                "the folder itself"
            ) from error
        try:
            if made:
                os.fchmod(self._fd, 0o700)  # under any umask
            check_owner(os.fstat(self._fd), f"the folder {path}")
        except BaseException:
            self.close()
            raise

    @override
    def close(self) -> None:
        """Close the descriptor; a second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    # -- Reading -------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Return the names in the folder, in order."""
        return sorted(os.listdir(self._fd))

    def status(self, name: str) -> os.stat_result:
        """Return what the system says of a name, not of what a link leads to."""
        return os.stat(name, dir_fd=self._fd, follow_symlinks=False)

    def read(self, name: str) -> ReadFile:
        """Open a file that only this user can have written.

        Raises:
            FileNotFoundError: It is not there.
            Unusable: Somebody else may have written it, or it is no file.
            OSError: It cannot be opened.
        """
        # Not blocking, or a pipe planted under the name would hang the training.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            fd = os.open(name, flags, dir_fd=self._fd)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENXIO, errno.ENODEV):
                raise
            raise Unusable(f"{name} is a symbolic link or no regular file; remove it") from error
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise Unusable(f"{name} is no regular file; remove it")
            check_owner(status, name)
        except BaseException:
            os.close(fd)
            raise
        return ReadFile(fd, status.st_size)

    # -- Writing -------------------------------------------------------------------------------

    def write(self, name: str, pieces: Iterable[bytes], *, sync: bool = True) -> None:
        """Put a file in the place of the one that may be there: whole old or whole new."""
        temporary = f".writing-{self._node}-{uuid.uuid4().hex}"
        with replacing(name, temporary, mode=0o600, folder=self._fd, sync=sync) as fd:
            for piece in pieces:
                write_all(fd, piece)
        if sync:
            with suppress(OSError):  # some network file systems have no such call
                os.fsync(self._fd)

    def remove(self, name: str) -> None:
        """Remove a file or a link, never a folder; one that is gone already is fine."""
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._fd)

    # -- One writer a node ---------------------------------------------------------------------

    @contextmanager
    def locked(self, wait_s: float) -> Iterator[Lock]:
        """Enter as this node's only writer; yields ``"busy"`` if another is, after ``wait_s``.

        ``"none"`` means that there are no locks here.
        """
        lock, fd = self._acquire(time.monotonic() + wait_s)
        try:
            yield lock
        finally:
            if fd >= 0:
                with suppress(OSError):
                    # Said, not left to the end of the descriptor: a fork would keep it.
                    fcntl.flock(fd, fcntl.LOCK_UN)
                os.close(fd)

    def clean(self) -> list[str]:
        """Remove what writers that are gone have left; to be called with the lock held.

        This node's leave nothing while they live, since they hold the lock. Of another node's only
        age can tell, by the clock of the file system itself.
        """
        found = [name for name in self.names() if _TEMPORARY.match(name)]
        removed = []
        for name in found:
            ours = name.startswith(f".writing-{self._node}-") and len(name) == len(
                f".writing-{self._node}-{'0' * 32}"
            )
            with suppress(OSError):
                if ours or self._now() - self.status(name).st_mtime > _LEFT_BEHIND_S:
                    self.remove(name)
                    removed.append(name)
        return removed

    def remove_lock(self) -> None:
        """Remove this node's lock, which the caller holds."""
        self.remove(self._lock_name)

    @property
    def _lock_name(self) -> str:
        return f".lock-{self._node}"

    def _now(self) -> float:
        os.utime(self._lock_name, dir_fd=self._fd, follow_symlinks=False)
        return self.status(self._lock_name).st_mtime

    def _acquire(self, until: float) -> tuple[Lock, int]:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        while True:
            fd = os.open(self._lock_name, flags, 0o600, dir_fd=self._fd)
            try:
                if stat.S_IMODE(os.fstat(fd).st_mode) != 0o600:
                    os.fchmod(fd, 0o600)  # a umask that takes the owner's own rights
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(fd)
                if error.errno in _NO_LOCKS:
                    return "none", -1
                if time.monotonic() >= until:
                    return "busy", -1
                # Not in step with those that wait as well.
                time.sleep(_POLL_S * (0.5 + random.random()))
                continue
            # Between the two calls it may have been removed.
            if os.fstat(fd).st_nlink:
                return "held", fd
            os.close(fd)


@final
class ReadFile(Closing):
    """A file opened for reading, and the size it had then."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        self._fd = fd
        self.num_bytes = num_bytes

    def read(self, num_bytes: int) -> bytes:
        """Return the next bytes; fewer at the end of the file."""
        pieces = []
        while num_bytes > 0:
            piece = os.read(self._fd, min(num_bytes, PIECE_BYTES))
            if not piece:
                break
            pieces.append(piece)
            num_bytes -= len(piece)
        return b"".join(pieces)

    @override
    def close(self) -> None:
        """Close the descriptor; a second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    @override
    def __enter__(self) -> Self:
        return self


def check_owner(status: os.stat_result, what: str) -> None:
    """Raise `Unusable` unless a file or folder is this user's, and nobody else may write to it."""
    if status.st_uid != os.geteuid():
        raise Unusable(
            f"{what} belongs to user id {status.st_uid} and this process is user id "
            f"{os.geteuid()}, so it may run what others wrote; use a folder of your own"
        )
    # An access list that lets others write shows in the bits of the group.
    if status.st_mode & _OTHERS_WRITE:
        raise Unusable(
            f"{what} can be written by others (mode {stat.S_IMODE(status.st_mode):o}), so it may "
            "run what they wrote; if all in it is yours, chmod go-w"
        )


def _make(path: Path) -> bool:
    """Make a folder and those above it; whether it is new."""
    missing = []
    for folder in (path, *path.parents):
        if os.path.lexists(folder):
            break
        missing.append(folder)
    for folder in reversed(missing):
        try:
            os.mkdir(folder, 0o700)
        except FileExistsError:
            continue  # another process of this run
        if folder != path:
            # A umask that takes the owner's own rights would shut us out.
            os.chmod(folder, 0o700)
    return path in missing and os.lstat(path).st_uid == os.geteuid()


def _node_name() -> str:
    return re.sub(r"[^A-Za-z0-9-]", "-", os.uname().nodename)[:40] or "node"
