"""F1 and F2: a run that is killed anywhere goes on from the last good checkpoint.

The kills are real: processes of their own end by SIGKILL, at each system call of a save and at
random times. What survives a power cut cannot be seen that way; for this the order of the calls is
looked at.
"""

from __future__ import annotations

import json
import os
import random
import threading
from pathlib import Path

import pytest
import torch

from faults import faulty, states
from torchfast import CheckpointManager

RANDOM_KILLS = 12
DEADLINE_S = 30


@pytest.mark.parametrize(("mode", "step"), [("blocking", 4), ("asynchronous", 4), ("blocking", 3)])
def test_a_save_killed_at_each_of_its_calls_leaves_the_old_or_the_new(mode, step, tmp_path):
    found = json.loads(faulty.run("killed_at_each_call.py", tmp_path, mode, step).stdout)
    assert len(found) > 50  # that the calls are seen at all
    # The commit is one call: before it the old one, after it the new one.
    assert found == sorted(found)
    assert (found[0], found[-1]) == (3, 4)


def test_a_run_killed_at_random_times_goes_on(tmp_path):
    seed = random.randrange(10**6)
    finished = faulty.run("killed_at_random.py", tmp_path / "run", seed, RANDOM_KILLS)
    assert len(finished.stdout.splitlines()) == RANDOM_KILLS


def test_leftovers_of_a_live_writer_stay(tmp_path, monkeypatch):
    writing, go_on = threading.Event(), threading.Event()
    original = os.write

    def write(descriptor, data):
        writing.set()
        assert go_on.wait(DEADLINE_S)
        return original(descriptor, data)

    with CheckpointManager(tmp_path) as checkpoints:
        monkeypatch.setattr(os, "write", write)
        checkpoints.save(states.make(1), 1)
        assert writing.wait(DEADLINE_S)
        before = temporary(tmp_path)
        CheckpointManager(tmp_path).close()
        assert temporary(tmp_path) == before != []
        go_on.set()
        checkpoints.wait()
        assert checkpoints.steps() == [1]
        assert temporary(tmp_path) == []


def test_leftovers_of_a_dead_writer_go_and_nothing_else(tmp_path):
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(states.make(1), 1)
    uuid = "0123456789abcdef" * 2
    dead = [f"step-2.tmp-{uuid}", f"step-3.tmp-{uuid}", f"step-1.old-{uuid}"]
    for name in [*dead, "step-3.tmp-mine", f"step-4.bad-{uuid}", "step-5-copy", "notes"]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    (tmp_path / f"step-2.tmp-{uuid}.lock").touch()
    (tmp_path / f"step-1.tmp-{uuid}.latest").touch()
    before = set(os.listdir(tmp_path))
    CheckpointManager(tmp_path).close()
    gone = before - set(os.listdir(tmp_path))
    assert gone == {*dead, f"step-2.tmp-{uuid}.lock", f"step-1.tmp-{uuid}.latest"}


def test_the_one_that_was_being_replaced_comes_back(tmp_path):
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(states.make(1), 1)
    os.rename(tmp_path / "step-1", tmp_path / f"step-1.old-{'0' * 32}")
    with CheckpointManager(tmp_path) as checkpoints:
        assert states.are_equal(checkpoints.load().state, states.make(1))


def test_everything_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    calls = recorded(monkeypatch)
    with CheckpointManager(tmp_path, keep_last=1) as checkpoints:
        checkpoints.save(states.make(1), 1, blocking=True)
        calls.clear()
        checkpoints.save(states.make(2), 2, blocking=True)
    rename = calls.index(("rename", "step-2"))
    files = set(os.listdir(tmp_path / "step-2"))
    # Each file, the manifest after all others, then the folder that names them.
    synced = [name for call, name in calls[:rename] if call == "fsync"]
    assert set(synced[:-1]) == files
    assert synced[-2] == "manifest.json"
    assert synced[-1].startswith("step-2.tmp-")
    last_write = max(i for i, (call, _) in enumerate(calls[:rename]) if call == "write")
    assert last_write < calls.index(("fsync", "manifest.json"))
    # Then the name, then `latest`, and only then is anything deleted.
    after = [f"{call} {name}" for call, name in calls[rename + 1 :] if call != "write"]
    kept = [text for text in after if not text.endswith(".lock")]
    assert kept[0] == f"fsync {tmp_path.name}"
    assert kept[1].startswith("fsync step-2.tmp-")
    assert kept[2:4] == ["rename latest", f"fsync {tmp_path.name}"]
    assert kept[4].startswith("rename step-1.tmp-")
    assert all(text.split()[0] in ("unlink", "rmdir", "fsync") for text in kept[5:])


def test_nothing_is_deleted_before_the_new_one_verifies(tmp_path, monkeypatch):
    """A disk that loses what it was given, silently."""
    original = os.write

    def write(descriptor, data):
        if "rank-00000-0000.bin" in os.readlink(f"/proc/self/fd/{descriptor}"):
            return original(descriptor, bytes(len(data)))
        return original(descriptor, data)

    with CheckpointManager(tmp_path, keep_last=1) as checkpoints:
        checkpoints.save(states.make(1), 1, blocking=True)
        monkeypatch.setattr(os, "write", write)
        with pytest.raises(
            Exception, match=r"step 2 was written, but does not read back.*0000.bin"
        ):
            checkpoints.save(states.make(2), 2, blocking=True)
        assert checkpoints.steps() == [1]
        assert checkpoints.load().step == 1


def test_what_changes_while_it_is_written_is_not_written(tmp_path, monkeypatch):
    changed = threading.Event()
    original = os.write

    def write(descriptor, data):
        assert changed.wait(DEADLINE_S)
        return original(descriptor, data)

    state = states.make(1)
    state["list"], state["array"] = [1, [2]], torch.arange(3).numpy().copy()
    with CheckpointManager(tmp_path) as checkpoints:
        monkeypatch.setattr(os, "write", write)
        checkpoints.save(state, 1)
        states.spoil(state)
        state["list"][1].append(3)
        state["array"][:] = -1
        changed.set()
        found = checkpoints.load().state
    assert found["list"] == [1, [2]]
    assert found.pop("array").tolist() == [0, 1, 2]
    del found["list"]
    assert states.are_equal(found, states.make(1))


def temporary(folder):
    return sorted(name for name in os.listdir(folder) if ".tmp-" in name)


def recorded(monkeypatch):
    """Note the calls that change a disk, each with the name of what it is about."""
    calls = []

    def note(name, about):
        original = getattr(os, name)

        def call(*args, **kwargs):
            calls.append((name, about(*args)))
            return original(*args, **kwargs)

        monkeypatch.setattr(os, name, call)

    def opened(descriptor, *rest):
        return Path(os.readlink(f"/proc/self/fd/{descriptor}")).name

    for name in ("write", "fsync"):
        note(name, opened)
    for name in ("rename", "replace"):
        note(name, lambda source, target: Path(target).name)
    for name in ("unlink", "rmdir"):
        note(name, lambda path: Path(path).name)
    return calls
