"""A folder of the store where little works: full, read-only, not there, of a strange name."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
from contextlib import contextmanager

import pytest
from torch import nn, optim

from compile_stores import IS_ROOT, Compiler, folder_with_one, key, needs_root, process, stored
from faults import faulty
from models import mean_loss
from torchfast import CompiledModule, CompileOptions, Plan, Trainer
from torchfast.compiler import store as store_module
from torchfast.compiler.store_contents import list_entries
from torchfast.compiler.store_files import StoreFolder


@pytest.fixture
def folder(tmp_path):
    return folder_with_one(tmp_path / "store")


def test_a_limit_on_the_size_of_files(folder, caplog):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    store, _ = process(folder, "b", num_bytes=100_000)
    before = sorted(os.listdir(folder))
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        outcome = store.save(key())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert outcome.status == "failed"
    assert "File too large" in outcome.detail
    assert len(caplog.records) == 1
    assert sorted(os.listdir(folder)) == before
    assert stored(folder) == {"a"}
    assert store.save(key()).status == "saved"


@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
def test_a_disk_that_fails(folder, monkeypatch, call):
    def fails(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    before = sorted(os.listdir(folder))
    store, _ = process(folder, "b")
    monkeypatch.setattr(os, call, fails)
    assert "No space left" in store.save(key()).detail
    monkeypatch.undo()
    assert sorted(os.listdir(folder)) == before
    assert stored(folder) == {"a"}


def test_a_disk_that_takes_little_at_a_time(folder, monkeypatch):
    original = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: original(fd, data[:7]))
    assert process(folder, "b")[0].save(key()).status == "saved"
    assert stored(folder) == {"a", "b"}


@pytest.fixture
def read_only(folder):
    """The folder on a file system that cannot be written to, where one may be mounted."""
    bind = ["mount", "--bind", os.fspath(folder), os.fspath(folder)]
    made = IS_ROOT and subprocess.run(bind, capture_output=True, check=False).returncode == 0
    if not made:
        pytest.skip("mounting a file system is not permitted here; failing calls are tested")
    remount = ["mount", "-o", "remount,bind,ro", os.fspath(folder)]
    subprocess.run(remount, check=True, capture_output=True)
    yield folder
    subprocess.run(["umount", os.fspath(folder)], check=True)


def test_a_read_only_folder_is_read(read_only, caplog):
    assert stored(read_only) == {"a"}
    assert caplog.records == []
    store, _ = process(read_only, "b")
    assert "Read-only" in store.save(key()).detail
    assert list_entries(read_only)[0].uses == 0


def test_a_folder_that_cannot_be_written_is_read(folder, monkeypatch):
    original = os.open

    def opened(path, flags, *rest, **named):
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, "Read-only file system")
        return original(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", opened)
    assert stored(folder) == {"a"}
    store, _ = process(folder, "b")
    assert "Read-only" in store.save(key()).detail


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    store, _ = process(tmp_path / "file" / "store", "a")
    assert store.load(key()).status in ("miss", "ignored")
    assert store.save(key()).status == "failed"


STRANGE = """
import logging, os, stat, sys, tempfile
from compile_stores import key, process, stored

logging.basicConfig(stream=sys.stderr)
umask, user = int(sys.argv[1], 8), int(sys.argv[2])
top = tempfile.mkdtemp()
os.chmod(top, 0o755)
if user != os.geteuid():
    os.chown(top, user, user)
    os.setuid(user)
os.umask(umask)
folder = os.fsdecode(os.path.join(os.fsencode(top), b"h\\xf6he", b"\\xff store"))
assert process(folder, "a")[0].save(key()).status == "saved"
assert stored(folder) == {"a"}
for name in os.listdir(folder):
    assert stat.S_IMODE(os.stat(os.path.join(folder, name)).st_mode) == 0o600, name
assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
# A warning that names the path can be logged.
os.chmod(folder, 0o777)
store, _ = process(folder)
assert store.load(key()).status == "ignored"
os.chmod(folder, 0o700)
os.umask(0o022)
import shutil
shutil.rmtree(top, ignore_errors=True)
print("done")
"""


@pytest.mark.parametrize(
    ("umask", "user"), [("777", os.geteuid()), pytest.param("000", 54321, marks=needs_root)]
)
def test_strange_surroundings(umask, user, tmp_path):
    """No home, a user that has no name, ASCII only, any umask, and a path that is no text."""
    found = faulty.run(
        STRANGE,
        umask,
        user,
        environment={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        drop=("HOME", "USER", "LOGNAME", "LNAME", "USERNAME"),
        cwd=tmp_path,
        fresh=True,  # an encoding is chosen as an interpreter starts
    )
    assert found.stdout == "done\n"
    assert "can be written by others" in found.stderr
    assert "Traceback" not in found.stderr
    assert "Logging error" not in found.stderr


def test_a_path_that_is_no_text_can_be_told(tmp_path, caplog):
    folder = tmp_path / os.fsdecode(b"\xff")
    folder.mkdir(mode=0o700)
    folder.chmod(0o777)
    outcome = process(folder)[0].load(key())
    assert outcome.status == "ignored"
    for text in (str(outcome), caplog.records[0].getMessage()):
        assert "udcff" in text.encode("utf-8").decode()


def test_the_working_directory_may_go(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store, _ = process("store", "a")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert store.save(key()).status == "saved"
    assert stored(tmp_path / "store") == {"a"}


def module_of(options):
    return CompiledModule(nn.Linear(2, 3), **options)


def trainer_of(options):
    model = nn.Linear(2, 3)
    plan = Plan(compile=CompileOptions(**options), cuda_graph=False)
    return Trainer(model, optim.SGD(model.parameters(), lr=0.1), mean_loss, plan)


@pytest.mark.parametrize("make", [module_of, trainer_of])
@pytest.mark.parametrize(
    ("changes", "is_found"),
    [({}, True), ({"timeout_s": 60.0, "on_failure": "raise"}, True), ({"dynamic": True}, False)],
)
def test_an_entry_is_found_where_the_folder_has_gone(
    tmp_path, monkeypatch, make, changes, is_found
):
    """Nodes see a folder that they share under different paths, and a folder can be copied."""
    compiler = Compiler().compile("a")
    monkeypatch.setattr(store_module, "TorchArtifacts", lambda: compiler)
    make({"cache": tmp_path / "here", "backend": "eager"}).close()
    assert not compiler.payloads
    (tmp_path / "here").replace(tmp_path / "there")
    make({"cache": tmp_path / "there", "backend": "eager", **changes}).close()
    assert bool(compiler.payloads) == is_found


def test_a_folder_that_can_only_be_read_is_of_use(tmp_path, monkeypatch, caplog):
    process(tmp_path, "a")[0].save(key())

    @contextmanager
    def locked(*_):
        raise OSError(errno.EROFS, "Read-only file system")
        yield

    monkeypatch.setattr(StoreFolder, "locked", locked)
    store, compiler = process(tmp_path)
    assert store.load(key()).status == "loaded"
    compiler.compile("a")
    assert store.save(key()).status == "nothing new"
    assert not caplog.records
    compiler.compile("b")
    assert store.save(key()).status == "failed"
    (record,) = caplog.records
    assert "what was compiled is not kept" in record.getMessage()
    assert "of no use" not in record.getMessage()
