"""F3 and F17: full disks, failing disks, and strange surroundings."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import tempfile
import time

import pytest
import torch

from faults import faulty, states
from torchfast import CheckpointManager, CheckpointWriteError
from torchfast.checkpoint import storage

BIG = {"weight": torch.zeros(1_000_000)}  # 4 MB
FULL = (
    r"step-2 could not be written \(.*\): it needs 40\d{5} bytes, and the file system has \d+ free"
)


# -- F3 --------------------------------------------------------------------------------------------


def fails_and_recovers(folder, make_room):
    """Step 2 finds no room, and takes none; the run goes on when there is some."""
    with CheckpointManager(folder) as checkpoints:
        assert checkpoints.load().step == 1
        before = sorted(os.listdir(folder))
        for blocking in (True, False):
            with pytest.raises(CheckpointWriteError, match=FULL):
                save(checkpoints, blocking)
            assert sorted(os.listdir(folder)) == before
        assert states.are_equal(checkpoints.load().state, states.make(1))
        make_room()
        checkpoints.save(BIG, 2)
        assert checkpoints.load().step == 2


def save(checkpoints, blocking):
    checkpoints.save(BIG, 2, blocking=blocking)
    checkpoints.wait()


def start(folder):
    with CheckpointManager(folder) as checkpoints:
        checkpoints.save(states.make(1), 1)


def test_a_limit_on_the_size_of_files(tmp_path):
    start(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, hard))
    try:
        fails_and_recovers(
            tmp_path, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 2 MiB, where this process may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", os.fspath(folder)]
    try:
        made = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        made = False
    if not made:
        pytest.skip("mounting a file system is not permitted here; the limit on files is tested")
    yield folder
    subprocess.run(["umount", os.fspath(folder)], check=True)


def test_a_full_disk(small_disk):
    start(small_disk)
    grow = ["mount", "-o", "remount,size=64m", os.fspath(small_disk)]
    fails_and_recovers(small_disk, lambda: subprocess.run(grow, check=True))


@pytest.mark.parametrize("name", ["write", "fsync", "mkdir", "rename"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_an_error_of_the_system(name, number, tmp_path, monkeypatch):
    start(tmp_path)
    with monkeypatch.context() as broken:

        def fail(*args, **kwargs):
            raise OSError(number, os.strerror(number))

        broken.setattr(os, name, fail)
        with CheckpointManager(tmp_path) as checkpoints:
            checkpoints.save(BIG, 2)
            with pytest.raises(CheckpointWriteError, match=os.strerror(number)) as caught:
                checkpoints.wait()
            assert isinstance(caught.value.__cause__, OSError)
            checkpoints.wait()  # told once
            assert states.are_equal(checkpoints.load().state, states.make(1))
    assert not list(tmp_path.glob("*.tmp-*"))


def test_a_write_that_takes_less_than_it_is_given(tmp_path, monkeypatch):
    original = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: original(fd, memoryview(data)[:1000]))
    start(tmp_path)
    with CheckpointManager(tmp_path) as checkpoints:
        assert states.are_equal(checkpoints.load().state, states.make(1))


def test_a_full_disk_under_an_export(tmp_path):
    with CheckpointManager(tmp_path / "run") as checkpoints:
        checkpoints.save({"model": BIG}, 1)
        checkpoints.export(tmp_path / "old.pt")
        before = (tmp_path / "old.pt").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, hard))
    try:
        with (
            CheckpointManager(tmp_path / "run") as checkpoints,
            pytest.raises(CheckpointWriteError, match=r"old.pt could not be written"),
        ):
            checkpoints.export(tmp_path / "old.pt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "old.pt").read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["old.pt", "run"]


# -- F17 -------------------------------------------------------------------------------------------

NOT_UTF8 = b"run-\xff\xfe-\xc3"


@pytest.mark.parametrize("how", ["lost, C and not UTF-8", "no home, optimised", "spawn, not UTF-8"])
def test_strange_surroundings(how, tmp_path):
    folder = tmp_path / os.fsdecode(NOT_UTF8) if "UTF-8" in how else tmp_path / "run"
    environment = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"} if "C and" in how else {}
    if "no home" in how:
        environment = {"TZ": "Nowhere/Land"}
    options = {
        "environment": environment,
        "drop": ("HOME", "USER", "LOGNAME") if "no home" in how else (),
        "options": ["-O"] if "optimised" in how else [],
        "cwd": tmp_path,
        "fresh": "C and" in how,  # an encoding is chosen as an interpreter starts
    }
    first = faulty.run("training.py", folder, how.partition(",")[0], **options)
    assert json.loads(first.stdout) == ([2, 3, 4] if "spawn" in how else [1, 2])
    # And this process, under its own surroundings, goes on from there.
    with CheckpointManager(folder) as checkpoints:
        step = checkpoints.steps()[-1]
        assert states.are_equal(checkpoints.load().state, states.make(step))


@pytest.mark.parametrize("umask", [0o000, 0o077, 0o277, 0o777])
def test_odd_umask(umask, tmp_path):
    before = os.umask(umask)
    try:
        with CheckpointManager(tmp_path) as checkpoints:
            checkpoints.save(states.make(1), 1)
    finally:
        os.umask(before)
    for path in [tmp_path / "step-1", *(tmp_path / "step-1").iterdir()]:
        wanted = 0o700 if path.is_dir() else 0o600
        assert path.stat().st_mode & wanted == wanted, path


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may take another user's id")
def test_a_user_that_the_system_does_not_know():
    # Not under tmp_path, whose parents are closed to other users.
    with tempfile.TemporaryDirectory() as folder:
        os.chown(folder, 54321, 54321)
        finished = faulty.run("training.py", folder, "unknown", drop=("HOME",))
    assert json.loads(finished.stdout) == [1, 2]


def test_a_relative_path_stays_where_it_was(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    with CheckpointManager("run") as checkpoints:
        monkeypatch.chdir(tmp_path / "b")
        checkpoints.save(states.make(1), 1)
    assert (tmp_path / "a" / "run" / "step-1").is_dir()
    assert not list((tmp_path / "b").iterdir())


def test_a_clock_that_was_set_back(tmp_path, monkeypatch):
    with CheckpointManager(tmp_path, keep_last=2) as checkpoints:
        for step in (1, 2, 3):
            # Each a day before the last: to the manifest, and to the file system.
            day = time.time() - 86400 * step
            monkeypatch.setattr(time, "gmtime", lambda day=day: time.struct_time([1970] + [1] * 8))
            checkpoints.save(states.make(step), step, blocking=True)
            os.utime(tmp_path / f"step-{step}", (day, day))
        assert checkpoints.steps() == [2, 3]
        assert checkpoints.load().step == 3


# -- The end of the interpreter --------------------------------------------------------------------

AT_EXIT = """
import sys
from faults import states
from torchfast import CheckpointManager

