"""The manifest: what a checkpoint consists of, sealed so that a changed byte shows.

``manifest.json`` is written last, so a folder that has one was finished. It names every file with
its size and SHA-256, and ends in the SHA-256 of its own bytes before that line::

    {
     "schema": 1,
     "step": 1000,
     ...
     "files": {"rank-00000-0000.bin": {"num_bytes": 4194304, "sha256": "9f86d081884c7d65..."}},
     "seal": "2c26b46b68ffc68f..."
    }

It is JSON, as everything but the tensors' bytes is: nothing here is ever unpickled. The hashes find
damage. They are no signature: whoever can write to the folder can write their own, so every value
is checked before it is used, and none of them can name a file outside of the folder.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar, final

from torchfast._core.errors import (
    CheckpointCorruptError,
    StateMismatchError,
    TorchFastError,
    UnsafeCheckpointError,
)
from torchfast.checkpoint.files import (
    FileEntry,
    first_bytes,
    num_threads,
    read_file,
    run_in_threads,
    stream_file,
)

SCHEMA: Final = 1
MANIFEST: Final = "manifest.json"
METADATA: Final = "metadata.json"
MOST_JSON_BYTES: Final = 1 << 30
# A plain name that begins as ours do: no separator, no "..", no drive, no hidden file.
FILE_NAME: Final = re.compile(r"(?:rank-\d{5}(?:-\d{4,})?\.(?:bin|json)|metadata\.json)\Z")
_SHA256: Final = re.compile(r"[0-9a-f]{64}\Z")
_PICKLE: Final = b"\x80"  # the first byte of every pickle since protocol 2
_ZIP: Final = b"PK\x03\x04"  # what torch.save writes: a zip with a pickle inside

T = TypeVar("T")


@final
@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint is and consists of.

    Attributes:
        schema: Version of the layout.
        step: Updates done when it was saved.
        world_size: Ranks that wrote it.
        owner: Id of the folder that it was written into; retention touches no other's.
        saved_at: When, for people. Nothing is ordered by it.
        torch: Version of torch that wrote it.
        metrics: What it was saved with.
        files: Every file but the manifest, by name.
    """

    schema: int
    step: int
    world_size: int
    owner: str
    saved_at: str
    torch: str
    metrics: Mapping[str, float]
    files: Mapping[str, FileEntry]

    @property
    def num_bytes(self) -> int:
        """Bytes of all files together."""
        return sum(entry.num_bytes for entry in self.files.values())

    def to_bytes(self) -> bytes:
        """Return the file's contents, sealed."""
        body = asdict(self)
        # JSON has no infinity and no NaN; as a text they read back.
        body["metrics"] = {
            name: value if math.isfinite(value) else repr(value)
            for name, value in self.metrics.items()
        }
        text = json.dumps(body, indent=1).encode("ascii")
        return _sealed(text.removesuffix(b"\n}"))


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of the checkpoint in ``folder``.

    Raises:
        CheckpointCorruptError: It is missing or damaged.
        UnsafeCheckpointError: It is a pickle.
        StateMismatchError: It is of a newer schema.
    """
    path = folder / MANIFEST
    return parse_json(path, read_file(path, MOST_JSON_BYTES), partial(_checked, path), _unsealed)


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Compare the sizes of all files with the manifest, which takes no time.

    Raises:
        CheckpointCorruptError: One differs or is missing.
        UnsafeCheckpointError: One differs and is a pickle now.
    """
    for name, entry in manifest.files.items():
        path = folder / name
        try:
            found = os.stat(path).st_size
        except FileNotFoundError as error:
            raise CheckpointCorruptError(
                f"{path} is missing, the manifest names it; load another step"
            ) from error
        if found != entry.num_bytes:
            check_stream(path, entry)


def verify_files(folder: Path, manifest: Manifest) -> None:
    """Read every file and compare it with the manifest.

    Raises:
        CheckpointCorruptError: One differs or is missing.
        UnsafeCheckpointError: One differs and is a pickle now.
    """
    run_in_threads(
        lambda item: check_stream(folder / item[0], item[1]), manifest.files.items(), num_threads()
    )


