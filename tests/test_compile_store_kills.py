"""F16: writers that are killed anywhere, or write at the same time, leave whole entries.

The kills are real: processes of their own end by SIGKILL, at each system call of a save and at
random times, while others write and read.
"""

from __future__ import annotations

import fcntl
import json
import os
import time

import pytest

from compile_stores import key, process, stored
from faults import faulty
from torchfast.compiler import store_contents, store_files
from torchfast.compiler.store_contents import clear, list_entries
from torchfast.compiler.store_files import StoreFolder, Unusable

AT_EACH_CALL = """
import json, os, shutil, signal, sys
from compile_stores import key, process, stored

folder = sys.argv[1]
process(folder, "old")[0].save(key())
shutil.copytree(folder, folder + ".before")
CALLS = ("open", "fchmod", "write", "fsync", "close", "rename", "unlink", "listdir")

def killed_at(number):
    seen = 0
    def counted(original):
        def call(*arguments, **named):
            nonlocal seen
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **named)
        return call
    store, _ = process(folder, "new")
    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))
    store.save(key())
    os._exit(0)

found = []
for number in range(1, 1000):
    shutil.rmtree(folder)
    shutil.copytree(folder + ".before", folder)
    child = os.fork()
    if not child:
        killed_at(number)
    status = os.waitpid(child, 0)[1]
    found.append(sorted(stored(folder)))
    # The next one finds no lock held, saves, and leaves nothing of the one before.
    assert process(folder, "next")[0].save(key()).status == "saved"
    assert stored(folder) == {*found[-1], "next"}
    assert not [name for name in os.listdir(folder) if name.startswith(".writing")]
    if not os.WIFSIGNALED(status):
        break
print(json.dumps(found))
"""

AT_ONCE = """
import json, os, random, signal, sys, time
from compile_stores import Compiler, key, stored
from torchfast.compiler.store import CacheStore

folder, seed, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
random.seed(seed)
print("seed", seed, file=sys.stderr)
SIZE = 300_000

def write_for_ever(writer):
    number = 0
    store = CacheStore(folder, lock_wait_s=0.2, artifacts=(compiler := Compiler(SIZE)))
    while True:
        # A new process each time, as far as the store can see.
        compiler.used = {f"{writer}-{number % 3}": (os.urandom(SIZE),)}
        status = store.save(key()).status
        assert status in ("saved", "nothing new", "skipped"), status
        if status == "saved":
            with open(f"{folder}.{writer}", "a") as done:
                done.write(f"{writer}-{number % 3}\\n")
        number += 1
        if number == 3:
            break
    while store.save(key(f"own {writer}")).status == "skipped":
        pass
    os._exit(0)

children = []
for writer in range(8):
    child = os.fork()
    if not child:
        try:
            write_for_ever(writer)
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
    children.append(child)
time.sleep(random.random() * seconds)
killed = children[:4]
for child in killed:
    os.kill(child, signal.SIGKILL)
    time.sleep(random.random() * seconds / 8)
    stored(folder)  # asserts that it is whole or not there
ended = [os.WEXITSTATUS(os.waitpid(child, 0)[1]) for child in children[4:]]
for child in killed:
    os.waitpid(child, 0)
expected = set()
for writer in range(8):
    if os.path.exists(f"{folder}.{writer}"):
        expected |= set(open(f"{folder}.{writer}").read().split())
found = stored(folder)
own = [len(stored(folder, key(f"own {writer}"))) for writer in range(4, 8)]
CacheStore(folder, artifacts=Compiler().compile("last")).save(key("last"))
left = [name for name in os.listdir(folder) if name.startswith(".writing")]
print(json.dumps({
    "ended": ended, "lost": sorted(expected - found), "num": len(found), "own": own, "left": left,
}))
"""


def test_a_save_killed_at_each_of_its_calls_leaves_the_old_or_the_new(tmp_path):
    found = json.loads(faulty.run(AT_EACH_CALL, tmp_path / "store").stdout)
    assert len(found) > 15  # that the calls are seen at all
    # The commit is one call: before it the old one, after it the new one too.
    after = found.index(["new", "old"])
    assert found == [["old"]] * after + [["new", "old"]] * (len(found) - after)
    assert 0 < after < len(found)


def test_eight_writers_at_once_and_half_of_them_killed(tmp_path):
    seed = int.from_bytes(os.urandom(3), "big")
    finished = faulty.run(AT_ONCE, tmp_path / "store", seed, 0.6)
    found = json.loads(finished.stdout.splitlines()[-1])
    assert found["ended"] == [0, 0, 0, 0], finished.stderr
    assert found["lost"] == []
    assert found["num"] >= 3
    assert found["own"] == [1, 1, 1, 1]
    assert found["left"] == []