checkpoints = CheckpointManager(sys.argv[1])
{before}
checkpoints.save(states.make(1), 1)
{after}
"""
SLOW = """
import os, threading
from torchfast.checkpoint import files
states.several_files()
original, main = os.write, threading.main_thread()
def write(*arguments):
    main.join()  # until the interpreter is ending
    return original(*arguments)
os.write = write
"""
FAILING = """
import os
def write(*arguments):
    raise OSError(28, "No space left on device")
os.write = write
"""


def test_what_is_being_written_at_exit_is_finished(tmp_path):
    faulty.run(AT_EXIT.format(before=SLOW, after=""), tmp_path)
    with CheckpointManager(tmp_path) as checkpoints:
        assert states.are_equal(checkpoints.load().state, states.make(1))


def test_what_fails_and_nobody_waits_for_is_told_at_exit(tmp_path):
    finished = faulty.run(AT_EXIT.format(before=FAILING, after=""), tmp_path)
    assert f"the last checkpoint of {tmp_path} failed, and nothing waited for it" in finished.stderr
    assert "No space left on device" in finished.stderr


def test_importing_it_needs_no_distributed_checkpoint(tmp_path):
    code = "import sys, torchfast\nassert 'torch.distributed.checkpoint' not in sys.modules\n"
    faulty.run(code, cwd=tmp_path, fresh=True)


def test_no_thread_is_left(tmp_path):
    import threading

    before = threading.active_count()
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(BIG, 1)
    assert threading.active_count() == before


def test_where_threads_cannot_be_started_one_does_it_all(tmp_path, monkeypatch):
    import threading

    original = threading.Thread.start

    def start_thread(self):
        if self.name == "torchfast-checkpoint-file":
            raise RuntimeError("can't start new thread at interpreter shutdown")
        original(self)

    monkeypatch.setattr(threading.Thread, "start", start_thread)
    monkeypatch.setattr(storage, "SHARD_BYTES", 1000)
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(states.make(1), 1)
        assert states.are_equal(checkpoints.load().state, states.make(1))
