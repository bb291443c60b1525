"""F4, F15 and F20: damaged checkpoints are found, pickles are never run, copies are never deleted.

The pickle really tries to run: it would create a file.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil

import pytest
import torch

from faults import states
from torchfast import (
    CheckpointCorruptError,
    CheckpointManager,
    StateMismatchError,
    UnsafeCheckpointError,
    import_state_dict,
)
from torchfast.checkpoint import storage

SHARD = "rank-00000-0001.bin"
FILES = (SHARD, "rank-00000.json", "metadata.json", "manifest.json")


@pytest.fixture(autouse=True)
def _several_files(monkeypatch):
    monkeypatch.setattr(storage, "SHARD_BYTES", 4096)


@pytest.fixture
def run(tmp_path):
    """A folder with the steps 1 and 2."""
    with CheckpointManager(tmp_path / "run") as checkpoints:
        for step in (1, 2):
            checkpoints.save(states.make(step), step)
    return tmp_path / "run"


def assert_found(folder, file, caplog, error=CheckpointCorruptError):
    """Step 2 is bad: by number it raises and names the file, by itself it falls back, once."""
    with CheckpointManager(folder) as checkpoints:
        for look in (checkpoints.verify, checkpoints.load):
            with pytest.raises(error) as caught:
                look(2)
            assert str(folder / "step-2" / file) in str(caught.value)
        assert checkpoints.steps() == [1, 2]  # asking by number moves nothing
        before = contents(folder / "step-2")
        caplog.clear()
        found = checkpoints.load()
        assert found.step == 1
        assert states.are_equal(found.state, states.make(1))
        [record] = [r for r in caplog.records if r.levelname == "WARNING"]
        assert "going on from step 1" in record.getMessage()
        assert file in record.getMessage()
        [aside] = folder.glob("step-2.bad-*")
        assert contents(aside) == before
        assert checkpoints.load().step == 1
        # The run reaches step 2 again.
        checkpoints.save(states.make(2), 2)
        assert checkpoints.load().step == 2


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("share", [0, 0.01, 0.5, 0.999])
@pytest.mark.parametrize("file", FILES)
def test_a_cut_file_is_found(file, share, run, caplog):
    path = run / "step-2" / file
    os.truncate(path, int(path.stat().st_size * share))
    assert_found(run, file, caplog)


@pytest.mark.parametrize("place", ["first", "middle", "last"])
@pytest.mark.parametrize("file", FILES)
def test_a_flipped_byte_is_found(file, place, run, caplog):
    flip(run / "step-2" / file, place)
    assert_found(run, file, caplog)


@pytest.mark.parametrize("file", FILES)
def test_a_deleted_file_is_found(file, run, caplog):
    (run / "step-2" / file).unlink()
    assert_found(run, file, caplog)


@pytest.mark.parametrize("file", FILES)
def test_no_flipped_byte_of_a_file_passes(file, tmp_path):
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save({"a": torch.arange(3.0), "b": torch.ones(2000)}, 1, blocking=True)
        path = tmp_path / "step-1" / file
        if not path.exists():
            path = tmp_path / "step-1" / "rank-00000-0000.bin"
        good = path.read_bytes()
        for place in range(0, len(good), max(1, len(good) // 150)):
            path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
            with pytest.raises(CheckpointCorruptError):
                checkpoints.verify(1)
        path.write_bytes(good)
        checkpoints.verify(1)


def test_a_file_that_became_a_folder_or_a_pipe_is_found(run):
    with CheckpointManager(run) as checkpoints:
        path = run / "step-2" / SHARD
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(CheckpointCorruptError, match=SHARD):
            checkpoints.load(2)
        path.unlink()
        path.mkdir()
        with pytest.raises(CheckpointCorruptError, match=SHARD):
            checkpoints.load(2)


def test_if_all_are_damaged_it_raises_rather_than_begin_anew(run):
    for step in (1, 2):
        flip(run / f"step-{step}" / SHARD, "middle")
    with CheckpointManager(run) as checkpoints:
        for _ in range(2):  # the next start must not begin anew either
            with pytest.raises(CheckpointCorruptError, match=r"every checkpoint in .* is damaged"):
                checkpoints.load()
        assert checkpoints.steps() == [1, 2]
    assert list(run.glob("step-*.bad-*")) == []


def test_what_cannot_be_renamed_is_passed_over(run, caplog, monkeypatch):
    flip(run / "step-2" / SHARD, "middle")
    with CheckpointManager(run) as checkpoints:
        monkeypatch.setattr(os, "rename", refuse)
        assert checkpoints.load().step == 1
    assert "could not be renamed" in caplog.text


def test_a_folder_that_nobody_may_read_is_no_damage(run, monkeypatch):
    with CheckpointManager(run) as checkpoints:
        monkeypatch.setattr(os, "open", refuse)
        with pytest.raises(PermissionError):
            checkpoints.load()
        assert checkpoints.steps() == [1, 2]


def test_a_newer_schema_raises_and_stays(run):
    forge(run / "step-2", lambda manifest: manifest | {"schema": 2})
    with CheckpointManager(run) as checkpoints:
        for step in (2, "latest"):
            with pytest.raises(
                StateMismatchError, match=r"has schema 2, .* reads up to 1; upgrade"
            ):
                checkpoints.load(step)
        assert checkpoints.steps() == [1, 2]


# -- F15 -------------------------------------------------------------------------------------------


class Payload:
    """Creates a file if it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), "w")


