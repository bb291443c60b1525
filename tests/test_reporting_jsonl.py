"""The JSONL log: strict lines, whole lines, and what is left of a broken one."""

import contextlib
import errno
import json
import logging
import math
import os
import re
import resource
from collections import OrderedDict
from pathlib import PurePath

import numpy as np
import pytest

from torchfast.reporting import JSONLWriter, read_jsonl

# --- JSONLWriter ----------------------------------------------------------------------------------


def strict_lines(path):
    """Parse as a strict reader does, to which NaN and Infinity are no words."""

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    text = path.read_text(encoding="ascii")
    assert text == "" or text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_records_round_trip(tmp_path):
    path = tmp_path / "a" / "b" / "log.jsonl"
    records = [
        {"step": 1, "loss": 0.1 + 0.2, "big": 10**30, "ok": True, "none": None},
        {"text": "a\nb\té\u2028\udc80", "nested": {"list": [1, [2.5, {"x": []}]], "empty": {}}},
        {"loss": -math.inf, "deep": [math.inf, {"grad_norm": [math.inf]}]},
        {},
    ]
    with JSONLWriter(path) as log:
        assert log.path == path
        for record in records:
            log.write(record)
    assert read_jsonl(path) == records
    assert len(strict_lines(path)) == 4


def test_non_finite_floats_are_text_in_the_file_and_floats_when_read(tmp_path):
    path = tmp_path / "log.jsonl"
    with JSONLWriter(path) as log:
        log.write({"a": math.nan, "b": [math.inf, np.float32("-inf")], "c": -math.nan})
    assert strict_lines(path) == [{"a": "nan", "b": ["inf", "-inf"], "c": "nan"}]
    (record,) = read_jsonl(path)
    assert math.isnan(record["a"])
    assert record["b"] == [math.inf, -math.inf]
    assert math.isnan(record["c"])


def test_only_the_three_exact_texts_become_floats(tmp_path):
    path = tmp_path / "log.jsonl"
    texts = {"nan": "NaN", "inf": "+inf", "-inf": " inf", "x": "infinity", "y": "nano", "z": "1.5"}
    with JSONLWriter(path) as log:
        log.write(texts)
        log.write({"x": "nan"})  # the documented price
    first, second = read_jsonl(path)
    assert first == texts
    assert math.isnan(second["x"])


def test_tuples_mappings_and_scalars_are_converted(tmp_path):
    path = tmp_path / "log.jsonl"

    class Item:
        def item(self):
            return 3

    with JSONLWriter(path) as log:
        log.write(
            OrderedDict(
                betas=(0.9, 0.999),
                f32=np.float32(0.5),
                f64=np.float64(0.1),
                i64=np.int64(-7),
                bool=np.bool_(True),
                one=np.ones((1, 1)),
                nan=np.float16("nan"),
                mine=Item(),
            )
        )
    assert strict_lines(path) == [
        {
            "betas": [0.9, 0.999],
            "f32": 0.5,
            "f64": 0.1,
            "i64": -7,
            "bool": True,
            "one": 1.0,
            "nan": "nan",
            "mine": 3,
        }
    ]


class ItemFails:
    def item(self):
        raise RuntimeError("no value")


@pytest.mark.parametrize(
    ("record", "where"),
    [
        ({"path": PurePath("x")}, "record['path']"),
        ({"a": {"b": [1, {"c": {1, 2}}]}}, "record['a']['b'][1]['c']"),
        ({"a": b"bytes"}, "record['a']"),
        ({"a": 1j}, "record['a']"),
        ({"a": np.arange(3)}, "record['a']"),
        ({"a": np.datetime64("2020-01-01")}, "record['a']"),
        ({"a": np.float32}, "record['a']"),
        ({"a": [np.longdouble(1)]}, "record['a'][0]"),
        ({"a": ItemFails()}, "record['a']"),
        ({1: 2}, "record has the key 1"),
        ({"a": {None: 2}}, "record['a'] has the key None"),
        ([1, 2], "record=[1, 2]"),
        ("text", "record='text'"),
    ],
)
def test_unknown_objects_are_named_and_nothing_is_written(tmp_path, record, where):
    path = tmp_path / "log.jsonl"
    with JSONLWriter(path) as log:
        log.write({"step": 1})
        with pytest.raises(TypeError, match=re.escape(where)):
            log.write(record)
        log.write({"step": 2})
    assert read_jsonl(path) == [{"step": 1}, {"step": 2}]


def test_each_record_is_in_the_file_at_once_by_one_write(tmp_path, monkeypatch):
    path = tmp_path / "log.jsonl"
    log = JSONLWriter(path)
    calls = []

    class Spy:
        def __init__(self, file):
            self.file = file

        def write(self, data):
            calls.append(bytes(data))
            return self.file.write(data)

        def __getattr__(self, name):
            return getattr(self.file, name)

    monkeypatch.setattr(log, "_file", Spy(log._file))
    for step in range(3):
        log.write({"step": step})
        assert path.read_bytes() == b"".join(calls)
    assert calls == [b'{"step": 0}\n', b'{"step": 1}\n', b'{"step": 2}\n']
    log.close()


def test_existing_log_is_continued(tmp_path):
    path = tmp_path / "log.jsonl"
    for step in range(3):
        with JSONLWriter(str(path)) as log:
            log.write({"step": step})
    assert read_jsonl(path) == [{"step": 0}, {"step": 1}, {"step": 2}]


