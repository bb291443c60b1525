"""The progress line: what it says, where, how often, and that it cannot stop a run."""

import contextlib
import errno
import io
import math
import os
import re
import sys

import numpy as np
import pytest

from torchfast.reporting import ProgressLine, progress

FULL_RECORD = {
    "step": 120,
    "loss": 2.345,
    "lr": 3e-4,
    "grad_norm": 0.5314,
    "items_per_s": 12_345.0,
    "step_ms": {"p50": 8.1, "p90": 9.0, "max": 12.0},
    "memory_bytes": 1.2e9,
    "eta_s": 45.2,
    "epoch": 3,
    "unit": "not shown",
}


class Terminal(io.StringIO):
    """A stream that says it is a terminal, counts its writes, and can show its screen."""

    def __init__(self):
        super().__init__()
        self.writes = []

    def isatty(self):
        return True

    def write(self, text):
        self.writes.append(text)
        return super().write(text)

    def screen(self):
        """What a terminal would show: carriage returns and clear-to-end applied."""
        shown = []
        for row in self.getvalue().split("\n"):
            cells, column = [], 0
            for token in re.findall(r"\x1b\[K|.|\r", row, re.DOTALL):
                if token == "\r":
                    column = 0
                elif token == "\x1b[K":
                    del cells[column:]
                else:
                    cells[column : column + 1] = token
                    column += 1
            shown.append("".join(cells))
        return shown


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until a test moves it: ``clock[0] += 0.1``."""
    now = [1000.0]
    monkeypatch.setattr(progress, "monotonic", lambda: now[0])
    return now


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm-256color")


def plain(record, **arguments):
    out = io.StringIO()
    with ProgressLine("plain", stream=out, **arguments) as line:
        line.update(record)
    return out.getvalue().removesuffix("\n")


# --- ProgressLine: what a line says ---------------------------------------------------------------


def test_line_shows_every_field_in_order():
    assert plain(FULL_RECORD, total_steps=1000, unit="tokens") == (
        "step 120/1000  loss 2.345  lr 3e-04  grad 0.531  12.3k tokens/s  8.1 ms  1.2 GB  eta 0:45"
    )


@pytest.mark.parametrize("key", sorted(set(FULL_RECORD) - {"epoch", "unit"}))
def test_missing_and_none_are_left_out(key):
    without = {name: value for name, value in FULL_RECORD.items() if name != key}
    shown = plain(without)
    assert len(shown.split("  ")) == 7
    assert plain({**FULL_RECORD, key: None}) == shown
    assert plain({key: FULL_RECORD[key]}) in plain(FULL_RECORD)


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"loss": math.nan}, "loss nan"),
        ({"loss": math.inf}, "loss inf"),
        ({"loss": 2.3}, "loss 2.300"),
        ({"loss": 0.0}, "loss 0.000"),
        ({"loss": 1234.0}, "loss 1234"),
        ({"loss": 123456.0}, "loss 1.235e+05"),
        ({"loss": -0.00001234}, "loss -1.234e-05"),
        ({"loss": np.float32(2.5)}, "loss 2.500"),
        ({"lr": 2.5e-4}, "lr 2.5e-04"),
        ({"lr": 0.0}, "lr 0e+00"),
        ({"lr": math.nan}, "lr nan"),
        ({"lr": [1e-3, 3e-4, 5e-4]}, "lr 3e-04..1e-03"),
        ({"lr": (3e-4, 3e-4)}, "lr 3e-04"),
        ({"items_per_s": 999.4}, "999 samples/s"),
        ({"items_per_s": 999.6}, "1.0k samples/s"),
        ({"items_per_s": 2_500_000}, "2.5M samples/s"),
        ({"items_per_s": math.nan}, "nan samples/s"),
        ({"items_per_s": math.inf}, "inf samples/s"),
        ({"items_per_s": 1e18}, "1000000T samples/s"),
        ({"step_ms": {"p50": 0.034}}, "0.034 ms"),
        ({"step_ms": {"p50": 1234.5}}, "1234 ms"),
        ({"step_ms": {"p90": 3.0}}, ""),
        ({"memory_bytes": 139_400_000_000}, "139 GB"),
        ({"eta_s": 59.6}, "eta 1:00"),
        ({"eta_s": 3661}, "eta 1:01:01"),
        ({"eta_s": 2 * 86400 + 3 * 3600 + 5}, "eta 2d 03:00:05"),
        ({"eta_s": -3}, "eta 0:00"),
        ({"eta_s": math.inf}, "eta inf"),
        ({"eta_s": math.nan}, "eta nan"),
        ({}, ""),
    ],
)
def test_number_formats(record, expected):
    assert plain(record) == expected


def test_line_is_ascii_whatever_the_unit():
    assert plain({"items_per_s": 3}, unit="Wörter") == "3.0 W\\xf6rter/s"


# --- ProgressLine: modes --------------------------------------------------------------------------


def test_plain_prints_one_line_per_update_without_control_characters(clock):
    out = Terminal()
    with ProgressLine("plain", stream=out) as line:
        for step in range(5):
            line.update({"step": step})
        line.message("hello")
    assert out.writes == ["step 0\n", "step 1\n", "step 2\n", "step 3\n", "step 4\n", "hello\n"]


def test_terminal_rewrites_one_line_and_clears_what_was_longer(clock):
    out = Terminal()
    line = ProgressLine("terminal", stream=out)
    line.update({"step": 1, "loss": 2.5})
    assert out.screen() == ["step 1  loss 2.500"]
    clock[0] += 1
    line.update({"step": 2})
    assert out.screen() == ["step 2"]
    line.close()
    assert out.screen() == ["step 2", ""]
    assert all(text.startswith("\r") for text in out.writes[:-1])


def test_terminal_is_throttled_and_the_last_record_is_shown_at_close(clock):
    out = Terminal()
    with ProgressLine("terminal", stream=out) as line:
        for step in range(1000):  # a second in all
            line.update({"step": step})
            clock[0] += 0.001
        assert 9 <= len(out.writes) <= 11
        assert out.screen() != ["step 999"]
    assert out.screen() == ["step 999", ""]
    assert len(out.writes) <= 13


def test_close_does_not_draw_again_what_was_shown(clock):
    out = Terminal()
    with ProgressLine("terminal", stream=out) as line:
        line.update({"step": 1})
        line.update({"step": 2})  # held back, then overtaken
        clock[0] += 1
        line.update({"step": 3})
    assert len(out.writes) == 3
    assert out.writes[2] == "\n"


def test_message_leaves_the_rewritten_line_whole(clock):
    out = Terminal()
    with ProgressLine("terminal", stream=out) as line:
        line.message("before any record")
        line.update({"step": 1, "loss": 2.5})
        line.update({"step": 2, "loss": 2.4})  # held back, so the message has to bring it
        line.message("evaluation: 1")
        assert out.screen() == ["before any record", "evaluation: 1", "step 2  loss 2.400"]
        clock[0] += 1
        line.update({"step": 3})
    assert out.screen() == ["before any record", "evaluation: 1", "step 3", ""]


def test_off_writes_nothing(clock):
    for mode in ("off", False):
        out = Terminal()
        with ProgressLine(mode, stream=out) as line:
            line.update(FULL_RECORD)
            line.message("hello")
        assert out.writes == []


@pytest.mark.parametrize("mode", ["auto", True])
@pytest.mark.parametrize(
    ("stream_type", "term", "rewrites"),
    [
        (Terminal, "xterm", True),
        (Terminal, "dumb", False),
        (io.StringIO, "xterm", False),
    ],
)
def test_auto_follows_the_stream_and_term(monkeypatch, mode, stream_type, term, rewrites):
    monkeypatch.setenv("TERM", term)
    out = stream_type()
    with ProgressLine(mode, stream=out) as line:
        line.update({"step": 1})
    assert ("\r" in out.getvalue()) is rewrites


def test_terminal_mode_is_taken_at_its_word():
    out = io.StringIO()
    with ProgressLine("terminal", stream=out) as line:
        line.update({"step": 1})
    assert out.getvalue() == "\rstep 1\x1b[K\n"


def test_stream_defaults_to_stderr_at_the_time_of_the_call():
    line = ProgressLine("plain")
    first, second = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(first):
        line.update({"step": 1})
    with contextlib.redirect_stderr(second):
        line.update({"step": 2})
        line.close()
    assert (first.getvalue(), second.getvalue()) == ("step 1\n", "step 2\n")


def test_close_ends_the_line_on_the_stream_that_holds_it():
    line = ProgressLine()
    out, other = Terminal(), io.StringIO()
    with contextlib.redirect_stderr(out):
        line.update({"step": 1})
    with contextlib.redirect_stderr(other):
        line.close()
    assert out.screen() == ["step 1", ""]
    assert other.getvalue() == ""


def test_no_stderr_at_all(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    with ProgressLine("terminal") as line:
        line.update({"step": 1})


def test_close_is_idempotent_and_final_and_leaves_the_stream_open(clock):
    out = Terminal()
    line = ProgressLine("terminal", stream=out)
    line.update({"step": 1})
    line.close()
    written = out.getvalue()
    line.close()
    line.update({"step": 2})
    line.message("late")
    assert out.getvalue() == written
    assert not out.closed


def test_close_without_a_line_writes_nothing():
    out = Terminal()
    ProgressLine("terminal", stream=out).close()
    assert out.writes == []


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (
            90,
            "step 120  loss 2.345  lr 3e-04  grad 0.531  12.3k samples/s  8.1 ms  1.2 GB  eta 0:45",
        ),
        (80, "step 120  loss 2.345  lr 3e-04  12.3k samples/s  8.1 ms  1.2 GB  eta 0:45"),
        (60, "step 120  loss 2.345  lr 3e-04  12.3k samples/s  eta 0:45"),
        (50, "step 120  loss 2.345  12.3k samples/s  eta 0:45"),
        (21, "step 120  loss 2.345"),
        (20, "step 120"),
        (6, "step "),
        (1, ""),
    ],
)
def test_narrow_terminal_loses_whole_fields(monkeypatch, columns, expected):
    monkeypatch.setenv("COLUMNS", str(columns))
    out = Terminal()
    with ProgressLine("terminal", stream=out) as line:
        line.update(FULL_RECORD)
        assert out.screen() == [expected]


def test_width_is_that_of_the_stream_first(monkeypatch):
    class Narrow(Terminal):
        def fileno(self):
            return 77

    sizes = {77: os.terminal_size((20, 5))}
    monkeypatch.setattr(os, "get_terminal_size", lambda fd: sizes[fd])
    out = Narrow()
    with ProgressLine("terminal", stream=out) as line:
        line.update(FULL_RECORD)
        assert out.screen() == ["step 120"]


# --- ProgressLine: streams that fail --------------------------------------------------------------


class Broken(Terminal):
    def __init__(self, error, after=0):
        super().__init__()
        self.error, self.after = error, after

    def write(self, text):
        if len(self.writes) >= self.after:
            raise self.error
        return super().write(text)


@pytest.mark.parametrize("mode", ["plain", "terminal", "auto"])
@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize(
    "error",
    [
        BrokenPipeError(errno.EPIPE, "Broken pipe"),
        ValueError("I/O operation on closed file"),
        RuntimeError("reentrant call"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_broken_stream_turns_the_line_off_with_one_warning(clock, caplog, mode, after, error):
    out = Broken(error, after)
    with ProgressLine(mode, stream=out) as line:
        for step in range(4):
            line.update({"step": step})
            line.message("hello")
            clock[0] += 1
    assert len(out.writes) == after
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert type(error).__name__ in caplog.text
    assert type(error).__name__ in repr(line)


@pytest.mark.parametrize("stream_type", [Terminal, io.StringIO])
def test_closed_stream_turns_the_line_off(caplog, stream_type):
    out = stream_type()
    line = ProgressLine(stream=out)  # isatty() of a closed StringIO fails before write() does
    line.update({"step": 1})
    out.close()
    line.update({"step": 2})
    line.message("hello")
    line.close()
    assert len(caplog.records) == 1


def test_interrupt_is_not_swallowed():
    line = ProgressLine("plain", stream=Broken(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        line.update({"step": 1})


def test_reader_that_goes_away_does_not_stop_the_program():
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", buffering=1) as out:
        with ProgressLine("plain", stream=out) as line:
            line.update({"step": 1})
            line.update({"step": 2})
        assert "BrokenPipeError" in repr(line)
        with contextlib.suppress(BrokenPipeError):
            out.close()


def test_message_that_the_stream_cannot_encode_is_escaped():
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii", errors="strict", write_through=True)
    with ProgressLine("plain", stream=out, unit="naïve") as line:
        line.message("perplexité 3 → 2")
        line.update({"items_per_s": 5})
    assert raw.getvalue() == b"perplexit\\xe9 3 \\u2192 2\n5.0 na\\xefve/s\n"
    assert "off" not in repr(line)


def test_message_keeps_what_the_stream_can_encode():
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="utf-8", write_through=True)
    with ProgressLine("plain", stream=out) as line:
        line.message("perplexité 3 → 2 \udc80")
    assert raw.getvalue().decode() == "perplexité 3 → 2 \\udc80\n"


# --- ProgressLine: arguments ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "name"),
    [
        ({"mode": "fancy"}, ValueError, "mode='fancy'"),
        ({"mode": None}, TypeError, "mode=None"),
        ({"mode": 1}, TypeError, "mode=1"),
        ({"total_steps": 0}, ValueError, "total_steps=0"),
        ({"total_steps": 10.0}, TypeError, "total_steps=10.0"),
        ({"total_steps": True}, TypeError, "total_steps=True"),
        ({"unit": None}, TypeError, "unit=None"),
        ({"stream": "stderr"}, TypeError, "stream='stderr'"),
    ],
)
def test_bad_arguments_are_named(arguments, error, name):
    with pytest.raises(error, match=re.escape(name)):
        ProgressLine(**arguments)


@pytest.mark.parametrize(
    ("record", "name"),
    [
        ([("step", 1)], "record="),
        ({"loss": "2.5"}, "'loss'"),
        ({"loss": 1j}, "'loss'"),
        ({"lr": ["1e-3"]}, "'lr'"),
        ({"step_ms": 8.1}, "'step_ms'"),
        ({"step_ms": {"p50": "8"}}, "'step_ms'"),
    ],
)
def test_bad_record_raises_in_update_even_when_held_back(clock, record, name):
    line = ProgressLine("terminal", stream=Terminal())
    line.update({"step": 1})
    with pytest.raises(TypeError, match=name):
        line.update(record)
    line.close()


def test_bad_message_raises():
    with pytest.raises(TypeError, match="text=3"):
        ProgressLine("plain", stream=io.StringIO()).message(3)