@pytest.fixture
def marker(tmp_path):
    """What the payload creates; that it would is checked first."""
    path = tmp_path / "it-ran"
    pickle.loads(pickle.dumps(Payload(path))).close()
    assert path.exists()
    path.unlink()
    yield path
    assert not path.exists()


def planted(kind, marker, path):
    if kind == "torch.save":
        torch.save({"weight": Payload(marker)}, path)
    else:
        path.write_bytes(pickle.dumps({"weight": Payload(marker)}, protocol=int(kind)))


@pytest.mark.parametrize("kind", ["torch.save", "2", "4"])
@pytest.mark.parametrize("file", FILES)
def test_a_pickle_in_the_place_of_a_file_does_not_run(file, kind, run, marker, caplog):
    planted(kind, marker, run / "step-2" / file)
    assert_found(run, file, caplog, UnsafeCheckpointError)


@pytest.mark.parametrize("kind", ["torch.save", "2", "4"])
@pytest.mark.parametrize("file", FILES[1:3])
def test_a_pickle_with_fitting_hashes_does_not_run(file, kind, run, marker, caplog):
    planted(kind, marker, run / "step-2" / file)
    forge(run / "step-2")
    with CheckpointManager(run) as checkpoints, pytest.raises(UnsafeCheckpointError, match=file):
        checkpoints.load(2)


def test_a_pickle_in_a_shard_with_fitting_hashes_is_bytes_of_a_tensor(run, marker):
    path = run / "step-2" / SHARD
    payload = pickle.dumps(Payload(marker))
    path.write_bytes(payload + bytes(path.stat().st_size - len(payload)))
    forge(run / "step-2")
    with CheckpointManager(run) as checkpoints:
        assert checkpoints.load(2).state["model"].keys() == states.make(2)["model"].keys()


def test_a_pickle_in_bytes_of_the_state_comes_back_as_bytes(tmp_path, marker):
    state = {"rng": pickle.dumps(Payload(marker)), "text": pickle.dumps(Payload(marker)).hex()}
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(state, 1)
        assert checkpoints.load().state == state


@pytest.mark.parametrize(
    "node",
    [
        {"$": "reduce", "value": ["os.system", "touch it"]},
        {"$": "object", "value": "aa"},
        {"$": "array", "key": "model/0.weight", "dtype": "O", "shape": [300]},
        {"$": "number", "value": ["O", "00" * 8]},
        {"$": "dtype", "value": "load"},
        {"$": "view", "key": "model/0.weight", "dtype": "float32", "start": 0, "shape": [10**9],
         "strides": [1]},
        {"$": "view", "key": "model/0.weight", "dtype": "float32", "start": -4, "shape": [1],
         "strides": [1]},
        {"$": "tensor", "key": "no such key"},
        {"$": "tensor"},
        {"$": ["tensor"]},
        {"$": None},
    ],
    ids=lambda node: str(node)[6:40],
)  # fmt: skip
def test_a_forged_tree_builds_nothing_else(node, run):
    path = run / "step-2" / "rank-00000.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"extra": node}))
    forge(run / "step-2")
    with CheckpointManager(run) as checkpoints, pytest.raises(CheckpointCorruptError):
        checkpoints.load(2)


