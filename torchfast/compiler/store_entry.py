"""One file of the compile cache: a header that people can read, and torch's bytes behind it.

::

    torchfast compile cache 1
    0000041b 9f2c...                    length and SHA-256 of the next line
    {"work": {...}, "machine": {...}, "payload_sha256": "...", ...}
    ...                                 the payload

One file and not two, so that header and payload can only be replaced together. `head -3` shows what
it is. Nothing of the payload is handed on before all of it has the SHA-256 of the header, and the
header its own: an accident cannot look like an entry. It is no signature: whoever can write the
file can write the hash.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, final

from torchfast.compiler.store_files import ReadFile, Unusable

MAGIC: Final = b"torchfast compile cache 1\n"
_MOST_HEADER_BYTES: Final = 1 << 20
_LENGTHS_BYTES: Final = 8 + 1 + 64 + 1


@final
@dataclass(frozen=True, kw_only=True)
class EntryHeader:
    """What an entry says of itself.

    Attributes:
        work: What was compiled: the facts of `StoreKey.work`.
        machine: What it was compiled on and with: the facts of `StoreKey.machine`.
        artifacts: How many artifacts there are of each kind.
        payload_bytes: The size of the payload.
        payload_sha256: Its SHA-256 in hex.
        written_at: When, in UTC.
        torchfast: The version that wrote it.
    """

    work: dict[str, str]
    machine: dict[str, str]
    artifacts: dict[str, int]
    payload_bytes: int
    payload_sha256: str
    written_at: str
    torchfast: str


def encode(header: EntryHeader, payload: bytes) -> list[bytes]:
    """Return the pieces of a file."""
    line = json.dumps(asdict(header), sort_keys=True).encode("ascii") + b"\n"
    return [MAGIC, _lengths(line), line, payload]


def read_header(file: ReadFile, name: str) -> EntryHeader:
    """Read up to the payload.

    Raises:
        Unusable: It is no entry, or damaged.
    """
    start = file.read(len(MAGIC) + _LENGTHS_BYTES)
    if not start.startswith(MAGIC):
        raise Unusable(f"{name} does not begin as an entry of this cache does; remove it")
    lengths = start[len(MAGIC) :]
    try:
        length = int(lengths[:8], 16)
    except ValueError as error:
        raise Unusable(f"{name} has a damaged header; remove it") from error
    if not 0 < length <= _MOST_HEADER_BYTES:
        raise Unusable(
            f"{name} has a header of {length} bytes, expected at most {_MOST_HEADER_BYTES}; "
            "remove it"
        )
    line = file.read(length)
    if _lengths(line) != lengths:
        raise Unusable(f"{name} has a header that is cut or damaged; remove it")
    header = _parsed(line, name)
    expected = len(MAGIC) + _LENGTHS_BYTES + length + header.payload_bytes
    if file.num_bytes != expected:
        raise Unusable(
            f"{name} has {file.num_bytes} bytes, expected {expected}; it was cut or is damaged: "
            "remove it"
        )
    return header


def read_payload(file: ReadFile, header: EntryHeader, name: str) -> bytes:
    """Read what comes after the header.

    Raises:
        Unusable: It is not what was written.
    """
    payload = file.read(header.payload_bytes)
    # These very bytes are hashed and then used: nothing is read twice.
    if hashlib.sha256(payload).hexdigest() != header.payload_sha256:
        raise Unusable(
            f"{name} does not have the SHA-256 of its header; it has changed since it was written: "
            "remove it"
        )
    return payload


def differing(expected: Mapping[str, str], found: Mapping[str, str]) -> str:
    """Return in words which facts differ; empty if none does."""
    keys = sorted(expected.keys() | found.keys())
    return ", ".join(
        f"{key} {_short(found.get(key))} and not {_short(expected.get(key))}"
        for key in keys
        if expected.get(key) != found.get(key)
    )


def _lengths(line: bytes) -> bytes:
    return b"%08x %s\n" % (len(line), hashlib.sha256(line).hexdigest().encode("ascii"))


def _short(value: str | None) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _parsed(line: bytes, name: str) -> EntryHeader:
    try:
        body: Any = json.loads(line)
        header = EntryHeader(**{field.name: body[field.name] for field in fields(EntryHeader)})
        texts = (header.payload_sha256, header.written_at, header.torchfast)
        tables = (header.work, header.machine)
        is_one = (
            all(isinstance(text, str) for text in texts)
            and all(isinstance(v, str) for table in tables for v in table.values())
            and all(type(count) is int for count in header.artifacts.values())
            and type(header.payload_bytes) is int
            and header.payload_bytes >= 0
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Unusable(f"{name} has a header that cannot be read; remove it") from error
    if not is_one:
        raise Unusable(f"{name} has a header with fields of another kind; remove it")
    return header
