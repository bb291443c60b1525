"""Bytes to disk and back: each file hashed on its way, and on the disk when it is said to be.

A write is done when ``fsync`` of the file has returned, and a new name when ``fsync`` of its folder
has. Until then a power cut may leave an empty file under a final name, so nothing is renamed before
its contents are on the disk.

The hash is SHA-256: in the standard library, checked by ``sha256sum``, and with the instructions
that processors have for it 1.8 GB/s on one core (crc32: 4 GB/s, blake2b: 0.9, sha512: 0.8), which a
disk seldom takes. Several files are written or read at once, each by a thread: hashing, reading and
writing all run without the interpreter lock, so training goes on beside them.

Everything that writes goes through the functions of ``os``, looked up at each call: so a test can
end the process at each of them.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import queue
import shutil
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, TypeVar, final

from typing_extensions import override

from torchfast._core.closing import Closing
from torchfast._core.errors import CheckpointCorruptError, CheckpointWriteError
from torchfast._core.replacing import PIECE_BYTES, make_owners, write_all

T = TypeVar("T")

# Small tensors are gathered up to this, so that a thousand biases are not a thousand writes.
_BUFFER_BYTES: Final = 1 << 20
# More do not help: what one hashes, writes and reads back is as fast as most disks already. And
# the training is to have cores too.
MAX_THREADS: Final = 8
# What the file itself is to blame for. Anything else (no permission, no memory, a disk or a server
# that does not answer) says nothing about the checkpoint and is raised as it is.
_DAMAGE: Final = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO)


class Digest(Protocol):
    """What ``hashlib`` returns."""

    def update(self, data: memoryview, /) -> None:
        """Take in bytes."""


@final
@dataclass(frozen=True)
class FileEntry:
    """What a file must be: its size and its SHA-256 in hex."""

    num_bytes: int
    sha256: str


@final
class HashedFile(Closing):
    """A new file: written from front to back, hashed meanwhile, on the disk after ``finish``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._hash = hashlib.sha256()
        self._buffer = bytearray()
        self.num_bytes = 0
        make_owners(self._fd)

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        view = memoryview(data)
        self.num_bytes += len(view)
        if len(self._buffer) + len(view) < _BUFFER_BYTES:
            self._buffer += view
            return
        self._flush()
        for start in range(0, len(view), PIECE_BYTES):
            self._write_out(view[start : start + PIECE_BYTES])

    def pad_to(self, multiple: int) -> None:
        """Append zeros up to the next multiple."""
        self.write(bytes(-self.num_bytes % multiple))

    def finish(self) -> FileEntry:
        """Put everything on the disk and return what was written."""
        self._flush()
        os.fsync(self._fd)
        self.close()
        return FileEntry(self.num_bytes, self._hash.hexdigest())

    @override
    def close(self) -> None:
        """Close the file; a second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _flush(self) -> None:
        if self._buffer:
            data, self._buffer = self._buffer, bytearray()
            self._write_out(memoryview(data))

    def _write_out(self, piece: memoryview) -> None:
        self._hash.update(piece)
        write_all(self._fd, piece)


@contextmanager
def writing(path: Path, num_bytes: int) -> Iterator[None]:
    """Turn an error of the system into one that says what was written and how much it needs."""
    try:
        yield
    except OSError as error:
        free = "an unknown number of"
        with suppress(OSError):
            free = str(shutil.disk_usage(path.parent).free)
        raise CheckpointWriteError(
            f"{path} could not be written ({error.strerror or error}): it needs {num_bytes} bytes, "
            f"and the file system has {free} free; make room, or save elsewhere. What was there "
            "before is as it was"
        ) from error


def write_file(path: Path, data: bytes) -> FileEntry:
    """Write a new small file and return its entry."""
    with HashedFile(path) as file:
        file.write(data)
        return file.finish()


def make_folder(path: Path) -> None:
    """Make a folder that its owner can use under any umask."""
    os.mkdir(path)
    mode = stat.S_IMODE(os.stat(path).st_mode)
    if mode & 0o700 != 0o700:
        os.chmod(path, mode | 0o700)


def sync_folder(path: Path) -> None:
    """Put the names in a folder on the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        # Some network file systems have no such call; their names are on the server already.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def remove_tree(path: Path) -> None:
    """Delete a folder and what is in it, several files at once: of large ones each takes its time.

    Raises:
        OSError: It is a link, behind which nothing is touched, or something could not be deleted;
            the rest may be there or not.
    """
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)

    def unlink(name: str) -> None:
        with suppress(FileNotFoundError):  # somebody else was faster
            os.unlink(name, dir_fd=folder)

    try:
        with os.scandir(folder) as entries:
            files = [entry.name for entry in entries if not entry.is_dir(follow_symlinks=False)]
        run_in_threads(unlink, files, num_threads())
    finally:
        os.close(folder)
    shutil.rmtree(path)


