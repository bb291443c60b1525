"""The store of compiled artifacts: what is kept, merged, found again and evicted."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from torch.utils._appending_byte_serializer import AppendingByteSerializer

from compile_stores import Compiler, key, process, stored
from faults import faulty
from torchfast.compiler import store as store_module
from torchfast.compiler.machine import _lasting
from torchfast.compiler.store import CacheStore
from torchfast.compiler.store_artifacts import join, merged, split
from torchfast.compiler.store_contents import list_entries
from torchfast.compiler.store_key import StoreKey, machine_facts, store_key

# Products only: inductor has no C++ to build for them, so that it compiles in seconds.
REAL = """
import json, sys
import torch
from torchfast.compiler.store import CacheStore
from torchfast.compiler.store_key import store_key

torch.set_num_threads(1)
torch.manual_seed(0)
folder, sizes = sys.argv[1], json.loads(sys.argv[2])
model = torch.nn.Linear(8, 4, bias=False)
store = CacheStore(folder)
key = store_key(model, options={"mode": "default"})
loaded = store.load(key).status
compiled = torch.compile(model, dynamic=False)
sums = []
for size in sizes:
    x = torch.randn(size, 8, requires_grad=True)
    y = compiled(x)
    y.backward(torch.ones_like(y))
    sums += [y.sum().item(), x.grad.sum().item()]
    between = store.save(key)
