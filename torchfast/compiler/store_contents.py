"""What is in the folder of the compile cache: which entries, which was used last, and what may go.

Which was used last is told by a count that goes up with each use, not by times: clocks are set
back, and those of two nodes differ. The count of an entry stands beside it in a file of its own, so
that using an entry does not write it again. A lost or damaged count makes its entry the first to
go, and harms nothing else.
"""

from __future__ import annotations

import json
import re
import stat
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, final

from torchfast.compiler.receipt_files import LEFTOVER, NAME
from torchfast.compiler.store_entry import EntryHeader, read_header, read_payload
from torchfast.compiler.store_files import StoreFolder, Unusable

ENTRY: Final = re.compile(r"entry-[0-9a-f]{32}-[0-9a-f]{32}\.cache\Z")
_USE: Final = re.compile(r"entry-[0-9a-f]{32}-[0-9a-f]{32}\.use\Z")
_MOST_USE_BYTES: Final = 4096
_LOCK_WAIT_S: Final = 10.0


@final
@dataclass(frozen=True, kw_only=True)
class StoredEntry:
    """An entry as it lies in the folder.

    Attributes:
        name: The name of its file.
        header: What it says of itself; None if it cannot be used.
        problem: Why not; empty if it can.
        num_bytes: The size of the file.
        uses: How often it was loaded, about: processes that load at once may count as one.
        last_used: The higher, the later; 0 if that is unknown.
        used_at: When, in UTC, by the clock of who used it; empty if that is unknown.
    """

    name: str
    header: EntryHeader | None
    problem: str
    num_bytes: int
    uses: int
    last_used: int
    used_at: str


def list_entries(path: Path, *, verify: bool = False) -> list[StoredEntry]:
    """Return what is in a folder, last used first; with ``verify`` payloads are hashed too.

    Raises:
        Unusable: The folder may have been written to by others.
        OSError: It cannot be read.
    """
    with StoreFolder(path) as folder:
        found = [_described(folder, name, verify) for name in folder.names() if ENTRY.match(name)]
    return sorted(found, key=lambda entry: (-entry.last_used, entry.name))


def prune(path: Path, max_bytes: int) -> list[str]:
    """Remove the least recently used until all take no more; return the names.

    Raises:
        Unusable: As `list_entries`, or another process is writing.
        OSError: The folder cannot be read or written.
    """
    with StoreFolder(path) as folder, folder.locked(_LOCK_WAIT_S) as lock:
        _check_not_busy(lock, path)
        removed = folder.clean() if lock == "held" else []
        return removed + evict(folder, max_bytes, keep="")


def clear(path: Path, *, receipts_only: bool = False) -> list[str]:
    """Remove all that the cache wrote in a folder, and nothing else; return the names.

    Args:
        path: The folder.
        receipts_only: Remove the receipts of searches and nothing else.

    Raises:
        Unusable: As `prune`.
        OSError: The folder cannot be read or written.
    """
    with StoreFolder(path) as folder, folder.locked(_LOCK_WAIT_S) as lock:
        _check_not_busy(lock, path)
        kinds = (NAME, LEFTOVER) if receipts_only else (ENTRY, _USE, NAME, LEFTOVER)
        removed = folder.clean() if lock == "held" and not receipts_only else []
        for name in folder.names():
            is_ours = any(kind.match(name) for kind in kinds)
            if is_ours and not stat.S_ISDIR(folder.status(name).st_mode):
                folder.remove(name)
                removed.append(name)
        if lock == "held" and not receipts_only:
            folder.remove_lock()
        return removed


def _described(folder: StoreFolder, name: str, verify: bool) -> StoredEntry:
    header, problem, num_bytes = None, "", 0
    try:
        num_bytes = folder.status(name).st_size
        with folder.read(name) as file:
            header = read_header(file, name)
            if verify:
                read_payload(file, header, name)
    except (OSError, Unusable) as error:
        header, problem = None, str(error)
    use = _use(folder, name)
    return StoredEntry(
        name=name,
        header=header,
        problem=problem,
        num_bytes=num_bytes,
        uses=use["uses"],
        last_used=use["counter"],
        used_at=use["used_at"],
    )


def _use(folder: StoreFolder, name: str) -> dict[str, Any]:
    """Return the account of an entry's uses; a damaged one counts as none."""
    use: dict[str, Any] = {"counter": 0, "uses": 0, "used_at": ""}
    with suppress(OSError, Unusable, ValueError, RecursionError):
        with folder.read(_use_name(name)) as file:
            found = json.loads(file.read(_MOST_USE_BYTES))
        if isinstance(found, dict) and all(
            type(found.get(field)) is type(value) for field, value in use.items()
        ):
            use = {field: found[field] for field in use}
    return use


def touch(folder: StoreFolder, name: str, *, used: bool) -> None:
    """Make an entry the last used: by a count, since clocks are set back and differ."""
    names = [other for other in folder.names() if ENTRY.match(other)]
    last = max((_use(folder, other)["counter"] for other in names), default=0)
    uses = _use(folder, name)["uses"] + used
    body = {"counter": last + 1, "uses": uses, "used_at": utc_now()}
    folder.write(_use_name(name), [json.dumps(body).encode("ascii") + b"\n"], sync=False)


def evict(folder: StoreFolder, max_bytes: int, *, keep: str) -> list[str]:
    """Remove the least recently used entries until all take at most ``max_bytes``."""
    sizes: dict[str, int] = {}
    ages: dict[str, tuple[int, float]] = {}
    for name in folder.names():
        if _USE.match(name) and not _exists(folder, _entry_name(name)):
            folder.remove(name)
        if ENTRY.match(name):
            with suppress(OSError):
                status = folder.status(name)
                if not stat.S_ISDIR(status.st_mode):
                    sizes[name] = status.st_size
                    ages[name] = (_use(folder, name)["counter"], status.st_mtime)
    removed = []
    for name in sorted(ages, key=lambda name: ages[name]):
        if sum(sizes.values()) <= max_bytes:
            break
        if name != keep:
            folder.remove(name)
            folder.remove(_use_name(name))
            del sizes[name]
            removed.append(name)
    return removed


def _exists(folder: StoreFolder, name: str) -> bool:
    try:
        folder.status(name)
    except OSError:
        return False
    return True


def _use_name(name: str) -> str:
    return f"{name.removesuffix('.cache')}.use"


def _entry_name(name: str) -> str:
    return f"{name.removesuffix('.use')}.cache"


def _check_not_busy(lock: str, folder: Path) -> None:
    if lock == "busy":
        raise Unusable(f"another process of this node is writing in {folder}; try again later")


def utc_now() -> str:
    """Return the time as it stands in the files."""
    return datetime.now(UTC).isoformat(timespec="seconds")
