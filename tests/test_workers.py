"""Loaders with worker processes: what is chosen, and from how many cores."""

from __future__ import annotations

import gc
import multiprocessing
import os
import warnings

import pytest
import torch
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, Subset

from torchfast import (
    MonitoredDataLoader,
    PrefetchingLoader,
    UnsupportedDeviceError,
    build_dataloader,
    sweep_workers,
)
from torchfast.data import workers
from worker_data import IN_MEMORY, At, Quick, Slow, Stream, let_torch_count, no_process_left


class Shards(Stream):
    num_shards = 3


@pytest.fixture(autouse=True)
def no_process_is_left():
    with no_process_left():
        yield


@pytest.fixture(autouse=True)
def many_cores_for_torch(monkeypatch):
    # It warns of more workers than cores, whatever machine the tests are on.
    let_torch_count(monkeypatch, 64)


def test_torch_warns_by_the_cores_that_it_is_let_see(monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DataLoader(Quick(), num_workers=64)
    let_torch_count(monkeypatch, 1)
    with pytest.warns(UserWarning, match="This DataLoader will create 2 worker processes"):
        DataLoader(Quick(), num_workers=2)


@pytest.fixture
def cores(monkeypatch):
    def have(number, ranks=1):
        monkeypatch.setattr(workers, "usable_cores", lambda: number)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))

    return have


def options(loader):
    return {
        name: getattr(loader, name)
        for name in ("num_workers", "pin_memory", "persistent_workers", "prefetch_factor")
    } | {"timeout": loader.timeout}


def reason(loader, lever):
    return next(d.detail for d in loader.report().decisions if d.lever == lever)


# --- what is chosen -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "ranks", "expected"), [(1, 1, 0), (2, 1, 1), (6, 1, 5), (64, 1, 8), (8, 4, 1)]
)
def test_one_core_is_left_to_the_main_process(cores, number, ranks, expected):
    cores(number, ranks)
    loader = build_dataloader(Quick(), 1, device="cpu")
    assert loader.num_workers == expected
    assert "core" in reason(loader, "num_workers")


def test_no_more_workers_than_batches(cores):
    cores(8)
    assert build_dataloader(Quick(), 4).num_workers == 4
    assert build_dataloader(Quick(), 16).num_workers == 0
    assert build_dataloader(Quick(), 3, drop_last=True).num_workers == 5


@pytest.mark.parametrize(
    "dataset",
    [IN_MEMORY, Subset(IN_MEMORY, [0, 1, 2]), ConcatDataset([IN_MEMORY] * 2), [1.0] * 9],
    ids=["tensors", "subset", "concatenation", "list"],
)
def test_samples_in_memory_get_no_workers(cores, dataset):
    cores(8)
    loader = build_dataloader(dataset, 2)
    assert options(loader) == {
        "num_workers": 0,
        "pin_memory": False,
        "persistent_workers": False,
        "prefetch_factor": None,
        "timeout": 0,
    }
    assert "in memory" in reason(loader, "num_workers")
    # A function that makes the batch may be the work.
    assert build_dataloader(dataset, 1, collate_fn=torch.stack).num_workers > 0


def test_an_iterable_data_set_gets_workers_only_if_it_divides_itself(cores):
    cores(8)
    loader = build_dataloader(Stream(), 4)
    assert loader.num_workers == 0
    assert "get_worker_info" in reason(loader, "num_workers")
    assert build_dataloader(Shards(), 4).num_workers == 3


def test_workers_stay_unless_that_would_be_wrong_or_waste(cores):
    cores(4)
    assert build_dataloader(Quick(), 2).persistent_workers
    told = Quick()
    told.set_epoch = lambda epoch: None
    loader = build_dataloader(told, 2)
    assert not loader.persistent_workers
    assert "set_epoch" in reason(loader, "persistent_workers")
    assert not build_dataloader(Quick(), 16, num_workers=2).persistent_workers


class Told(Quick):
    said = 0

    def __getitem__(self, index):
        return torch.tensor(self.said)


