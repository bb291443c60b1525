"""F12 and F17: what is in the folder runs as this user, so what is not surely ours is left alone.

And nothing that is wrong with it ends a training: it is told once, and compiled as without.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import stat

import pytest

from compile_stores import Compiler, folder_with_one, key, needs_root, process, stored
from torchfast.compiler.store import CacheStore
from torchfast.compiler.store_artifacts import TorchArtifacts, join, split
from torchfast.compiler.store_entry import MAGIC, EntryHeader, encode


@pytest.fixture
def folder(tmp_path):
    return folder_with_one(tmp_path / "store")


@pytest.fixture
def entry(folder):
    (path,) = folder.glob("*.cache")
    return path


def is_left_alone(folder, reason, caplog, *, heals=True):
    """Loading is no use, says why once, hands nothing to torch; the training goes on and saves."""
    caplog.clear()
    compiler = Compiler()
    store = CacheStore(folder, artifacts=compiler)
    for _ in range(2):
        outcome = store.load(key())
        assert outcome.status == store.outcome().status == "ignored"
        assert reason in outcome.detail
    assert compiler.payloads == []
    (record,) = caplog.records
    assert reason in record.getMessage()
    assert "goes on and compiles" in record.getMessage()
    compiler.compile("a", "b")
    assert compiler.misses == 2
    if heals:
        assert store.save(key()).status == "saved"
        assert stored(folder) == {"a", "b"}
    else:
        assert store.save(key()).status == "failed"


def changed(path, change):
    data = bytearray(path.read_bytes())
    path.write_bytes(change(data) or data)


def header_of(path):
    return path.read_bytes()[len(MAGIC) :].split(b"\n")[1]


def with_header(path, line, digest=None):
    """Give a file another header, with the right hash unless one is given."""
    payload = path.read_bytes().split(b"\n", 3)[3]
    digest = digest or hashlib.sha256(line + b"\n").hexdigest()
    start = b"%08x %s\n" % (len(line) + 1, digest.encode())
    path.write_bytes(MAGIC + start + line + b"\n" + payload)


# -- Damage ----------------------------------------------------------------------------------------


def test_a_good_one_is_loaded(folder, caplog):
    """The control: the same entry, left as it is."""
    assert stored(folder) == {"a"}
    assert caplog.records == []


DAMAGE = {
    "empty": (lambda data: data.clear(), "does not begin as an entry"),
    "of another program": (lambda data: data.__setitem__(0, 0), "does not begin as an entry"),
    "only the first line": (lambda data: data[: len(MAGIC)], "damaged header"),
    "cut in the header": (lambda data: data[: len(MAGIC) + 100], "cut or damaged"),
    "cut in the payload": (lambda data: data[:-1], "expected"),
    "longer": (lambda data: data + b"\0", "expected"),
    "no length": (lambda data: data.__setitem__(len(MAGIC), 0x78), "damaged header"),
    "flipped in the header": (lambda data: flip(data, len(MAGIC) + 90), "cut or damaged"),
    "flipped in the payload": (lambda data: flip(data, -5), "does not have the SHA-256"),
    "zeros in the payload": (lambda data: data[:-20] + bytes(20), "does not have the SHA-256"),
}


def flip(data, index):
    data[index] ^= 1


@pytest.mark.parametrize("name", DAMAGE)
def test_damage(folder, entry, caplog, name):
    change, reason = DAMAGE[name]
    changed(entry, change)
    is_left_alone(folder, reason, caplog)


def test_every_single_flipped_bit_is_seen(folder, entry):
    data = entry.read_bytes()
    for index in range(len(data)):
        flipped = bytearray(data)
        flipped[index] ^= 1 << (index % 8)
        entry.write_bytes(flipped)
        store, compiler = process(folder)
        assert store.load(key()).status == "ignored", index
        assert compiler.payloads == []


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"no json", "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
        (b"[" * 100_000, "cannot be read"),
        (b"[]", "cannot be read"),
        (b"{}", "cannot be read"),
        (b"x" * (1 << 20), "expected at most"),
    ],
)
def test_strange_headers(folder, entry, caplog, line, reason):
    with_header(entry, line)
    is_left_alone(folder, reason, caplog)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("payload_bytes", -1),
        ("payload_bytes", True),
        ("payload_sha256", 3),
        ("work", []),
        ("machine", {"torch": 2}),
        ("artifacts", {"inductor": "many"}),
    ],
)
def test_headers_with_fields_of_another_kind(folder, entry, caplog, field, value):
    with_header(entry, json.dumps(json.loads(header_of(entry)) | {field: value}).encode())
    is_left_alone(folder, "header", caplog)


def test_one_that_was_renamed(folder, entry, caplog):
    entry.rename(folder / key("other").name)
    caplog.clear()
    store, compiler = process(folder)
    outcome = store.load(key("other"))
    assert outcome.status == "ignored"
    assert "model_class model and not other" in outcome.detail
    assert compiler.payloads == []


def test_one_that_was_renamed_to_another_machine(folder, entry):
    entry.rename(folder / key(torch="9").name)
    store, compiler = process(folder)
    outcome = store.load(key(torch="9"))
    assert (outcome.status, compiler.payloads) == ("incompatible", [])


# -- Whose it is -----------------------------------------------------------------------------------


@needs_root
def test_a_file_of_somebody_else(folder, entry, caplog):
    os.chown(entry, 12345, -1)
    is_left_alone(folder, "belongs to user id 12345", caplog)


@needs_root
def test_a_folder_of_somebody_else(folder, caplog):
    os.chown(folder, 12345, -1)
    is_left_alone(folder, "belongs to user id 12345", caplog, heals=False)


def test_all_of_somebody_else(folder, caplog, monkeypatch):
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    is_left_alone(folder, f"belongs to user id {mine}", caplog, heals=False)


@pytest.mark.parametrize("bit", [stat.S_IWGRP, stat.S_IWOTH])
def test_a_file_that_others_can_write(folder, entry, caplog, bit):
    entry.chmod(0o600 | bit)
    is_left_alone(folder, "can be written by others", caplog)


@pytest.mark.parametrize("bit", [stat.S_IWGRP, stat.S_IWOTH])
def test_a_folder_that_others_can_write(folder, caplog, bit):
    folder.chmod(0o700 | bit)
    is_left_alone(folder, "can be written by others", caplog, heals=False)


def test_what_others_may_only_read_is_fine(folder, entry):
    folder.chmod(0o755)
    entry.chmod(0o644)
    assert stored(folder) == {"a"}


def test_a_link_in_the_place_of_the_file(folder, entry, tmp_path, caplog):
    target = tmp_path / "elsewhere"
    entry.rename(target)
    entry.symlink_to(target)
    before = target.read_bytes()
    is_left_alone(folder, "symbolic link", caplog)
    assert target.read_bytes() == before


def test_a_link_in_the_place_of_the_folder(folder, tmp_path, caplog):
    link = tmp_path / "link"
    link.symlink_to(folder)
    is_left_alone(link, "symbolic link", caplog, heals=False)


def test_a_pipe_in_the_place_of_the_file(folder, entry, caplog):
    entry.unlink()
    os.mkfifo(entry)
    is_left_alone(folder, "no regular file", caplog)  # and does not hang


def test_a_folder_in_the_place_of_the_file(folder, entry, caplog):
    entry.unlink()
    entry.mkdir()
    is_left_alone(folder, "no regular file", caplog, heals=False)
    assert list(folder.glob(".writing*")) == []


def test_a_pipe_in_the_place_of_the_folder(tmp_path, caplog):
    os.mkfifo(tmp_path / "pipe")
    is_left_alone(tmp_path / "pipe", "no folder", caplog, heals=False)


def test_a_link_in_the_place_of_the_lock(folder, tmp_path):
    (lock,) = folder.glob(".lock-*")
    lock.unlink()
    lock.symlink_to(tmp_path / "made by following it")
    assert process(folder, "b")[0].save(key()).status == "failed"
    assert not (tmp_path / "made by following it").exists()


def test_the_folder_is_exchanged_while_it_is_used(folder, tmp_path, monkeypatch):
    """What was checked is what is used, whatever the path names by then."""
    evil = tmp_path / "evil"
    process(evil, "evil")[0].save(key())
    original = os.fstat

    def fstat(descriptor):
        if folder.exists() and evil.exists():
            folder.rename(tmp_path / "old")
            evil.rename(folder)
        return original(descriptor)

    monkeypatch.setattr(os, "fstat", fstat)
    assert stored(folder) == {"a"}
    monkeypatch.undo()
    assert stored(folder) == {"evil"}


# -- Planted code ----------------------------------------------------------------------------------


class Planted:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = os.fspath(path)

    def __reduce__(self):
        return (os.mkdir, (self.path,))


@pytest.mark.parametrize("has_right_hash", [False, True])
def test_planted_code_runs_only_with_the_right_hash(tmp_path, monkeypatch, has_right_hash):
    """With it, it does: so this would be seen, and so the folder must be nobody else's."""
    import torch._inductor.config

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", os.fspath(tmp_path / "inductor"))
    store, _ = process(tmp_path / "store", "a")
    store.save(key())
    (entry,) = (tmp_path / "store").glob("*.cache")
    proof = tmp_path / "it ran"
    good = join({"inductor": {"f" * 20: (pickle.dumps(1),)}})
    evil = join({"inductor": {"f" * 20: (pickle.dumps(Planted(proof)),)}})
    good += bytes(len(evil) - len(good))
    header = EntryHeader(
        work=dict(key().work),
        machine=dict(key().machine),
        artifacts={},
        payload_bytes=len(evil),
        payload_sha256=hashlib.sha256(evil if has_right_hash else good).hexdigest(),
        written_at="",
        torchfast="",
    )
    entry.write_bytes(b"".join(encode(header, evil)))
    with torch._inductor.config.patch(bundle_triton_into_fx_graph_cache=True):
        outcome = CacheStore(tmp_path / "store", artifacts=TorchArtifacts()).load(key())
    # What it returns is no graph, which torch 2.11 does not ask.
    assert outcome.status in ("ignored", "loaded")
    # Torch 2.11 opens what it was given only when it is wanted, later ones at once.
    alone = tmp_path / "it ran without us"
    with (
        torch._inductor.config.patch(bundle_triton_into_fx_graph_cache=True),
        contextlib.suppress(AttributeError),  # it is no graph
    ):
        torch.compiler.load_cache_artifacts(
            join({"inductor": {"e" * 20: (pickle.dumps(Planted(alone)),)}})
        )
    assert proof.exists() is (has_right_hash and alone.exists())


