"""A progress line that cannot stop a run.

On a terminal one line is rewritten in place, at most ten times a second, since a terminal is
slow and an eye is slower; what the throttle holds back is still shown at the end. Elsewhere
(a file, a pipe, a CI log) each update is a line of its own.

Three rules make it safe to leave on in a job that runs for days:

- The line is ASCII, and a message falls back to escapes, so no locale can fail it.
- The first error of the stream turns the line off, with one warning in the log.
- A bad record raises in `update`, never later, when `close` runs on the way out of an error.
"""

import logging
import math
import os
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from time import monotonic
from typing import Final, TextIO, final

from typing_extensions import override

from torchfast._core.closing import Closing
from torchfast.reporting._fields import fields_of, joined

logger = logging.getLogger(__name__)

_MODES: Final = ("auto", "terminal", "plain", "off")
_MIN_INTERVAL_S: Final = 0.1
_CLEAR_TO_END: Final = "\x1b[K"


@final
class ProgressLine(Closing):
    """Show the newest record of a run on one line.

    Args:
        mode: ``"terminal"`` rewrites one line, ``"plain"`` prints one line per update,
            ``"off"`` prints nothing, messages included; ``"auto"`` is ``"terminal"`` on a
            terminal that can rewrite a line (``TERM`` is not ``dumb``) and ``"plain"``
            elsewhere. True means ``"auto"``, False ``"off"``.
        total_steps: Steps of the whole run, shown after the current one.
        unit: What ``items_per_s`` counts.
        stream: Where to write; ``sys.stderr`` as it is at each call, if None.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: `mode` is unknown, or `total_steps` is below 1.

    Synchronizes: Never, unless a record holds a device tensor, whose value is read.

    Example:
        >>> with ProgressLine("plain", total_steps=1000, unit="tokens", stream=sys.stdout) as line:
        ...     line.update({"step": 120, "loss": 2.345, "items_per_s": 12300, "eta_s": 45})
        ...     line.message("saved step 120")
        step 120/1000  loss 2.345  12.3k tokens/s  eta 0:45
        saved step 120
    """

    def __init__(
        self,
        mode: str | bool = "auto",
        *,
        total_steps: int | None = None,
        unit: str = "samples",
        stream: TextIO | None = None,
    ) -> None:
        if isinstance(mode, bool):
            mode = "auto" if mode else "off"
        if mode not in _MODES:
            kind = ValueError if isinstance(mode, str) else TypeError
            raise kind(f"mode={mode!r}: expected a bool or one of {_MODES}")
        if total_steps is not None:
            if isinstance(total_steps, bool) or not isinstance(total_steps, int):
                raise TypeError(f"total_steps={total_steps!r}: expected an int or None")
            if total_steps < 1:
                raise ValueError(f"total_steps={total_steps}: expected at least 1, or None")
        if not isinstance(unit, str):
            raise TypeError(f"unit={unit!r}: expected a str, such as 'tokens'")
        if stream is not None and not callable(getattr(stream, "write", None)):
            raise TypeError(f"stream={stream!r}: expected a text stream with write(), or None")
        self._mode = mode
        self._total_steps = total_steps
        self._unit = unit.encode("ascii", "backslashreplace").decode("ascii")
        self._stream = stream
        self._fields: dict[str, str] | None = None  # of the newest record
        self._pending = False  # the throttle holds the newest record back
        self._drawn_at_s = -math.inf
        self._open_on: TextIO | None = None  # the stream that holds an unfinished line
        self._closed = False
        self._failure: str | None = None

    def update(self, record: Mapping[str, object]) -> None:
        """Show a record; on a terminal, at most ten times a second.

        Args:
            record: Any of ``step``, ``loss``, ``lr``, ``grad_norm``, ``items_per_s``,
                ``memory_bytes``, ``eta_s`` (numbers; ``lr`` may be a list, of which the lowest
                and the highest are shown) and ``step_ms`` (a mapping, of which ``p50`` is
                shown). What is missing or None is left out, other keys are ignored. Does
                nothing after `close`.

        Raises:
            TypeError: The record is no mapping, or one of these values is no number.
        """
        if not isinstance(record, Mapping):
            raise TypeError(f"record={record!r}: expected a mapping such as {{'step': 1}}")
        stream, style = self._target()
        if stream is None or style == "off":
            return
        self._fields = fields_of(record, self._total_steps, self._unit)
        if style == "plain":
            self._write(stream, joined(self._fields) + "\n")
        elif monotonic() - self._drawn_at_s >= _MIN_INTERVAL_S:
            self._draw(stream)
        else:
            self._pending = True

    def message(self, text: str) -> None:
        """Print a full line, above the rewritten line if there is one.

        Args:
            text: The line, without its line end. Characters that the stream cannot encode
                become escapes. Does nothing under ``"off"`` and after `close`.

        Raises:
            TypeError: `text` is not a str.
        """
        if not isinstance(text, str):
            raise TypeError(f"text={text!r}: expected a str")
        stream, style = self._target()
        if stream is None or style == "off":
            return
        text = _encodable(text, stream) + "\n"
        if style == "terminal" and self._fields is not None:
            self._draw(stream, above=text)
        else:
            self._write(stream, text)

    @override
    def close(self) -> None:
        """Show what the throttle held back and end the line; the stream stays open."""
        stream, style = self._target()
        self._closed = True
        if stream is not None and style == "terminal" and self._pending:
            self._draw(stream)
        if self._open_on is not None:
            stream, self._open_on = self._open_on, None
            self._write(stream, "\n")

    def __repr__(self) -> str:
        state = f", off: {self._failure}" if self._failure else ", closed" * self._closed
        return f"ProgressLine({self._mode!r}, total_steps={self._total_steps}{state})"

    def _target(self) -> tuple[TextIO | None, str]:
        """Return the stream of this call and how to write to it."""
        if self._mode == "off" or self._closed or self._failure:
            return None, "off"
        # Looked up now, not at construction: stderr may have been redirected since. It is
        # None in a process without a console.
        stream = self._stream if self._stream is not None else sys.stderr
        if stream is None or self._mode != "auto":
            return stream, self._mode
        if os.environ.get("TERM") == "dumb":
            return stream, "plain"
        try:
            is_terminal = stream.isatty()
        except AttributeError:  # an object with no more than write()
            is_terminal = False
        except Exception as error:
            self._turn_off(error)
            return None, "off"
        return stream, "terminal" if is_terminal else "plain"

    def _draw(self, stream: TextIO, above: str = "") -> None:
        """Rewrite the line, printing `above` over it first; one write for both."""
        # The last column stays free: some terminals wrap as soon as it is filled.
        line = joined(self._fields or {}, _terminal_width(stream) - 1)
        if above:
            above = f"\r{_CLEAR_TO_END}{above}"
        self._drawn_at_s = monotonic()
        self._pending = False
        self._open_on = stream
        self._write(stream, f"{above}\r{line}{_CLEAR_TO_END}")

    def _write(self, stream: TextIO, text: str) -> None:
        try:
            stream.write(text)
            stream.flush()
        except Exception as error:
            # Whatever a foreign stream raises (a closed file, a broken pipe, a notebook that
            # has gone), training is worth more than its progress line.
            self._turn_off(error)

    def _turn_off(self, error: Exception) -> None:
        self._failure = f"{type(error).__name__}: {error}"
        self._open_on = None
        # With stderr closed, the logging module itself raises while it reports that.
        with suppress(Exception):
            logger.warning(
                "the progress line is off from here on, its stream failed (%s); "
                "give ProgressLine another stream, or mode='off'",
                self._failure,
            )


def _terminal_width(stream: TextIO) -> int:
    # The stream's own terminal first: stdout, which shutil asks, may be a pipe.
    with suppress(AttributeError, OSError, ValueError):
        if columns := os.get_terminal_size(stream.fileno()).columns:
            return columns
    return shutil.get_terminal_size().columns


def _encodable(text: str, stream: TextIO) -> str:
    encoding = getattr(stream, "encoding", None)
    if not isinstance(encoding, str):  # StringIO has None, and takes any text
        return text
    try:
        return text.encode(encoding, "backslashreplace").decode(encoding)
    except (LookupError, UnicodeError):  # not an encoding that Python knows
        return text.encode("ascii", "backslashreplace").decode("ascii")
