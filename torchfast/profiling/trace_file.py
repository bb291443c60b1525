"""Reading a trace of torch.profiler, of any size, event by event.

A trace is one JSON object: some facts about the machine, then ``traceEvents``, a list that may have
millions of entries. ``json.load`` would make objects of all of them at once: a file of 1 GB takes
some 10 GB of memory. Here the file is read in pieces, one event is decoded at a time, and what an
event is not asked for is dropped before the next is read. So the memory taken is that of what is
kept, however long the file is.

A run that was killed leaves a file that ends in the middle. What came before is good and is used,
with a remark. What is no trace at all is refused: `TraceError` says what was found instead.
"""

from __future__ import annotations

import codecs
import json
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Final, final

from torchfast._core.errors import TraceError

_PIECE: Final = 1 << 22
# Kernels with long templates take some kB; nothing of a trace comes near this.
_LONGEST_EVENT: Final = 1 << 26
# "-Infinity", or an escape such as "\\u00e9", may be cut anywhere.
_LONGEST_WORD: Final = 12
_GZIP: Final = b"\x1f\x8b"
_ANY_GZIP: Final = zlib.MAX_WBITS | 16
# Between two events; and how many braces from the end may belong to one event.
_LONGEST_GAP: Final = 32
_TRIES: Final = 64
# Parts of the message on a file that is no JSON.
_TOO_DEEP: Final = "it is nested too deeply"
_TOO_LONG: Final = "a value of it is longer than any of a trace"
_SPACE: Final = " \t\r\n"
_SEPARATORS: Final = " \t\r\n,"
_REMEDY: Final = (
    "give the file that torch.profiler's export_chrome_trace() or torchfast.profile() wrote"
)


@final
class TraceFile:
    """The events of a trace, one after the other, in the order of the file.

    Args:
        path: A ``.json`` or ``.json.gz`` file; what it is, is told by its content.

    Attributes:
        header: What stands before the events, once `events` has begun.
        remarks: What the reader should know of the file, once `events` is through.

    Raises:
        TraceError: The file is empty, or is no trace.
        OSError: It cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.header: dict[str, Any] = {}
        self.remarks: list[str] = []
        self._num_read = 0
        if self.path.stat().st_size == 0:
            raise TraceError(f"{self.path} is empty: the run ended before it wrote its trace")

    @property
    def part_read(self) -> float:
        """Which part of the file has been read, from 0 to 1."""
        return self._num_read / max(self.path.stat().st_size, 1)

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield each event as a dict; a second call reads the file again."""
        for events in self.event_lists():
            yield from events

    def event_lists(self) -> Iterator[list[dict[str, Any]]]:
        """Yield the events, as many at a time as a piece of the file holds."""
        self.header, self.remarks, self._num_read = {}, [], 0
        with self.path.open("rb") as raw:
            text = _Text(self._counted(raw))
            if not self._find_events(text):
                return
            yield from self._list(text)
            if text.cut_short:
                self._remark_cut()

    def _counted(self, raw: IO[bytes]) -> Iterator[str]:
        for piece in _pieces(raw):
            self._num_read = raw.tell()
            yield piece

    def _find_events(self, text: _Text) -> bool:
        """Read up to the first event; False if the file ends before."""
        first = text.peek(_SPACE + "\ufeff")
        if first == "[":  # the other form of a Chrome trace: the list alone
            text.skip(1)
            return True
        if not first:
            raise self._cut_before_events()
        if first != "{":
            raise TraceError(f"{self.path} is not JSON, it begins with {first!r}; {_REMEDY}")
        text.skip(1)
        while True:
            following = text.peek(_SEPARATORS)
            if following in ("", "}"):
                break
            try:
                name = text.value()
            except ValueError as error:
                raise self._not_json(error) from None
            if text.peek(_SPACE) != ":":
                break
            text.skip(1)
            if name == "traceEvents":
                if text.peek(_SPACE) != "[":
                    raise TraceError(f"{self.path} has traceEvents that are no list; {_REMEDY}")
                text.skip(1)
                return True
            text.peek(_SPACE)
            try:
                self.header[str(name)] = text.value()
            except ValueError as error:
                raise self._not_json(error) from None
        if text.cut_short:
            raise self._cut_before_events()
        raise TraceError(
            f"{self.path} is JSON without traceEvents (it has "
            f"{', '.join(sorted(self.header)[:5]) or 'nothing'}); {_REMEDY}"
        )

    def _list(self, text: _Text) -> Iterator[list[dict[str, Any]]]:
        number = 0
        while True:
            if many := text.values():
                number += len(many)
                yield [event for event in many if isinstance(event, dict)]
            following = text.peek(_SEPARATORS)
            if following == "]":
                return
            if following == "":
                text.cut_short = True
                return
            try:
                event = text.value()
            except ValueError as error:
                if text.cut_short:
                    return
                if not number:
                    raise self._not_json(error) from None
                self.remarks.append(
                    f"{self.path.name} is damaged after {number} events; those are used"
                )
                return
            number += 1
            if isinstance(event, dict):
                yield [event]

    def _cut_before_events(self) -> TraceError:
        return TraceError(f"{self.path} ends before its first event: it was cut short; {_REMEDY}")

    def _not_json(self, error: ValueError) -> TraceError:
        return TraceError(f"{self.path} is not a whole JSON file ({error}); {_REMEDY}")

    def _remark_cut(self) -> None:
        self.remarks.append(
            f"{self.path.name} ends in the middle of its events; what came before is used"
        )


