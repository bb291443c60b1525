r"""A log of one JSON object per line that survives the run being killed.

Each record is one line, sent to the operating system in one unbuffered ``write``: what has been
logged outlives the process, if not a power cut (there is no ``fsync``). A file that ends in half
a line is mended when it is opened again, and half a line that the disk could not take is cut off
at once, so every whole line stays readable.

The file is strict JSON, which every reader accepts: a float that JSON cannot express is written
as the text ``"nan"``, ``"inf"`` or ``"-inf"``, never as the bare word ``NaN``. `read_jsonl` turns
a value that equals one of these three, at any depth, back into a float. The price is that a text
of exactly ``nan``, ``inf`` or ``-inf`` comes back as a float too; keys and every other text
(``"NaN"``, ``"+inf"``) come back as they were.

One writer per file: with two, each would take the other's half-written line for a torn one.
"""

import json
import logging
import math
import os
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, final

from typing_extensions import override

from torchfast._core.closing import Closing

logger = logging.getLogger(__name__)

_NON_FINITE: Final = ("nan", "inf", "-inf")
_BLOCK_BYTES: Final = 1 << 16


@final
class JSONLWriter(Closing):
    """Append records to a file, one JSON object per line.

    Parent folders are created, and the file is opened at once, so a wrong path fails before
    the training does. A file that is there is continued; if its last line is half written,
    that half is removed (with a warning in the log), or ended if it is a whole record.

    Args:
        path: The file.

    Raises:
        TypeError: `path` is not a str or path object.
        ValueError: `path` is a folder.
        OSError: The file cannot be opened.

    Numerics: Floats are written with as many digits as it takes to read the same float back.
    Synchronizes: Never, unless a record holds a device tensor: its ``.item()`` waits.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "runs" / "log.jsonl"
        >>> with JSONLWriter(path) as log:
        ...     log.write({"step": 1, "loss": 2.5})
        ...     log.write({"step": 2, "loss": float("inf")})
        >>> path.read_text().splitlines()
        ['{"step": 1, "loss": 2.5}', '{"step": 2, "loss": "inf"}']
        >>> read_jsonl(path)
        [{'step': 1, 'loss': 2.5}, {'step': 2, 'loss': inf}]
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = checked_file_path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("ab", buffering=0)
        try:
            self._inside_line = self._mend()
        except BaseException:
            self._file.close()
            raise

    def write(self, record: Mapping[str, object]) -> None:
        """Append one record.

        Args:
            record: Values are None, bool, int, float, str, mappings with str keys, lists,
                tuples (written as lists), and scalars with ``.item()``, such as those of
                numpy.

        Raises:
            TypeError: A value is of another type; the message names where it is. Nothing is
                written then.
            ValueError: The writer is closed.
            OSError: The file could not take the line, such as a full disk. What was written
                of the line is removed again, and a later `write` may succeed.
        """
        if not isinstance(record, Mapping):
            raise TypeError(f"record={record!r}: expected a mapping such as {{'step': 1}}")
        if self._file.closed:
            raise ValueError(f"write() to the closed log {str(self._path)!r}: open a new one")
        text = json.dumps(_plain(record, "record"), allow_nan=False)
        line = b"\n" * self._inside_line + text.encode("ascii") + b"\n"
        start_bytes = os.fstat(self._file.fileno()).st_size
        try:
            written = self._file.write(line)
            # Less than all is taken on a nearly full disk; the next attempt says why.
            while written < len(line):
                written += self._file.write(line[written:])
        except OSError as error:
            self._cut_back(start_bytes)
            raise OSError(error.errno, error.strerror, str(self._path)) from error
        self._inside_line = False

    @property
    def path(self) -> Path:
        """The file."""
        return self._path

    @override
    def close(self) -> None:
        """Close the file; may be called again."""
        self._file.close()

    def __repr__(self) -> str:
        return f"JSONLWriter({str(self._path)!r}{', closed' * self._file.closed})"

    def _mend(self) -> bool:
        """Remove a half-written last line; return whether the file still ends inside a line."""
        if not self._path.is_file():  # a pipe or a device holds no lines to continue
            return False
        tail = _after_last_newline(self._path)
        # Only what a killed writer leaves is removed: a line that has begun as an object, or
        # the zeros that a file system puts where data never arrived. Anything else may be a
        # file that was given by mistake, and is kept.
        if tail[:1] in (b"{", b"\0") and _parsed(tail) is None:
            self._file.truncate(self._path.stat().st_size - len(tail))
            logger.warning(
                "%s: removed a half-written last line (%d bytes), which a killed run left",
                self._path,
                len(tail),
            )
            return False
        return tail != b""

    def _cut_back(self, size_bytes: int) -> None:
        try:
            self._file.truncate(size_bytes)
        except OSError:
            # Then at least the next record starts on a line of its own.
            with suppress(OSError):
                self._inside_line = os.fstat(self._file.fileno()).st_size > size_bytes


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read the records of a file that `JSONLWriter` wrote, or any JSONL of objects.

    A last line that has no line end and is no whole record is what a killed run leaves: it is
    skipped with a warning. Blank lines are skipped. Values ``"nan"``, ``"inf"`` and ``"-inf"``
    become floats (see the module's docstring for the limits of that).

    Args:
        path: The file.

    Returns:
        One dict per line, in order.

    Raises:
        TypeError: `path` is not a str or path object.
        ValueError: `path` is a folder, or a line that was ended is no JSON object; the message
            has the path and the line number.
        OSError: The file cannot be read.
    """
    path = checked_file_path(path)
    records = []
    # Bytes, so that a character cut in half counts as a torn line as well.
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        record = _parsed(line)
        if record is not None:
            records.append({key: _restored(value) for key, value in record.items()})
        elif number == len(lines):
            warnings.warn(
                f"{path}, line {number}: skipped a half-written last line ({len(line)} bytes), "
                "which a killed run leaves",
                stacklevel=2,
            )
        else:
            raise ValueError(
                f"{path}, line {number}: expected a JSON object, found {line[:80]!r}; "
                "remove the line to read the others"
            )
    return records


