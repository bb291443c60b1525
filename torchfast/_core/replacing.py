"""A file that takes the place of another whole: whoever reads sees the old one or the new one.

It is written under a name of its own, put on the disk, and renamed. Until its name is on the disk
as well, which is the folder's matter and the caller's, a power cut leaves the old one.

Everything goes through the functions of ``os``, looked up at each call: so a test can end the
process at each of them.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

# Large enough that calls cost nothing, small enough to be hashed while it is in the cache.
PIECE_BYTES: Final = 4 << 20

Name = str | os.PathLike[str]


@contextmanager
def replacing(
    name: Name,
    temporary: Name,
    *,
    mode: int = 0o666,
    folder: int | None = None,
    sync: bool = True,
) -> Iterator[int]:
    """Yield the descriptor of a new file, which takes the place of ``name`` if nothing fails.

    Args:
        name: The file that may be there.
        temporary: A name that nobody else has, in the same folder; nothing is left under it unless
            the process ends.
        mode: Whose it is, less what the umask takes; its owner's always.
        folder: The descriptor of the folder that the names are in.
        sync: Put the contents on the disk first. Otherwise a power cut may leave an empty file.

    Raises:
        OSError: It cannot be written.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(temporary, flags, mode, dir_fd=folder)
    try:
        try:
            make_owners(fd)
            yield fd
            if sync:
                os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise


def make_owners(fd: int) -> None:
    """Let its owner read and write a new file, whatever the umask."""
    mode = stat.S_IMODE(os.fstat(fd).st_mode)
    if mode & 0o600 != 0o600:
        os.fchmod(fd, mode | 0o600)


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write everything; near the end of a disk, one call takes less than it is given."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view[:PIECE_BYTES]) :]