def read_named(folder: Path, manifest: Manifest, name: str) -> bytes:
    """Return the contents of one of a checkpoint's JSON files, compared with its hash.

    Raises:
        CheckpointCorruptError: It is missing or damaged.
        UnsafeCheckpointError: It is a pickle.
    """
    entry = manifest.files.get(name)
    if entry is None or entry.num_bytes > MOST_JSON_BYTES:
        raise CheckpointCorruptError(
            f"{folder / MANIFEST} names no file {name} of a possible size, which every checkpoint "
            "has; load another step"
        )
    data = bytearray(entry.num_bytes)
    check_stream(folder / name, entry, [(0, memoryview(data))])
    return bytes(data)


def check_stream(path: Path, entry: FileEntry, sinks: Any = ()) -> None:
    """Stream a file as ``stream_file`` does, and say so if what is there instead is a pickle."""
    try:
        stream_file(path, entry, sinks)
    except CheckpointCorruptError as error:
        refuse_pickle(path, first_bytes(path), error)
        raise


def parse_json(
    path: Path,
    data: bytes,
    build: Callable[[Any], T],
    unwrap: Callable[[Path, bytes], bytes] | None = None,
) -> T:
    """Return ``build(parsed JSON)``; whatever is wrong with it names the file.

    Raises:
        CheckpointCorruptError: No JSON, or not the JSON that torchfast writes.
        UnsafeCheckpointError: A pickle.
    """
    refuse_pickle(path, data[:4])
    with explaining(path):
        return build(json.loads(data if unwrap is None else unwrap(path, data)))


@contextmanager
def explaining(path: Path) -> Iterator[None]:
    """Turn what unexpected contents of a file lead to into an error that names the file."""
    try:
        yield
    except TorchFastError:
        raise
    except (AttributeError, LookupError, OverflowError, RuntimeError, TypeError, ValueError) as e:
        raise CheckpointCorruptError(
            f"{path} is not what torchfast wrote ({type(e).__name__}: {str(e)[:200]}); load "
            "another step"
        ) from e


def refuse_pickle(path: Path, head: bytes, cause: Exception | None = None) -> None:
    """Raise if a file begins as a pickle or as a file of ``torch.save`` does."""
    if head.startswith(_PICKLE) or head == _ZIP:
        raise UnsafeCheckpointError(
            f"{path} is a pickle, which runs code when it is loaded; torchfast writes none, so it "
            "was planted or put there by mistake: it was not loaded. Load another step"
        ) from cause


def _sealed(body: bytes) -> bytes:
    digest = hashlib.sha256(body).hexdigest()
    return body + _seal(digest)


def _seal(digest: str) -> bytes:
    return f',\n "seal": "{digest}"\n}}\n'.encode("ascii")


def _unsealed(path: Path, data: bytes) -> bytes:
    length = len(_seal("0" * 64))
    body = data[:-length]
    if _sealed(body) != data:
        raise CheckpointCorruptError(
            f"{path} does not match its own seal; it was cut or has changed since it was written: "
            "load another step"
        )
    return data


def _checked(path: Path, body: dict[str, Any]) -> Manifest:
    schema = body["schema"]
    if type(schema) is not int or schema < 1:
        raise ValueError(f"schema is {schema!r}")
    if schema > SCHEMA:
        raise StateMismatchError(
            f"{path} has schema {schema}, this version of torchfast reads up to {SCHEMA}; upgrade "
            "torchfast to load it"
        )
    files = {
        _match(FILE_NAME, name): FileEntry(
            natural(entry["num_bytes"]), _match(_SHA256, entry["sha256"])
        )
        for name, entry in body["files"].items()
    }
    return Manifest(
        schema=schema,
        step=natural(body["step"]),
        world_size=natural(body["world_size"]),
        owner=str(body["owner"]),
        saved_at=str(body["saved_at"]),
        torch=str(body["torch"]),
        metrics={str(k): float(v) for k, v in body["metrics"].items()},
        files=files,
    )


def natural(value: object) -> int:
    """Return ``value`` if it is an int of at least 0."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def _match(pattern: re.Pattern[str], text: str) -> str:
    if not pattern.match(text):
        raise ValueError(f"{text!r} is not accepted")
    return text
