"""F17: the same batches and the same state, wherever a process is."""

from __future__ import annotations

import json
import os
import tempfile

import pytest

from faults import faulty, loading

NOT_UTF8 = b"data-\xff\xfe-\xc3"
NOBODY = ("HOME", "USER", "LOGNAME", "LNAME", "USERNAME")
WAYS = ["here", "fork"]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """What comes here and now, without workers and with one that was forked."""
    folder = tmp_path_factory.mktemp("data") / "samples"
    loading.write(folder)
    return [loading.digest(folder, way) for way in WAYS]


def written(folder):
    path = os.path.join(folder, os.fsdecode(NOT_UTF8))
    loading.write(path)
    return path


def test_an_interpreter_of_ascii_without_asserts_and_workers_of_each_kind(expected, tmp_path):
    """C locale, no home, ``-O``, a path that is no text; then without a working directory."""
    finished = faulty.run(
        "loading.py",
        written(tmp_path),
        *WAYS,
        "spawn",
        "forkserver",
        "lost",
        *WAYS,
        options=["-O"],
        environment={
            "LC_ALL": "C",
            "PYTHONUTF8": "0",
            "PYTHONCOERCECLOCALE": "0",
            "TZ": "Nowhere/Land",
        },
        drop=NOBODY,
        cwd=tmp_path,
    )
    # How a worker starts changes nothing of what it loads.
    assert json.loads(finished.stdout) == [*expected, expected[1], expected[1], *expected]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may take another user's id")
def test_a_user_that_the_system_does_not_know(expected):
    # Not under tmp_path, whose parents are closed to other users.
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        # First as who it is: another user may be unable to read what is imported.
        ways = [*WAYS, "unknown", *WAYS]
        finished = faulty.run("loading.py", written(folder), *ways, drop=NOBODY)
    assert json.loads(finished.stdout) == [*expected, *expected]


def test_what_comes_depends_on_the_samples(expected, tmp_path):
    """The negative control: one byte of one sample is another."""
    folder = tmp_path / "samples"
    loading.write(folder)
    (folder / "4.bin").write_bytes(b"\0" * loading.SAMPLE_BYTES)
    assert loading.digest(folder, "here") != expected[0]