def _pieces(raw: IO[bytes]) -> Iterator[str]:
    """Yield the text of a file, decompressed; a damaged gzip gives what comes before the damage."""
    # Names of kernels and paths may hold anything; a wrong character is no reason to give up.
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    unzip = zlib.decompressobj(_ANY_GZIP) if raw.read(2) == _GZIP else None
    raw.seek(0)
    while piece := raw.read(_PIECE):
        while piece:
            data = piece
            if unzip is not None:
                try:
                    data = unzip.decompress(piece, _PIECE)
                except zlib.error:
                    return
            if text := decoder.decode(data):
                yield text
            piece = b""
            if unzip is not None:
                piece = unzip.unconsumed_tail
                # A file of several members, as parallel compressors and `cat` write it.
                if unzip.eof and (piece := unzip.unused_data):
                    unzip = zlib.decompressobj(_ANY_GZIP)


class _Text:
    """Pieces of text of which one is held, decoded value by value."""

    def __init__(self, pieces: Iterator[str]) -> None:
        self._pieces = pieces
        self._held = ""
        self._at = 0
        self._ended = False
        self._decode: Callable[[str, int], tuple[Any, int]] = json.JSONDecoder(
            strict=False
        ).raw_decode
        self._decode_list: Callable[[str], Any] = json.JSONDecoder(strict=False).decode
        self._is_tried = False
        self.cut_short = False

    def peek(self, skipped: str) -> str:
        """Return the next character that is none of `skipped`; empty at the end."""
        while True:
            held, at = self._held, self._at
            end = len(held)
            while at < end and held[at] in skipped:
                at += 1
            self._at = at
            if at < end:
                return held[at]
            if not self._more():
                self.cut_short = True
                return ""

    def skip(self, number: int) -> None:
        """Go over characters that were looked at."""
        self._at += number

    def value(self) -> Any:
        """Decode the value that begins here; ValueError if it is none."""
        while True:
            try:
                value, end = self._decode(self._held, self._at)
            except RecursionError:
                raise ValueError(_TOO_DEEP) from None
            except json.JSONDecodeError as error:
                # It may only be that the rest of it has not been read.
                if self._is_wrong(error):
                    raise
                if len(self._held) - self._at > _LONGEST_EVENT:
                    raise ValueError(_TOO_LONG) from None
                if not self._more():
                    self.cut_short = True
                    raise
                continue
            # A number at the very end of what is held may go on.
            if end == len(self._held) and self._more():
                continue
            self._at = end
            return value

    def values(self) -> list[Any]:
        """Decode the values of a list that are held as a whole, all at once; [] if that fails.

        Decoded one by one they take several times as long.
        """
        if self._is_tried or self.peek(_SEPARATORS) in ("", "]"):
            return []
        self._is_tried = True  # until more is held
        held, at, end = self._held, self._at, len(self._held)
        for _ in range(_TRIES):
            end = held.rfind("{", at, end)
            if end <= at:
                return []
            before = held[max(at, end - _LONGEST_GAP) : end].rstrip(_SPACE)
            if before.endswith(",") and before[:-1].rstrip(_SPACE).endswith("}"):
                break
        else:
            return []
        # That was the comma before a value, or before one within a value; the latter is no JSON.
        try:
            found: list[Any] = self._decode_list(f"[{held[at:end].rstrip(_SEPARATORS)}]")
        except (ValueError, RecursionError):
            return []
        self._at = end
        return found

    def _is_wrong(self, error: json.JSONDecodeError) -> bool:
        """Return whether more text would not help: the error is not at the end of what is held."""
        unterminated = error.msg.startswith("Unterminated string")
        return not unterminated and error.pos < len(self._held) - _LONGEST_WORD

    def _more(self) -> bool:
        if self._ended:
            return False
        piece = next(self._pieces, "")
        if not piece:
            self._ended = True
            return False
        self._held = self._held[self._at :] + piece
        self._at = 0
        self._is_tried = False
        return True