def test_what_torch_cannot_read(folder, caplog):
    class Old(Compiler):
        def load(self, payload):
            return None

    store = CacheStore(folder, artifacts=Old())
    assert "torch cannot read" in store.load(key()).detail
    assert len(caplog.records) == 1


def test_what_torch_cannot_read_is_replaced_though_nothing_was_compiled_anew(folder, entry):
    """Where torch's own cache of this machine has it all."""
    payload = b"nothing that torch reads"
    header = EntryHeader(
        work=dict(key().work),
        machine=dict(key().machine),
        artifacts={},
        payload_bytes=len(payload),
        payload_sha256=hashlib.sha256(payload).hexdigest(),
        written_at="",
        torchfast="",
    )
    entry.write_bytes(b"".join(encode(header, payload)))
    compiler = Compiler()
    compiler.load = lambda payload: None if split(payload) is None else 1
    store = CacheStore(folder, artifacts=compiler)
    assert "torch cannot read" in store.load(key()).detail
    compiler.known = {"a": (b"of torch's own cache",)}
    compiler.compile("a")
    assert compiler.misses == 0
    assert store.save(key()).status == "saved"
    assert stored(folder) == {"a"}


@pytest.mark.parametrize("method", ["load", "save", "counts", "switched_off"])
def test_whatever_torch_raises_stays_inside(folder, method):
    def failing(*_):
        raise RecursionError("torch is in trouble")

    compiler = Compiler().compile("b")
    setattr(compiler, method, failing)
    store = CacheStore(folder, artifacts=compiler)
    outcomes = [store.load(key()), store.outcome(), store.save(key())]
    assert any("torch is in trouble" in outcome.detail for outcome in outcomes)