# -- The lock --------------------------------------------------------------------------------------


@pytest.fixture
def held(tmp_path):
    """A folder with an entry, whose lock another holds."""
    process(tmp_path, "a")[0].save(key())
    with StoreFolder(tmp_path) as folder, folder.locked(1) as lock:
        assert lock == "held"
        yield tmp_path


def test_who_cannot_write_goes_on(held, caplog):
    store, _ = process(held, "b", lock_wait_s=0.05)
    start = time.perf_counter()
    outcome = store.save(key())
    assert str(outcome) == "skipped: another process of this node is writing"
    assert 0.05 <= time.perf_counter() - start < 2
    assert caplog.records == []
    assert stored(held) == {"a"}  # reading needs no lock


def test_nobody_clears_what_is_being_written(held, monkeypatch):
    monkeypatch.setattr(store_contents, "_LOCK_WAIT_S", 0.05)
    for command in (clear, lambda path: store_contents.prune(path, 1)):
        with pytest.raises(Unusable, match="another process of this node is writing"):
            command(held)
    assert len(list_entries(held)) == 1


def test_a_lock_is_let_go_though_a_fork_holds_its_file(tmp_path):
    with StoreFolder(tmp_path) as folder:
        with folder.locked(1):
            child = os.fork()
            if not child:
                time.sleep(20)
                os._exit(0)
        try:
            with folder.locked(0.05) as lock:
                assert lock == "held"
        finally:
            os.kill(child, 9)
            os.waitpid(child, 0)


def test_a_lock_that_was_removed_is_none(tmp_path, monkeypatch):
    """Between opening and locking it may go; who then waits would hold nothing."""
    original, calls = fcntl.flock, []

    def flock(descriptor, operation):
        if operation & fcntl.LOCK_EX and not calls:
            calls.append(operation)
            for path in tmp_path.glob(".lock-*"):
                path.unlink()
        return original(descriptor, operation)

    monkeypatch.setattr(store_files.fcntl, "flock", flock)
    with StoreFolder(tmp_path) as folder, folder.locked(1) as lock:
        assert lock == "held"
        with StoreFolder(tmp_path) as other, other.locked(0.05) as second:
            assert second == "busy"


def test_without_locks_entries_are_as_whole(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(store_files.fcntl, "flock", flock)
    process(tmp_path, "a")[0].save(key())
    leftover = tmp_path / f".writing-{os.uname().nodename}-{'0' * 32}"
    leftover.touch()
    assert process(tmp_path, "b")[0].save(key()).status == "saved"
    assert stored(tmp_path) == {"a", "b"}
    assert leftover.exists()  # it may be of one that lives


# -- Leftovers -------------------------------------------------------------------------------------


def test_leftovers_of_the_dead_go_and_nothing_else(tmp_path):
    process(tmp_path, "a")[0].save(key())
    (lock,) = tmp_path.glob(".lock-*")
    node = lock.name.removeprefix(".lock-")
    number = "0" * 32
    dead = tmp_path / f".writing-{node}-{number}"
    old = tmp_path / f".writing-elsewhere-{number}"
    alive = [
        tmp_path / f".writing-another-{number}",
        tmp_path / f".writing-{node}-2-{number}",
        tmp_path / f".writing-{node}-mine",
        tmp_path / "notes",
    ]
    for path in (dead, old, *alive):
        path.touch()
    os.utime(old, (0, 0))
    process(tmp_path, "b")[0].save(key())
    left = set(tmp_path.iterdir())
    assert not left & {dead, old}
    assert left >= set(alive)


def test_names_say_which_node_writes(tmp_path, monkeypatch):
    name = os.uname()
    strange = type(name)([name[0], "nöde/../1 " + "x" * 100, *name[2:]])
    monkeypatch.setattr(os, "uname", lambda: strange)
    seen = []
    original = os.rename

    def rename(source, target, **named):
        seen.append(source)
        return original(source, target, **named)

    monkeypatch.setattr(os, "rename", rename)
    assert process(tmp_path, "a")[0].save(key()).status == "saved"
    node = "n-de----1-" + "x" * 30
    assert (tmp_path / f".lock-{node}").exists()
    assert {source.startswith(f".writing-{node}-") for source in seen} == {True}


def test_everything_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    calls = []

    def recorded(name):
        original = getattr(os, name)

        def call(*arguments, **named):
            calls.append(name)
            return original(*arguments, **named)

        return call

    store, _ = process(tmp_path, "a")
    for name in ("write", "fsync", "rename"):
        monkeypatch.setattr(os, name, recorded(name))
    store.save(key())
    # The entry and its name; then who used it last, which may be lost.
    assert calls == ["write"] * 4 + ["fsync", "rename", "fsync", "write", "rename"]