@pytest.mark.parametrize("persistent", ["auto", False])
def test_workers_that_stay_see_no_change_of_the_data_set(persistent):
    dataset = Told()
    loader = build_dataloader(dataset, 2, num_workers=2, persistent_workers=persistent)
    for said in range(2):
        dataset.said = said
        seen = {int(batch[0]) for batch in loader}
        assert seen == {0 if loader.persistent_workers else said}
    assert loader.persistent_workers == (persistent == "auto")


def test_workers_that_stay_are_the_dataloaders_to_end():
    loader = build_dataloader(Quick(), 2, num_workers=2)
    with PrefetchingLoader(loader, "cpu") as batches:
        assert len(list(batches)) == 8
    assert len(multiprocessing.active_children()) == 2
    assert len(list(loader)) == 8
    del batches, loader
    gc.collect()
    assert multiprocessing.active_children() == []


def test_memory_is_pinned_for_cuda_and_workers_only(monkeypatch):
    def pins(kind, count, recycle=False):
        device = None if kind is None else torch.device(kind)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: device)
        loader = build_dataloader(Quick(), 2, num_workers=count, recycle_memory=recycle)
        return loader.pin_memory

    assert pins("cuda", 2)
    assert not pins("cuda", 2, recycle="auto")  # a PrefetchingLoader pins the workers' memory
    assert not pins("cuda", 0)
    assert not pins(None, 2)
    assert not pins("mps", 2)


def test_what_is_given_wins():
    given = {
        "num_workers": 2,
        "pin_memory": True,
        "persistent_workers": False,
        "prefetch_factor": 5,
        "timeout": 0,
    }
    loader = build_dataloader(IN_MEMORY, 2, **given)
    assert options(loader) == given
    assert isinstance(loader, DataLoader)
    assert str(loader.report()).count("as asked") == 5


def test_options_of_workers_step_aside_if_there_are_none():
    loader = build_dataloader(IN_MEMORY, 2, timeout=5, multiprocessing_context="spawn")
    assert [d.lever for d in loader.report().stepped_aside] == [
        "timeout",
        "multiprocessing_context",
    ]
    assert len(list(loader)) == 16


def test_a_loader_that_was_not_built_has_an_empty_report():
    assert MonitoredDataLoader(IN_MEMORY).report().decisions == ()


def shuffled(make):
    return make(IN_MEMORY, 4, shuffle=True, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    "build",
    [
        shuffled,
        lambda make: make(Quick(), 3, num_workers=2, drop_last=True),
        lambda make: make(Quick(), batch_sampler=BatchSampler(range(9), 2, False), num_workers=1),
        lambda make: make(Quick(), None, num_workers=1),
        lambda make: make(Stream(), 5),
        lambda make: make(Quick(), 2, sampler=[3, 1, 2], collate_fn=list),
    ],
    ids=["shuffle", "drop_last", "batch_sampler", "batch_size=None", "iterable", "sampler"],
)
def test_the_batches_are_those_of_torch(build):
    # The number of threads in a sample is that of the process: 1 in either.
    assert repr(list(build(build_dataloader))) == repr(list(build(DataLoader)))


def test_a_worker_has_one_thread():
    torch.set_num_threads(2)
    try:
        batches = list(build_dataloader(Quick(), 4, num_workers=1))
    finally:
        torch.set_num_threads(1)
    assert {count for batch in batches for count in batch["threads"].tolist()} == {1}


def test_a_worker_starts_no_workers():
    inner = list(build_dataloader(At(lambda: None), None, num_workers=1, collate_fn=InWorker()))
    assert inner == [0] * 16


class InWorker:
    def __call__(self, sample):
        return build_dataloader(Quick(), 2).num_workers


# --- cores --------------------------------------------------------------------------------------


def group(root, name, **files):
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in files.items():
        (folder / file.replace("__", ".")).write_text(text)


def test_a_quota_of_cgroups_2_is_that_of_the_narrowest_parent(tmp_path):
    group(tmp_path, "fs/pod/box", cpu__max="800000 100000\n")
    group(tmp_path, "fs/pod", cpu__max="350000 100000\n")
    (tmp_path / "self").write_text("0::/pod/box\n")
    assert workers._cgroup_cores(tmp_path / "self", tmp_path / "fs") == 3
    group(tmp_path, "fs/pod", cpu__max="max 100000\n")
    assert workers._cgroup_cores(tmp_path / "self", tmp_path / "fs") == 8