@pytest.mark.parametrize("name", ["../step-1/rank-00000-0000.bin", "/etc/passwd", "..", ".hidden"])
def test_a_forged_manifest_names_no_file_elsewhere(name, run):
    def change(manifest):
        entry = manifest["files"].pop(SHARD)
        return manifest | {"files": {**manifest["files"], name: entry}}

    forge(run / "step-2", change)
    refused = pytest.raises(CheckpointCorruptError, match="is not accepted")
    with CheckpointManager(run) as checkpoints, refused:
        checkpoints.load(2)


def test_forged_metadata_reads_nothing_elsewhere(run):
    path = run / "step-2" / "metadata.json"
    good = json.loads(path.read_text())
    chunk = good["tensors"]["model/0.weight"]["chunks"][0]
    for name, value in {
        "start": 10**6,
        "num_bytes": 4,
        "sizes": [10**12],
        "offsets": [-1],
        "file": "x.bin",
    }.items():
        right, chunk[name] = chunk[name], value
        path.write_text(json.dumps(good))
        forge(run / "step-2")
        with CheckpointManager(run) as checkpoints, pytest.raises(CheckpointCorruptError):
            checkpoints.load(2)
        chunk[name] = right


@pytest.mark.parametrize("kind", ["torch.save", "2", "4"])
def test_a_pickle_in_a_file_of_weights_does_not_run(kind, tmp_path, marker):
    path = tmp_path / "weights.pt"
    planted(kind, marker, path)
    with pytest.raises(UnsafeCheckpointError, match=r"weights.pt holds more than tensors"):
        import_state_dict(path)


@pytest.mark.parametrize("size", [0, 10, 500, 1000])
def test_a_cut_file_of_weights_is_found(size, tmp_path):
    path = tmp_path / "weights.pt"
    torch.save({"weight": torch.ones(100)}, path)
    os.truncate(path, size)
    with pytest.raises(CheckpointCorruptError, match=r"is no whole file of torch.save"):
        import_state_dict(path)


def test_the_hashes_are_sha256(run):
    manifest = json.loads((run / "step-2" / "manifest.json").read_text())
    assert set(manifest["files"]) == set(os.listdir(run / "step-2")) - {"manifest.json"}
    for name, entry in manifest["files"].items():
        data = (run / "step-2" / name).read_bytes()
        assert entry == {"num_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


# -- F20 -------------------------------------------------------------------------------------------


def test_a_copy_elsewhere_loads(run, tmp_path):
    shutil.copytree(run / "step-1", tmp_path / "elsewhere" / "step-1")
    shutil.copytree(run, tmp_path / "all")
    for folder, step in (("elsewhere", 1), ("all", 2)):
        with CheckpointManager(tmp_path / folder) as checkpoints:
            assert states.are_equal(checkpoints.load().state, states.make(step))


def test_a_copy_is_never_deleted(run, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(run / "step-1", other / "step-1")
    shutil.copytree(run / "step-2", other / "step-2-best")
    with CheckpointManager(other, keep_last=1) as checkpoints:
        for step in range(3, 7):
            checkpoints.save(states.make(step), step)
    assert sorted(p.name for p in other.glob("step-*")) == ["step-1", "step-2-best", "step-6"]


def test_a_copy_within_the_folder_is_never_deleted(run):
    shutil.copytree(run / "step-1", run / "step-1-good")
    with CheckpointManager(run, keep_last=1) as checkpoints:
        checkpoints.save(states.make(3), 3)
    assert sorted(p.name for p in run.glob("step-*")) == ["step-1-good", "step-3"]


# -- Helpers ---------------------------------------------------------------------------------------


def flip(path, place):
    data = bytearray(path.read_bytes())
    data[{"first": 0, "middle": len(data) // 2, "last": -1}[place]] ^= 0x10
    path.write_bytes(data)


def forge(folder, change=lambda manifest: manifest):
    """Write hashes that fit what is there, as somebody who means harm would."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    for name, entry in manifest["files"].items():
        data = (folder / name).read_bytes()
        entry |= {"num_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest.pop("seal")
    body = json.dumps(change(manifest), indent=1).removesuffix("\n}").encode()
    seal = f',\n "seal": "{hashlib.sha256(body).hexdigest()}"\n}}\n'
    path.write_bytes(body + seal.encode())


def refuse(*args, **kwargs):
    raise PermissionError(13, "Permission denied")
