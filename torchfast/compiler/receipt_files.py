"""The files of receipts, beside the compile cache: found, written, and listed.

A file that is damaged, was measured elsewhere or is of another format is not an error to a search:
it is passed over, and `Found.reason` says why. Writing is atomic, so that of several processes that
write the same receipt the last one wins whole. To have a search run again, remove its file
(``python -m torchfast cache clear --receipts``), or give another folder.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import uuid
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from torchfast._core.replacing import replacing, write_all
from torchfast.compiler.receipts import Receipt, ReceiptKey
from torchfast.compiler.store_files import StoreFolder, Unusable, check_owner

logger = logging.getLogger(__name__)

NAME: Final = re.compile(r"receipt-[0-9a-f]{12}-[0-9a-f]{24}\.json\Z")
# What is left of one whose writing was cut off.
LEFTOVER: Final = re.compile(r"\.receipt-[0-9a-f]{32}\Z")
_MOST_BYTES: Final = 1 << 20
# Of how many receipts of the same model it is asked why they are not the one looked for.
_MOST_NEIGHBOURS: Final = 32


class Found(NamedTuple):
    """A receipt, or why there is none."""

    receipt: Receipt | None
    reason: str


def find_receipt(folder: str | os.PathLike[str], key: ReceiptKey, names: Collection[str]) -> Found:
    """Return a receipt from a folder, or the reason why there is none. Never raises.

    Args:
        folder: Where `save_receipt` put it.
        key: What the answer depends on.
        names: The candidates that there are to choose from; a receipt of others is of no use.
    """
    path = Path(folder) / key.file_name
    try:
        receipt = _read(path)
        different = key.difference(receipt.key)
    except FileNotFoundError:
        return Found(None, _why_not(Path(folder), key))
    except (OSError, ValueError) as error:
        return Found(None, f"{path} is ignored: {error}")
    if different is not None:
        return Found(None, f"{path} is ignored: it was {different}")
    known = {candidate.name for candidate in receipt.candidates}
    if known != set(names):
        return Found(None, f"{path} is ignored: it is about {sorted(known)}, not {sorted(names)}")
    if not receipt.is_answer:
        return Found(None, f"{path} is ignored: nothing was compared for it")
    return Found(receipt, f"{path}, of {receipt.created}")


def save_receipt(folder: str | os.PathLike[str], receipt: Receipt) -> Path | None:
    """Write a receipt into a folder; None, and a warning, if that cannot be done.

    What is there under its name is replaced whole. Nothing is written of one that is no answer:
    the next run would not look for one.
    """
    if not receipt.is_answer:
        return None
    path = Path(folder) / receipt.key.file_name
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_owner(os.stat(path.parent), f"the folder {path.parent}")  # or it would not be read
        temporary = path.with_name(f".receipt-{uuid.uuid4().hex}")
        with replacing(path, temporary, mode=0o600) as fd:
            write_all(fd, receipt.to_json().encode())
    except (OSError, Unusable) as error:
        logger.warning(
            "the receipt of what was measured could not be written (%s); the next run "
            "will measure again: make %s writable, or give another folder",
            error,
            path.parent,
        )
        return None
    return path


class StoredReceipt(NamedTuple):
    """A receipt as it lies in the folder.

    Attributes:
        name: The name of its file.
        receipt: What it says; None if it cannot be used.
        problem: Why not; empty if it can.
        num_bytes: The size of the file.
    """

    name: str
    receipt: Receipt | None
    problem: str
    num_bytes: int


def list_receipts(path: Path) -> list[StoredReceipt]:
    """Return the receipts in a folder, the newest first.

    Raises:
        Unusable: The folder may have been written to by others.
        OSError: It cannot be read.
    """
    with StoreFolder(path) as folder:
        names = [name for name in folder.names() if NAME.match(name)]
    found = [_described(path / name) for name in names]
    by_name = sorted(found, key=lambda stored: stored.name)
    return sorted(by_name, key=lambda s: s.receipt.created if s.receipt else "", reverse=True)


def _described(path: Path) -> StoredReceipt:
    receipt, problem, num_bytes = None, "", 0
    try:
        num_bytes = path.lstat().st_size
        receipt = _read(path)
    except (OSError, ValueError) as error:
        problem = str(error)
    return StoredReceipt(path.name, receipt, problem, num_bytes)


def _read(path: Path) -> Receipt:
    # Not blocking, or a pipe under its name would hang; no link that leads elsewhere.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    try:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode):
            raise ValueError("it is no regular file")
        try:
            check_owner(state, "it")
            check_owner(os.stat(path.parent), "its folder")
        except Unusable as error:
            raise ValueError(str(error)) from error
        if state.st_size > _MOST_BYTES:
            raise ValueError(f"it has {state.st_size} bytes, a receipt at most {_MOST_BYTES}")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return Receipt.from_json(file.read(_MOST_BYTES).decode())
    finally:
        os.close(descriptor)


def _why_not(folder: Path, key: ReceiptKey) -> str:
    """Return what the receipts of the same model were measured for."""
    with suppress(OSError):
        for path in sorted(folder.glob(f"{key.neighbours}*.json"))[:_MOST_NEIGHBOURS]:
            with suppress(OSError, ValueError):
                different = key.difference(_read(path).key)
                if different is not None:  # or another process has written it just now
                    return f"{path} is not used: it was {different}"
    return f"no receipt of this model is in {folder}"