def checked_file_path(path: str | os.PathLike[str]) -> Path:
    """Return `path` as a Path, or raise if it cannot be a file's."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path={path!r}: expected a str or path object")
    name = os.fspath(path)
    if not isinstance(name, str):
        raise TypeError(f"path={path!r}: expected a str or path object, not bytes")
    if name.endswith(("/", os.sep)) or os.path.isdir(name or "."):
        raise ValueError(f"path={name!r} is a folder: expected the path of a file")
    return Path(name)


def _plain(value: object, where: str) -> object:
    """Return `value` in the types that JSON has; `where` names it in an error."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{where} has the key {key!r}: expected a str")
        return {key: _plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if callable(item := getattr(value, "item", None)):
        return _plain_scalar(value, item, where)
    raise TypeError(
        f"{where} is {value!r}, of type {type(value).__name__}: expected None, bool, int, "
        "float, str, a mapping, a list, a tuple or a scalar with .item()"
    )


def _plain_scalar(value: object, item: Any, where: str) -> object:
    expected = f"{where} is {value!r}, of type {type(value).__name__}: expected one number"
    try:
        scalar = item()
    except Exception as error:  # more than one element, or no element
        raise TypeError(f"{expected}, and .item() failed ({error})") from error
    # Not back into _plain with anything: some .item() return an object of their own type.
    if not (scalar is None or isinstance(scalar, bool | int | float | str)):
        raise TypeError(f"{expected}, and .item() gave {type(scalar).__name__}")
    return _plain(scalar, where)


def _restored(value: Any) -> Any:
    if isinstance(value, str):
        return float(value) if value in _NON_FINITE else value
    if isinstance(value, dict):
        return {key: _restored(item) for key, item in value.items()}
    return [_restored(item) for item in value] if isinstance(value, list) else value


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line.decode("utf-8"))
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _after_last_newline(path: Path) -> bytes:
    tail = b""
    with path.open("rb") as file:
        start = file.seek(0, os.SEEK_END)
        while start > 0 and b"\n" not in tail:
            end, start = start, max(start - _BLOCK_BYTES, 0)
            file.seek(start)
            tail = file.read(end - start) + tail
    return tail.rpartition(b"\n")[2]