outcome = store.outcome()
print(json.dumps({
    "key": key.name,
    "loaded": loaded,
    "outcome": outcome.status,
    "detail": outcome.detail,
    "saved": store.save(key).status,
    "between": between.status,
    "sums": sums,
}))
"""


def real(tmp_path, name, sizes, *, fresh=True):
    """Run a process that starts with nothing but the store; a fresh one has hashes of its own."""
    environment = {
        "TORCHINDUCTOR_CACHE_DIR": os.fspath(tmp_path / name),
        "PYTHONHASHSEED": "random",
    }
    finished = faulty.run(
        REAL, tmp_path / "store", json.dumps(sizes), environment=environment, fresh=fresh
    )
    return json.loads(finished.stdout.splitlines()[-1])


# -- With torch itself -----------------------------------------------------------------------------


def test_a_new_process_compiles_nothing_that_another_has_compiled(tmp_path):
    # Saved twice: torch alone would load only what came with the second save.
    cold = real(tmp_path, "cold", [3, 5])
    assert cold["loaded"] == cold["outcome"] == "miss"
    assert (cold["between"], cold["saved"]) == ("saved", "nothing new")
    warm = real(tmp_path, "warm", [3, 5])
    assert warm["key"] == cold["key"]
    # A forward, a backward and both as a whole, for each of two sizes.
    assert (warm["outcome"], warm["detail"]) == ("hit", "6 of 6 looked up were found")
    assert warm["saved"] == "nothing new"
    assert warm["sums"] == cold["sums"]
    # Damaged: it is compiled as if there were none, and stored anew.
    (entry,) = (tmp_path / "store").glob("*.cache")
    data = bytearray(entry.read_bytes())
    data[-1] ^= 1
    entry.write_bytes(data)
    damaged = real(tmp_path, "damaged", [3], fresh=False)
    assert damaged["loaded"] == damaged["outcome"] == "ignored"
    assert damaged["between"] == "saved"
    assert damaged["sums"] == cold["sums"][:2]


def test_torch_alone_loses_all_but_the_last_save():
    """If this fails, torch has mended it."""
    from torch.compiler._cache import (
        CacheArtifactFactory,
        CacheArtifactManager,
        _serialize_single_cache,
    )

    CacheArtifactManager._ensure_cache_artifacts_registered()
    serializer = AppendingByteSerializer(serialize_fn=_serialize_single_cache)
    for name in ("first", "second"):
        artifact = CacheArtifactFactory.create("inductor", name, b"content")
        serializer.extend({"inductor": [artifact]}.items())
    payload = serializer.to_bytes()
    assert [a.key for a in CacheArtifactManager.deserialize(payload)["inductor"]] == ["second"]
    ours = join(split(payload))
    keys = [a.key for a in CacheArtifactManager.deserialize(ours)["inductor"]]
    assert keys == ["first", "second"]


# -- Saving and loading ----------------------------------------------------------------------------


def test_what_one_process_saves_the_next_one_finds(tmp_path):
    store, first = process(tmp_path, "a", "b")
    assert store.load(key()).status == "miss"
    saved = store.save(key())
    assert (saved.status, saved.num_artifacts) == ("saved", 2)
    store, second = process(tmp_path)
    loaded = store.load(key())
    assert (loaded.status, loaded.num_artifacts) == ("loaded", 2)
    assert loaded.num_bytes == saved.num_bytes > 0
    assert second.known == first.used
    assert store.outcome().status == "loaded"
    second.compile("a", "new")
    assert str(store.outcome()) == "hit: 1 of 2 looked up were found"


def test_what_is_of_no_use_is_told(tmp_path, caplog):
    process(tmp_path, "a")[0].save(key())
    store, compiler = process(tmp_path)
    store.load(key())
    compiler.compile("b")
    assert store.outcome().status == store.outcome().status == "loaded but nothing was used"
    assert len(caplog.records) == 1


def test_what_cannot_be_cached_is_told(tmp_path):
    process(tmp_path, "a")[0].save(key())
    store, compiler = process(tmp_path)
    store.load(key())
    compiler.bypasses = 2
    assert store.outcome().status == "loaded but nothing was used"
    compiler.compile("a")
    assert str(store.outcome()) == ("hit: 1 of 1 looked up were found, and 2 cannot be in a cache")


def test_counters_that_somebody_clears(tmp_path):
    process(tmp_path, "a")[0].save(key())
    store, compiler = process(tmp_path, *"wxyz")
    store.load(key())
    compiler.hits, compiler.misses = 1, 0
    assert str(store.outcome()) == "hit: 1 of 1 looked up were found"


def test_caches_that_are_switched_off(tmp_path, caplog):
    process(tmp_path, "a")[0].save(key())
    store, compiler = process(tmp_path)
    compiler.off = "a setting"
    assert str(store.load(key())) == "ignored: torch's caches are off: a setting"
    assert compiler.payloads == []
    assert len(caplog.records) == 1


def test_nothing_compiled_writes_nothing(tmp_path):
    folder = tmp_path / "store"
    assert process(folder)[0].save(key()).status == "nothing compiled"
    assert not folder.exists()


def test_keys_do_not_mix(tmp_path):
    process(tmp_path, "a")[0].save(key("one"))
    process(tmp_path, "b")[0].save(key("two"))
    assert stored(tmp_path, key("one")) == {"a"}
    assert stored(tmp_path, key("two")) == {"b"}


@pytest.mark.parametrize("fact", ["torch", "device_name"])
def test_another_machine(tmp_path, caplog, fact):
    process(tmp_path, "a")[0].save(key())
    store, compiler = process(tmp_path)
    outcome = store.load(key(**{fact: "another"}))
    assert outcome.status == "incompatible"
    assert f"made with {fact} " in outcome.detail
    assert "and not another" in outcome.detail
    assert compiler.payloads == []
    assert len(caplog.records) == 1


def test_another_rank_of_the_same_machine(tmp_path, caplog):
    process(tmp_path, "a")[0].save(key(device="cuda:0"))
    store, _ = process(tmp_path)
    assert str(store.load(key(device="cuda:1"))) == "miss: no entry"
    assert caplog.records == []
    assert store.load(key(device="cuda:1", torch="9")).status == "incompatible"


# -- Merging ---------------------------------------------------------------------------------------


def test_what_a_process_did_not_use_stays(tmp_path):
    process(tmp_path, "a", "b")[0].save(key())
    store, compiler = process(tmp_path)
    store.load(key())
    compiler.compile("b", "c")
    assert store.save(key()).num_artifacts == 3
    assert stored(tmp_path) == {"a", "b", "c"}


def test_what_another_saved_meanwhile_stays(tmp_path):
    one, _ = process(tmp_path, "a")
    two, _ = process(tmp_path, "b")
    for store in (one, two):
        store.load(key())
    one.save(key())
    two.save(key())
    assert stored(tmp_path) == {"a", "b"}


@pytest.mark.parametrize("has_loaded", [True, False])
def test_nothing_new_is_not_written(tmp_path, has_loaded):
    process(tmp_path, "a")[0].save(key())
    (path,) = tmp_path.glob("*.cache")
    before = path.stat()
    store, compiler = process(tmp_path)
    if has_loaded:
        store.load(key())
    compiler.compile("a")  # without loading: the same again, in other bytes
    assert store.save(key()).status == "nothing new"
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_graph_compiled_in_spite_of_what_was_loaded_is_kept_too(tmp_path):
    """One key has several contents for other sizes of a dynamic shape."""
    process(tmp_path, "a")[0].save(key())
    for expected in (2, 3):
        store, compiler = process(tmp_path)
        store.load(key())
        compiler.compile("a", fits=False)
        saved = store.save(key())
        assert (saved.status, saved.num_artifacts) == ("saved", expected)


def test_contents_of_one_key_are_bounded():
    found = {}
    for number in range(20):
        found = merged(found, {"kind": {"key": (bytes([number]),)}}, {"kind": {"key": ()}})
    assert found["kind"]["key"] == tuple(bytes([number]) for number in range(12, 20))


def test_bytes_of_an_unknown_form_are_kept_whole(tmp_path):
    class Strange(Compiler):
        def save(self):
            return b"of another torch"

        def load(self, payload):
            self.payloads.append(payload)
            return 1

    store = CacheStore(tmp_path, artifacts=Strange())
    assert store.save(key()).status == "saved"
    assert store.save(key()).status == "nothing new"
    strange = Strange()
    assert CacheStore(tmp_path, artifacts=strange).load(key()).status == "loaded"
    assert strange.payloads == [b"of another torch"]


def test_split_takes_anything():
    payload = join({"inductor": {"k": (b"1", b"2")}, "pgo": {"k": (b"1",)}})
    assert split(payload) == {"inductor": {"k": (b"1", b"2")}, "pgo": {"k": (b"1",)}}
    for size in range(len(payload)):
        assert split(payload[:size]) is None
    assert split(b"") is None


# -- Room ------------------------------------------------------------------------------------------


def names(folder):
    return {entry.header.work["model_class"] for entry in list_entries(folder)}


def fill(folder, *models, max_bytes):
    for model in models:
        store, _ = process(folder, "a", num_bytes=10_000, max_bytes=max_bytes)
        assert store.save(key(model)).status == "saved"


def test_the_least_recently_used_goes_whatever_the_clock_says(tmp_path):
    fill(tmp_path, "one", "two", "three", max_bytes=35_000)
    assert process(tmp_path)[0].load(key("one")).status == "loaded"
    for age, path in enumerate(sorted(tmp_path.glob("*.cache"))):
        os.utime(path, (age, age))
    # By times the one just used would be as likely to go as any.
    (used,) = [e.name for e in list_entries(tmp_path) if e.header.work["model_class"] == "one"]
    os.utime(tmp_path / used, (0, 0))
    fill(tmp_path, "four", max_bytes=35_000)
    assert names(tmp_path) == {"one", "three", "four"}
    assert len(list(tmp_path.glob("*.use"))) == 3


def test_what_was_just_written_stays_though_it_leaves_no_room(tmp_path):
    fill(tmp_path, "one", "two", max_bytes=12_000)
    assert names(tmp_path) == {"two"}


def test_it_stays_too_if_its_account_cannot_be_written(tmp_path, monkeypatch):
    def touch(*_, **__):
        raise OSError(28, "No space left on device")

    fill(tmp_path, "one", max_bytes=12_000)
    monkeypatch.setattr(store_module, "touch", touch)
    fill(tmp_path, "two", max_bytes=12_000)
    assert names(tmp_path) == {"two"}


def test_what_can_never_fit_is_not_written(tmp_path, caplog):
    fill(tmp_path, "one", max_bytes=12_000)
    store, _ = process(tmp_path, "a", num_bytes=20_000, max_bytes=12_000)
    outcome = store.save(key("two"))
    assert outcome.status == "failed"
    assert "max_bytes is 12000" in outcome.detail
    assert len(caplog.records) == 1
    assert names(tmp_path) == {"one"}


def test_files_of_others_do_not_count_and_stay(tmp_path):
    (tmp_path / "notes").write_bytes(bytes(100_000))
    fill(tmp_path, "one", "two", max_bytes=25_000)
    assert names(tmp_path) == {"one", "two"}
    assert (tmp_path / "notes").stat().st_size == 100_000


def test_uses_are_counted(tmp_path):
    process(tmp_path, "a")[0].save(key())
    for _ in range(3):
        process(tmp_path)[0].load(key())
    (entry,) = list_entries(tmp_path)
    assert (entry.uses, entry.last_used) == (3, 4)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"counter": "1"}', '{"counter": true}', "[" * 4000]
)
def test_a_damaged_account_is_none(tmp_path, text):
    process(tmp_path, "a")[0].save(key())
    (account,) = tmp_path.glob("*.use")
    account.write_text(text)
    assert list_entries(tmp_path)[0].uses == 0
    assert stored(tmp_path) == {"a"}
    assert list_entries(tmp_path)[0].uses == 1


# -- Keys ------------------------------------------------------------------------------------------


@dataclass
class Options:
    mode: str = "default"
    sizes: set = field(default_factory=lambda: {"b", "a"})


def test_a_key_knows_what_it_is_for():
    model, batch = nn.Linear(2, 3), torch.zeros(4, 2)
    same = store_key(model, batch=batch, options=Options(), plan={"a": 1, "b": torch.bfloat16})
    again = store_key(
        nn.Linear(2, 3), batch=batch + 1, options=Options(), plan={"b": torch.bfloat16, "a": 1}
    )
    assert same == again
    assert same.name == again.name
    others = [
        store_key(nn.Linear(2, 4), batch=batch, options=Options(), plan=same.work["plan"]),
        store_key(model, batch=batch[:2], options=Options()),
        store_key(model, batch=batch, options=Options(mode="max-autotune")),
        store_key(model, batch=batch, options=Options(), plan={"a": 2}),
    ]
    assert len({other.work_prefix for other in (same, *others)}) == 5
    assert same.work["options"] == '{"Options": {"mode": "default", "sizes": ["a", "b"]}}'


def test_a_key_knows_the_machine(monkeypatch):
    before = machine_facts(torch.device("cpu"))
    assert before == machine_facts(torch.device("cpu"))
    assert all(isinstance(value, str) and value for value in before.values())
    monkeypatch.setattr(torch, "__version__", "3.0")
    with torch._inductor.config.patch(max_autotune=True):
        after = machine_facts(torch.device("cpu"))
    assert {name for name in before if before[name] != after[name]} == {"torch", "settings"}
    keys = [StoreKey(work={}, machine=facts) for facts in (before, after)]
    assert keys[0].name != keys[1].name
    assert keys[0].work_prefix == keys[1].work_prefix


def test_settings_are_told_the_same_in_every_process():
    assert _lasting({"s": {"b", "a"}, "f": os.path.join, "o": Options()}) == [
        ("f", "posixpath.join"),
        ("o", f"{__name__}.Options"),
        ("s", ['"a"', '"b"']),
    ]


def test_what_is_no_key():
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got 3"):
        store_key(3)
    with pytest.raises(TypeError, match=r"options holds .*lambda.* no text that lasts"):
        store_key(nn.Linear(1, 1), options={"f": lambda: 0})


# -- Arguments -------------------------------------------------------------------------------------


def test_bad_arguments(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(TypeError, match="folder must be the path of a folder, got 3"):
        CacheStore(3)
    with pytest.raises(ValueError, match="folder='' names no folder"):
        CacheStore("")  # it would be the working directory
    with pytest.raises(ValueError, match=r"begins with '~'"):
        CacheStore("~/cache")
    with pytest.raises(ValueError, match="is a file, expected a folder"):
        CacheStore(tmp_path / "file")
    with pytest.raises(ValueError, match="max_bytes must be >= 1, got 0"):
        CacheStore(tmp_path, max_bytes=0)
    with pytest.raises(ValueError, match="lock_wait_s must be > 0"):
        CacheStore(tmp_path, lock_wait_s=0)
    with pytest.raises(TypeError, match="did you mean 'max_bytes'"):
        CacheStore(tmp_path, max_byte=1)