def test_a_quota_of_cgroups_1(tmp_path):
    group(tmp_path, "fs/cpu", cpu__cfs_quota_us="200000\n", cpu__cfs_period_us="100000\n")
    (tmp_path / "self").write_text("5:memory:/host\n4:cpu,cpuacct:/host/path\n")
    assert workers._cgroup_cores(tmp_path / "self", tmp_path / "fs") == 2
    group(tmp_path, "fs/cpu", cpu__cfs_quota_us="-1\n")
    assert workers._cgroup_cores(tmp_path / "self", tmp_path / "fs") > 1000


def test_cores_without_affinity_and_with_a_quota(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    monkeypatch.setattr(workers, "_cgroup_cores", lambda: 5)
    assert workers.usable_cores() == 5
    monkeypatch.setattr(workers, "_cgroup_cores", lambda: 0)
    assert workers.usable_cores() == 1


def test_no_cgroups_at_all(tmp_path):
    assert workers._cgroup_cores(tmp_path / "none", tmp_path) > 1000


# --- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [build_dataloader, sweep_workers])
@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"dataset": 3}, TypeError, r"dataset must be a map-style .* got int 3"),
        ({"dataset": Quick}, TypeError, r"dataset must be .* got type <class"),
        ({"dataset": DataLoader(IN_MEMORY)}, TypeError, r"dataset must be .* got DataLoader"),
        ({"dataset": type("NoLen", (), {"__getitem__": max})()}, TypeError, r"has no __len__"),
        ({"batch_size": 2.0}, TypeError, r"batch_size must be an int >= 1, got 2.0"),
        ({"batch_size": 0}, ValueError, r"batch_size must be >= 1, got 0"),
        ({"shuffle": 1}, TypeError, r"shuffle must be True or False, got 1 \(int\)"),
        ({"pin_memory": "yes"}, TypeError, r"pin_memory must be 'auto', True or False, got 'yes'"),
        ({"prefetch_factor": 0}, ValueError, r"prefetch_factor must be >= 1, got 0"),
        ({"timeout": "long"}, TypeError, r"timeout must be 'auto' or a number .* got 'long'"),
        ({"timeout": -1}, ValueError, r"timeout must be a finite number .* got -1"),
        ({"timeout": float("nan")}, ValueError, r"timeout must be a finite number .* got nan"),
        ({"collate_fn": 3}, TypeError, r"collate_fn must be callable as collate_fn\(samples\)"),
        ({"generator": 7}, TypeError, r"generator must be a torch.Generator or None, got 7"),
        ({"device": "gpu"}, ValueError, r"did you mean 'cuda'"),
        ({"device": "xpu"}, UnsupportedDeviceError, r"has no xpu"),
        ({"num_worker": 3}, TypeError, r"has no argument 'num_worker'; did you mean"),
        ({"multiprocessing_context": "thread"}, ValueError, r"valid start method"),
    ],
)
def test_bad_input(call, given, error, message):
    given = {"dataset": Slow(), **given}
    if call is build_dataloader and "multiprocessing_context" in given:
        given["num_workers"] = 1
    with pytest.raises(error, match=message):
        call(**given)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"num_workers": "many"}, TypeError, r"num_workers must be 'auto' or an int .* got 'many'"),
        ({"num_workers": True}, TypeError, r"num_workers must be 'auto' or an int .* got True"),
        ({"num_workers": -1}, ValueError, r"num_workers must be >= 0, got -1"),
        ({"persistent_workers": 1}, TypeError, r"persistent_workers must be 'auto', True or False"),
        ({"num_workers": 0, "timeout": 9}, ValueError, r"timeout=9 needs worker processes, but"),
        ({"num_workers": 0, "persistent_workers": True}, ValueError, r"persistent_workers=True ne"),
    ],
)
def test_bad_input_to_build(given, error, message):
    with pytest.raises(error, match=message):
        build_dataloader(Slow(), **given)