@pytest.mark.parametrize("torn_bytes", [1, 9, 70_000, 200_000])
def test_half_written_line_is_removed_when_continued(tmp_path, caplog, torn_bytes):
    path = tmp_path / "log.jsonl"
    torn = (b'{"step": 2, "x": "' + b"y" * 200_000)[:torn_bytes]
    path.write_bytes(b'{"step": 1}\n' + torn)
    with caplog.at_level(logging.WARNING), JSONLWriter(path) as log:
        log.write({"step": 3})
    assert path.read_bytes() == b'{"step": 1}\n{"step": 3}\n'
    assert f"({torn_bytes} bytes)" in caplog.text


def test_half_written_first_line_is_removed(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"st')
    with JSONLWriter(path) as log:
        log.write({"step": 1})
    assert path.read_bytes() == b'{"step": 1}\n'


def test_zeros_of_a_power_cut_are_removed(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"step": 1}\n' + b"\0" * 100)
    with JSONLWriter(path) as log:
        log.write({"step": 2})
    assert read_jsonl(path) == [{"step": 1}, {"step": 2}]


@pytest.mark.parametrize("tail", [b'{"step": 2}', b"notes of mine"])
def test_whole_last_line_without_its_end_is_kept(tmp_path, caplog, tail):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"step": 1}\n' + tail)
    with JSONLWriter(path) as log:
        assert path.read_bytes() == b'{"step": 1}\n' + tail
        log.write({"step": 3})
        log.write({"step": 4})
    assert path.read_bytes() == b'{"step": 1}\n' + tail + b'\n{"step": 3}\n{"step": 4}\n'
    assert caplog.records == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_full_device_raises_with_its_name():
    with JSONLWriter("/dev/full") as log:
        for _ in range(2):
            with pytest.raises(OSError, match="/dev/full") as raised:
                log.write({"step": 1})
            assert raised.value.errno == errno.ENOSPC
            assert raised.value.filename == "/dev/full"


def test_a_named_pipe_takes_records(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as reader:
        with JSONLWriter(path) as log:
            log.write({"step": 1})
        assert reader.read() == b'{"step": 1}\n'


@contextlib.contextmanager
def file_size_limit(size):
    """Let the system refuse what goes past `size`, after it took what fits: a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_line_that_does_not_fit_is_cut_off_again(tmp_path):
    path = tmp_path / "log.jsonl"
    with JSONLWriter(path) as log:
        log.write({"step": 1})
        with file_size_limit(30):
            error = None
            try:
                log.write({"step": 2, "text": "x" * 100})
            except OSError as caught:
                error = caught
        assert error is not None
        assert (error.errno, error.filename) == (errno.EFBIG, str(path))
        assert path.read_bytes() == b'{"step": 1}\n'
        log.write({"step": 3})
    assert read_jsonl(path) == [{"step": 1}, {"step": 3}]


def test_torn_line_that_cannot_be_cut_off_is_ended(tmp_path, monkeypatch):
    path = tmp_path / "log.jsonl"
    log = JSONLWriter(path)

    class Stuck:
        """Takes five bytes, then fails, and cannot truncate."""

        def __init__(self, file):
            self.file = file
            self.is_full = False

        def write(self, data):
            if self.is_full:
                raise OSError(errno.EIO, "Input/output error")
            self.is_full = True
            return self.file.write(data[:5])

        def truncate(self, size):
            raise OSError(errno.EIO, "Input/output error")

        def __getattr__(self, name):
            return getattr(self.file, name)

    with monkeypatch.context() as patch:
        patch.setattr(log, "_file", Stuck(log._file))
        with pytest.raises(OSError, match=re.escape(str(path))):
            log.write({"step": 1})
    log.write({"step": 2})
    log.close()
    assert path.read_bytes() == b'{"ste\n{"step": 2}\n'


def test_writing_after_close_raises(tmp_path):
    log = JSONLWriter(tmp_path / "log.jsonl")
    log.close()
    log.close()
    with pytest.raises(ValueError, match=r"closed log '.*log\.jsonl'"):
        log.write({"step": 1})
    assert "closed" in repr(log)


def test_file_is_opened_at_once(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        JSONLWriter(tmp_path / "file" / "log.jsonl")
    JSONLWriter(tmp_path / "log.jsonl").close()
    assert read_jsonl(tmp_path / "log.jsonl") == []


# --- read_jsonl -----------------------------------------------------------------------------------


@pytest.mark.parametrize("tail", [b'{"step": 2', b'{"x": "\xc3', b"\0\0\0"])
def test_reader_skips_a_torn_last_line_with_a_warning(tmp_path, tail):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"step": 1}\n' + tail)
    with pytest.warns(UserWarning, match=r"log\.jsonl, line 2: skipped") as caught:
        assert read_jsonl(path) == [{"step": 1}]
    assert caught[0].filename == __file__


def test_reader_keeps_a_whole_last_line_without_its_end(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}')
    assert read_jsonl(path) == [{"step": 1}, {"step": 2}]


@pytest.mark.parametrize("broken", [b'{"step": 2', b"[1]", b"3", b"null", b"\xff"])
@pytest.mark.parametrize("rest", [b"\n", b'\n{"step": 3}\n', b'\n{"st'])
def test_reader_raises_for_a_broken_line_that_was_ended(tmp_path, broken, rest):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"step": 1}\n\n' + broken + rest)
    with pytest.raises(ValueError, match=r"log\.jsonl, line 3: expected a JSON object"):
        read_jsonl(path)


def test_reader_takes_blank_lines_and_foreign_line_ends(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes('{"a": "é"}\r\n\r\n  \n{"b": 2}\r\n'.encode())
    assert read_jsonl(path) == [{"a": "é"}, {"b": 2}]


def test_reader_of_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_jsonl(tmp_path / "none.jsonl")