def read_file(path: Path, most_bytes: int) -> bytes:
    """Return the contents of a small file.

    Raises:
        CheckpointCorruptError: It is not there, no regular file, or larger than ``most_bytes``.
    """
    with _open(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise CheckpointCorruptError(
                f"{path} has {size} bytes, expected at most {most_bytes}; it is no file of a "
                "checkpoint: load another step"
            )
        return file.read(size) or b""


def first_bytes(path: Path) -> bytes:
    """Return how a file begins, which tells its kind; nothing if it cannot be read."""
    try:
        with _open(path) as file:
            return file.read(4) or b""
    except (CheckpointCorruptError, OSError):
        return b""


def stream_file(
    path: Path, expected: FileEntry, sinks: Sequence[tuple[int, memoryview]] = ()
) -> None:
    """Read a file from front to back, filling ``sinks``, and compare it with its entry.

    One pass both loads and verifies. What was filled must not be used if this raises.

    Args:
        path: The file.
        expected: Its size and hash.
        sinks: Where in the file to read from, and into what; they may not overlap.

    Raises:
        CheckpointCorruptError: The file is missing or differs from its entry.
    """
    digest = hashlib.sha256()
    scratch = memoryview(bytearray(min(PIECE_BYTES, max(1, expected.num_bytes))))
    with _open(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size != expected.num_bytes:
            raise CheckpointCorruptError(
                f"{path} has {size} bytes, the manifest says {expected.num_bytes}; it was cut or "
                "replaced: load another step"
            )
        position = 0
        for start, sink in sorted(sinks, key=lambda pair: pair[0]):
            if start < position or start + len(sink) > size:
                raise CheckpointCorruptError(
                    f"{path}: bytes {start} to {start + len(sink)} overlap others or lie outside "
                    "of the file, so its metadata is wrong; load another step"
                )
            for length in _pieces(start - position, len(scratch)):
                _fill(file, scratch[:length], digest, path)
            for offset in range(0, len(sink), PIECE_BYTES):
                _fill(file, sink[offset : offset + PIECE_BYTES], digest, path)
            position = start + len(sink)
        for length in _pieces(size - position, len(scratch)):
            _fill(file, scratch[:length], digest, path)
    if digest.hexdigest() != expected.sha256:
        raise CheckpointCorruptError(
            f"{path} does not have the SHA-256 of its manifest; it has changed since it was "
            "written: load another step"
        )


def run_in_threads(work: Callable[[T], None], items: Iterable[T], num_threads: int) -> None:
    """Call ``work`` with each item, on several threads, this one among them.

    The first error ends it and is raised, when every thread has stopped.
    """
    waiting: queue.SimpleQueue[T] = queue.SimpleQueue()
    for item in items:
        waiting.put(item)
    errors: list[BaseException] = []

    def consume() -> None:
        while not errors:
            try:
                item = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                work(item)
            except BaseException as error:
                errors.append(error)

    helpers = []
    for _ in range(min(num_threads, waiting.qsize()) - 1):
        helper = threading.Thread(target=consume, name="torchfast-checkpoint-file")
        try:
            helper.start()
        except RuntimeError:
            break  # the interpreter is ending and starts no more: this thread does all of it
        helpers.append(helper)
    consume()
    for helper in helpers:
        helper.join()
    if errors:
        raise errors[0]


def num_threads() -> int:
    """Return how many files are worth writing at once on this machine."""
    cores = len(os.sched_getaffinity(0))
    return min(MAX_THREADS, max(cores // 2, min(cores, 4)))


def _open(path: Path) -> io.FileIO:
    try:
        # Not blocking, or a pipe planted under a file's name would hang the load.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno not in _DAMAGE:
            raise
        raise CheckpointCorruptError(
            f"{path} cannot be read ({error.strerror}); a file of the checkpoint is missing: load "
            "another step"
        ) from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise CheckpointCorruptError(f"{path} is no regular file; load another step")
    return io.FileIO(fd, "rb")


def _fill(file: io.FileIO, into: memoryview, digest: Digest, path: Path) -> None:
    rest = into
    while rest:
        try:
            count = file.readinto(rest)
        except OSError as error:
            if error.errno not in _DAMAGE:
                raise
            raise CheckpointCorruptError(
                f"{path} cannot be read to its end ({error.strerror}); load another step"
            ) from error
        if not count:
            raise CheckpointCorruptError(
                f"{path} became shorter while it was read; load another step"
            )
        rest = rest[count:]
    digest.update(into)


def _pieces(total: int, most: int) -> Iterable[int]:
    while total > 0:
        yield min(total, most)
        total -= most
